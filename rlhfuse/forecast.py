"""What an iteration is expected to take, phase by phase, from the iterations before it.

    reshard   moving weights                          the median of the iterations before
    gen       until the last sample is generated      the simulator, with costs fitted to them
    infer     from then until all are scored          the same
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
from dataclasses import dataclass
from typing import Mapping, Sequence

from rlhfuse.errors import InputError
from rlhfuse.schedule.action import Action, Kind
from rlhfuse.schedule.program import Programs
from rlhfuse.schedule.program_times import TimedAction, makespan, program_times
from rlhfuse.schedule.ranks import FusedRanks
from rlhfuse.simulator.lines import Line
from rlhfuse.timeline import StageTimes

PARTS = ("reshard", "gen", "infer", "adv", "train")
PHASES = (*PARTS, "step")
RECENT_ITERATIONS = 8


@dataclass(frozen=True)
class Measured:
    """An iteration that has run: seconds of every phase, its tokens, and how long its training's actions took."""

    seconds: Mapping[str, float]
    tokens: int
    minibatches: int
    stage_times: StageTimes


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

    def predict(self, gen: float, gen_infer: float, tokens: float) -> dict[str, float]:
        """Seconds of every phase, for generation and inference as simulated and so many tokens in the batch."""
        between = self._median(lambda one: one.seconds["step"] - sum(one.seconds[part] for part in PARTS))
        seconds = {
            "reshard": self._median(lambda one: one.seconds["reshard"]),
            "gen": gen,
            "infer": gen_infer - gen,
            "adv": self._line([one.seconds["adv"] for one in self._recent])(tokens),
            "train": self._train_seconds(tokens),
        }
        return {**seconds, "step": sum(seconds.values()) + between}

    def step_times(self, tokens: float) -> dict[int, tuple[TimedAction, ...]]:
        """One mini-batch of a batch of `tokens`, every rank on a core or GPU of its own."""
        lines: dict[tuple[str, int, str], Line] = {}

        def seconds(action: Action) -> float:
            key = (action.pipeline, action.stage, str(action.kind))
            if key not in lines:
                means = [one.stage_times.mean(action) for one in self._recent]
                grows = action.kind in (Kind.F, Kind.B, Kind.W)
                lines[key] = self._line(means) if grows else Line(statistics.median(means), (0.0,))
            return lines[key](tokens)

        return program_times(self._programs, self._ranks, seconds)

    def _train_seconds(self, tokens: float) -> float:
        """The mini-batches' makespans, and what lay between them and on their ranks."""
        latest = self._recent[-1]
        between = self._median(
            lambda one: one.seconds["train"]
            - one.minibatches * makespan(one.stage_times.step_times(self._programs, self._ranks))
        )
        return latest.minibatches * makespan(self.step_times(tokens)) + between

    def _line(self, seconds: Sequence[float]) -> Line:
        """Of the recent iterations' seconds over their tokens."""
        return Line.fit([(one.tokens,) for one in self._recent], seconds)

    def _median(self, value) -> float:
        return statistics.median(value(one) for one in self._recent)


@dataclass(frozen=True)
class PhaseError:
    """One phase over several iterations: sums of seconds, and how far each prediction was off, in seconds."""

    phase: str
    measured: float
    predicted: float
    blind: float
    off: float  # sum of |predicted - measured|
    blind_off: float

    @property
    def error(self) -> float:
        """Of the phase's time, with the lengths known."""
        return self.off / self.measured if self.measured else 0.0

    @property
    def blind_error(self) -> float:
        """The same without them."""
        return self.blind_off / self.measured if self.measured else 0.0


def phase_errors(rows: Sequence[Mapping[str, float]]) -> tuple[PhaseError, ...]:
    """Predicted against measured over the metrics lines that hold a prediction. Raises InputError when none does."""
    rows = [row for row in rows if forecast_key("step") in row]
    if not rows:
        raise InputError("no iteration holds a forecast; it begins with the second iteration of a run")
    found = []
    for phase in PHASES:
        measured = [row[f"timing_s/{phase}"] for row in rows]
        sides = [[row[forecast_key(phase, blind)] for row in rows] for blind in (False, True)]
        off = [sum(abs(p - m) for p, m in zip(side, measured)) for side in sides]
        found.append(PhaseError(phase, sum(measured), sum(sides[0]), sum(sides[1]), *off))
    return tuple(found)


def mean_error(errors: Sequence[PhaseError], blind: bool = False) -> float:
    """Over the phases, the whole iteration among them, each counting the same."""
    return statistics.mean(one.blind_error if blind else one.error for one in errors)


def forecast_key(phase: str, blind: bool = False) -> str:
    """The metric that holds a phase's prediction; `blind`: without knowing the iteration's lengths."""
    return f"forecast_{'blind_' if blind else ''}s/{phase}"
