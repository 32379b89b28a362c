"""What an iteration is expected to take, phase by phase, from the iterations before it.

    reshard   moving weights                          the median of the iterations before
    gen       until the last sample is generated      the simulator, with costs fitted to them
    infer     from then until all are scored          the same, and the median of what lay before the first step and
                                                      after the last score
    adv       rewards and advantages                  a line over tokens, fitted to them
    train     all mini-batches                        a line over tokens for every stage's forward and backward, laid
                                                      out in the order of the ranks' programs, and what lay between
    step      the whole iteration                     their sum, and what lay between

Nothing of the iteration itself is used but its lengths, and those only where the caller gives them. The first iteration
of a run compiles kernels and allocates: it counts as long as there is no other.

Knows nothing of how lengths come about or of how R_t is chosen. Paper section 6.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlhfuse.costs.lines import Line
from rlhfuse.errors import InputError
from rlhfuse.fusion.inter.placement import Placement
from rlhfuse.monitor.report.forecast_table import PARTS, PHASES, forecast_key
from rlhfuse.monitor.trace import Span
from rlhfuse.run.timeline import StageTimes, gen_infer_spans, phase_spans, training_spans
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.ranks import FusedRanks
from rlhfuse.schedule.program.program import Programs
from rlhfuse.schedule.program.times import TimedAction, makespan, program_times
from rlhfuse.simulator.iteration import GenInferTimeline

RECENT_ITERATIONS = 8


@dataclass(frozen=True)
class Measured:
    """An iteration that has run: seconds of every phase, its tokens, and how long its training's actions took.

    `start`, `gather`: seconds of generation with inference before the first step and after the last score.
    """

    seconds: Mapping[str, float]
    tokens: int
    minibatches: int
    stage_times: StageTimes
    start: float = 0.0
    gather: float = 0.0


@dataclass(frozen=True)
class Batch:
    """Generation and inference of a batch as simulated, and the batch's tokens."""

    timeline: GenInferTimeline
    tokens: int


@dataclass(frozen=True)
class Forecast:
    """An iteration as it was expected: seconds of every phase, and what its time line is drawn from."""

    known: Mapping[str, float]  # with the iteration's lengths
    blind: Mapping[str, float]  # with those of the iterations before: their mean
    timeline: GenInferTimeline
    step_times: Mapping[int, Sequence[TimedAction]]  # of one mini-batch, by rank
    start: float  # before the time line
    gather: float  # after it

    def metrics(self) -> dict[str, float]:
        return {
            forecast_key(phase, blind): seconds[phase]
            for blind, seconds in ((False, self.known), (True, self.blind))
            for phase in PHASES
        }

    def spans(self, placement: Placement, world: int, begin: float, starts: Sequence[float]) -> list[Span]:
        """The iteration from `begin` on, on all `world` ranks; `starts`: when its mini-batches were seen to start."""
        spans = phase_spans("reshard", range(world), begin, self.known["reshard"])
        begin += self.known["reshard"] + self.start
        spans += gen_infer_spans(self.timeline, placement, begin)
        begin += self.timeline.total_seconds + self.gather
        spans += phase_spans("adv", range(world), begin, self.known["adv"])
        return spans + training_spans(self.step_times, begin + self.known["adv"], starts)


class Forecaster:
    """Remembers recent iterations and prices the next one."""

    def __init__(self, programs: Programs, ranks: FusedRanks) -> None:
        self._programs, self._ranks = programs, ranks
        self._recent: deque[Measured] = deque(maxlen=RECENT_ITERATIONS)
        self._seen = 0

    @property
    def ready(self) -> bool:
        """Whether an iteration has been observed."""
        return self._seen > 0

    def observe(self, measured: Measured) -> None:
        """Take an iteration in. Raises InputError for a phase that is not there."""
        missing = [phase for phase in PHASES if phase not in measured.seconds]
        if missing:
            raise InputError(f"an iteration without seconds of {', '.join(missing)}; give {', '.join(PHASES)}")
        if self._seen == 1:
            self._recent.clear()  # the first one was no iteration like the others
        self._recent.append(measured)
        self._seen += 1

    def forecast(self, known: Batch, recent: Sequence[Batch]) -> Forecast:
        """Of an iteration with the batch `known`; and of one of which only the `recent` batches are known."""
        between = self._between_minibatches()
        lines: dict[tuple[str, int, str], Line] = {}  # what one batch needed, the next finds here
        each = [self._seconds(batch, between, lines) for batch in recent]
        blind = {phase: statistics.mean(seconds[phase] for seconds in each) for phase in PHASES}
        seconds = self._seconds(known, between, lines)
        return Forecast(seconds, blind, known.timeline, self._step_times(known.tokens, lines), *self._edges())

    def _seconds(
        self, batch: Batch, between_minibatches: float, lines: dict[tuple[str, int, str], Line]
    ) -> dict[str, float]:
        gen, tokens = batch.timeline.generation_seconds, batch.tokens
        between = self._median(lambda one: one.seconds["step"] - sum(one.seconds[part] for part in PARTS))
        seconds = {
            "reshard": self._median(lambda one: one.seconds["reshard"]),
            "gen": gen,
            "infer": batch.timeline.total_seconds - gen + sum(self._edges()),
            "adv": self._line([one.seconds["adv"] for one in self._recent])(tokens),
            "train": self._recent[-1].minibatches * makespan(self._step_times(tokens, lines)) + between_minibatches,
        }
        return {**seconds, "step": sum(seconds.values()) + between}

    def _edges(self) -> tuple[float, float]:
        """What lies before the first step and after the last score."""
        return self._median(lambda one: one.start), self._median(lambda one: one.gather)

    def _step_times(self, tokens: float, lines: dict[tuple[str, int, str], Line]) -> dict[int, tuple[TimedAction, ...]]:
        """One mini-batch of a batch of `tokens`, every rank on a core or GPU of its own; fills `lines`."""

        def seconds(action: Action) -> float:
            key = (action.pipeline, action.stage, str(action.kind))
            if key not in lines:
                means = [one.stage_times.mean(action) for one in self._recent]
                grows = action.kind in (Kind.F, Kind.B, Kind.W)
                lines[key] = self._line(means) if grows else Line(statistics.median(means), (0.0,))
            return lines[key](tokens)

        return program_times(self._programs, self._ranks, seconds)

    def _between_minibatches(self) -> float:
        """Seconds of training that are not the mini-batches' makespans: between them, and on their ranks."""
        return self._median(
            lambda one: (
                one.seconds["train"]
                - one.minibatches * makespan(one.stage_times.step_times(self._programs, self._ranks))
            )
        )

    def _line(self, seconds: Sequence[float]) -> Line:
        """Of the recent iterations' seconds over their tokens."""
        return Line.fit([(one.tokens,) for one in self._recent], seconds)

    def _median(self, value: Callable[[Measured], float]) -> float:
        return statistics.median(value(one) for one in self._recent)
