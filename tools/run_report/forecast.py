"""Predicted seconds of a run's phases, made from the files that the run wrote.

Weight moves, advantages and training follow the iterations before in metrics.jsonl: medians, and lines over tokens.
Generation and inference are simulated at the costs of costs.json, which are fitted to the run's last iterations; so
is the serial run that was not run. Predicted spans are laid beside the measured ones of trace.json. Paper section 6.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from run_report.program_times import TimedAction, makespan, program_times
from run_report.run_files import RunFiles
from run_report.timeline import GenInferTimeline, simulate_gen_infer

from rlhfuse.base.clock import Span
from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import read_json
from rlhfuse.config.spec import DeviceKind
from rlhfuse.costs.fits import Line
from rlhfuse.costs.profile_files import load_costs
from rlhfuse.decisions.layouts import training_layouts
from rlhfuse.fusion.inter.report import CALLS
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.training.training_orders import RULES
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.ranks import rank_map
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.simulator.lengths import TURNS, SampleLengths, read_turns
from rlhfuse.simulator.simulation import priced_limits

NAMES = {  # of phases, as in the metrics timing_s/*
    "reshard": "weights moved",
    "gen": "generation",
    "infer": "inference beyond it",
    "adv": "advantages",
    "train": "training",
    "step": "whole iteration",
}
PHASES = tuple(NAMES)
PARTS = PHASES[:-1]
RECENT_ITERATIONS = 8  # that moves, advantages and training are predicted from
GEN_INFER = ("generate", "meet", "migrate", "load", "score", CALLS)  # kinds of spans that the simulator predicts
Row = Mapping[str, Any]  # of metrics.jsonl


@dataclass(frozen=True)
class Forecast:
    """One iteration: seconds by phase with its own lengths, and the same with nothing moved and no sample scored before
    the last one ends (`serial`)."""

    iteration: int
    seconds: dict[str, float]
    serial: dict[str, float]
    timeline: GenInferTimeline


class Forecaster:
    """Predicts the iterations of one run, all but its first."""

    def __init__(self, run: RunFiles) -> None:
        """Raises InputError naming the file that a prediction needs and the run does not have."""
        for name in ("plan.json", "costs.json", "schedule.json"):
            if not (run.folder / name).exists():
                raise InputError(f"{run.folder} has no {name}: nothing can be predicted without it")
        assert run.schedule is not None
        self._rows, family = run.rows, (*run.others, run.schedule)
        self._schedules = {schedule.problem.pipelines[0].microbatches: schedule for schedule in family}
        self._costs = load_costs(run.folder / "costs.json").table
        self._plan = PlanReport.from_dict(read_json(run.folder / "plan.json"), str(run.folder / "plan.json"))
        self._ranks = rank_map(training_layouts(self._plan.iteration.models), self._plan.schedule.alternates)
        self._bs_max = run.setting("fusion", "bs_max")
        self._index = {row["iteration"]: index for index, row in enumerate(self._rows)}
        self._traced = {number: spans for number, spans in run.traced_iterations().items() if number in self._index}
        edges = [_edges(spans) for spans in self._traced.values()] or [(0.0, 0.0)]
        # before the first decode step of generation with inference, and after the last score
        self._start, self._gather = (statistics.median(seconds) for seconds in zip(*edges))

    @property
    def iterations(self) -> tuple[int, ...]:
        """Those that have one before them."""
        return tuple(self._index)[1:]

    @property
    def traced(self) -> tuple[int, ...]:
        """Those whose spans trace.json has."""
        return tuple(self._traced)

    def forecast(self, iteration: int) -> Forecast:
        """Raises InputError for the run's first iteration, which has none before it."""
        index = self._index[iteration]
        if not index:
            raise InputError(f"iteration {iteration} is the run's first: it is predicted from those before")
        # the first iteration compiles kernels and allocates: it counts as long as there is no other
        recent = self._rows[1:index][-RECENT_ITERATIONS:] or self._rows[:1]
        edges, timeline = self._start + self._gather, self._simulate(index)
        known, serial = (
            _seconds(recent, self._rows[index], made, edges) for made in (timeline, self._simulate(index, serial=True))
        )
        return Forecast(iteration, known, serial, timeline)

    def training(self, iteration: int) -> tuple[float, float]:
        """Seconds of a traced iteration's mini-batches as they were ordered, and one model after the other, both
        simulated at the mean seconds that each action took in it; every rank on a core or GPU of its own."""
        spans = self._traced[iteration]
        fused, serial = 0.0, 0.0
        for microbatches, count in Counter(microbatches for _, microbatches in _minibatches(spans)).items():
            schedule = self._schedules[microbatches]
            orders = schedule, RULES["serial"](schedule.problem, self._ranks.shape)
            seconds = [count * makespan(self._training_times(order, spans)) for order in orders]
            fused, serial = fused + seconds[0], serial + seconds[1]
        return fused, serial

    def _simulate(self, index: int, serial: bool = False) -> GenInferTimeline:
        """Generation and inference of row `index`."""
        threshold = 0 if serial else self._rows[index]["fusion/threshold"]
        before = _lengths(self._rows[max(0, index - 1)])
        limits = priced_limits(self._bs_max, self._plan.generation.limits, self._costs, before)
        setting = self._plan.batch.instances, self._costs, limits
        return simulate_gen_infer(_lengths(self._rows[index]), *setting, threshold)

    def spans(self, iteration: int) -> list[Span]:
        """Predicted spans of an iteration of trace.json, from where the measured ones begin."""
        forecast, measured = self.forecast(iteration), self._traced[iteration]
        ranks, begin = range(self._plan.ranks.count), min(span.start_seconds for span in measured)
        spans = _phase_spans("reshard", ranks, begin, forecast.seconds["reshard"])
        begin += forecast.seconds["reshard"] + self._start
        spans += self._gen_infer_spans(forecast.timeline, begin)
        begin += forecast.timeline.total_seconds + self._gather
        spans += _phase_spans("adv", ranks, begin, forecast.seconds["adv"])
        return spans + self._training_spans(forecast, begin + forecast.seconds["adv"])

    def _gen_infer_spans(self, timeline: GenInferTimeline, begin: float) -> list[Span]:
        """On the first rank of each instance."""
        generation = next(task for task in self._plan.iteration.models if task.name == "generation").layout
        first = generation.ranks[0] if generation.ranks else 0
        spans = []
        for span in timeline.spans:
            if span.kind != "idle":
                kind = "load" if span.kind == "swap_in" else span.kind  # as measured spans call it
                rank = first + span.instance * generation.tp
                spans.append(Span(kind, kind, rank, begin + span.start, begin + span.end, "predicted"))
        return spans

    def _training_spans(self, forecast: Forecast, begin: float) -> list[Span]:
        """The mini-batches, every rank on a core or GPU of its own: times of the traced iterations before, scaled."""
        number = forecast.iteration
        before = [past for past in self._traced if past < number] or [number]
        seen = [span for past in before for span in self._traced[past]]
        measured = statistics.mean(self._rows[self._index[past]]["timing_s/train"] for past in before)
        scale = forecast.seconds["train"] / measured
        spans, end, minibatches = [], begin, _minibatches(self._traced[number])
        # As far apart as measured, where the prediction leaves room: each above the measured one.
        for measured_start, microbatches in minibatches:
            times = self._training_times(self._schedules[microbatches], seen, scale)
            start = max(end, begin + measured_start - minibatches[0][0])
            end = start + makespan(times)
            for rank, timed in times.items():
                for action, first, last in timed:
                    kind = f"{action.pipeline.partition('.')[0]} {action.kind}"
                    spans.append(Span(str(action), kind, rank, start + first, start + last, "predicted"))
        return spans

    def _training_times(
        self, schedule: Schedule, seen: Sequence[Span], scale: float = 1.0
    ) -> dict[int, tuple[TimedAction, ...]]:
        """One mini-batch in this order, at `scale` times the seconds that its actions took in the spans `seen`."""
        seconds = action_seconds(seen)
        tied = frozenset(span.kind.split()[0] for span in seen if span.kind.endswith(" TE"))
        programs = lower(schedule, self._ranks, tied=tied, reduce=DeviceKind.of(self._plan.ranks.hardware).reduction)
        return program_times(programs, self._ranks, lambda action: scale * seconds(action))


def action_seconds(spans: Sequence[Span]) -> Callable[[Action], float]:
    """Mean seconds of every training action in measured spans; of a step, which waits for all, the last to come's."""
    seen: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    models: dict[str, str] = {}  # of each pipeline
    for span in spans:
        model, _, kind = span.kind.partition(" ")
        if kind:
            action = Action.parse(span.name)
            models[action.pipeline] = model
            seen[model, action.stage, kind].append(span.end_seconds - span.start_seconds)
    means = {key: statistics.mean(seconds) for key, seconds in seen.items()}

    def seconds(action: Action) -> float:
        model, kind = models[action.pipeline], str(action.kind)
        if action.kind is Kind.ST:
            return min(mean for key, mean in means.items() if key[::2] == (model, kind))
        return means[model, action.stage, kind]

    return seconds


def _seconds(recent: Sequence[Row], row: Row, timeline: GenInferTimeline, edges: float) -> dict[str, float]:
    """By phase, of a batch with the tokens of `row`; `edges`: what lies around the simulated timeline."""
    generation = timeline.generation_seconds

    def line(phase: str, tokens: Callable[[Row], float]) -> float:
        counts = [(tokens(past),) for past in recent]
        return Line.fit(counts, [past[f"timing_s/{phase}"] for past in recent])(tokens(row))

    seconds = {
        "reshard": statistics.median(past["timing_s/reshard"] for past in recent),
        "gen": generation + statistics.median(past.get("timing_s/graph_capture", 0.0) for past in recent),
        "infer": timeline.total_seconds - generation + edges,
        "adv": line("adv", itemgetter("perf/total_num_tokens")),
        "train": line("train", _trained_tokens),
    }
    between = [past["timing_s/step"] - sum(past[f"timing_s/{part}"] for part in PARTS) for past in recent]
    return {**seconds, "step": sum(seconds.values()) + statistics.median(between)}


def _trained_tokens(row: Row) -> float:
    """All but those of samples that training left out."""
    return row["perf/total_num_tokens"] * (1 - row.get("training/zero_gradient/tokens", 0.0))


def _lengths(row: Row) -> SampleLengths:
    turns = read_turns(row.get(TURNS, ()))
    return SampleLengths(tuple(row["lengths/prompt"]), tuple(row["lengths/output"]), turns=turns)


def _edges(spans: Sequence[Span]) -> tuple[float, float]:
    """Seconds before the first step of generation and after the last score, on the first rank."""
    first = min(span.rank for span in spans)
    ends = {span.kind: span.end_seconds for span in spans if span.rank == first}
    starts = {span.kind: span.start_seconds for span in reversed(spans) if span.rank == first}
    last = max((span.end_seconds for span in spans if span.kind in GEN_INFER), default=starts["adv"])
    return max(0.0, starts.get("generate", 0.0) - ends["reshard"]), max(0.0, starts["adv"] - last)


def _minibatches(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """When the first rank that trains began each mini-batch, and how many micro-batches its first pipeline had.

    An action comes once in a mini-batch, so that what comes again begins the next.
    """
    training = [(Action.parse(span.name), span) for span in spans if " " in span.kind]
    first = min(span.rank for _, span in training)
    mine = sorted(((s.start_seconds, action) for action, s in training if s.rank == first), key=itemgetter(0))
    found: list[tuple[float, set[Action]]] = []
    for start, action in mine:
        if not found or action in found[-1][1]:
            found.append((start, set()))
        found[-1][1].add(action)
    stage = min((action.pipeline, action.stage) for _, action in mine if action.kind is Kind.F)
    forwards = [[a for a in actions if (a.pipeline, a.stage) == stage and a.kind is Kind.F] for _, actions in found]
    return [(start, len(some)) for (start, _), some in zip(found, forwards)]


def _phase_spans(name: str, ranks: range, begin: float, seconds: float) -> list[Span]:
    """What all ranks do together."""
    return [Span(name, name, rank, begin, begin + seconds, "predicted") for rank in ranks]
