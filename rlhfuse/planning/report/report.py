"""The report of a plan, which plan.json holds for people and tools."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfuse.base.json_values import Versioned
from rlhfuse.costs.layout_moves import LayoutMove, move_lines
from rlhfuse.decisions.batch_arithmetic import BatchArithmetic
from rlhfuse.planning.graph_capture import GraphCapture
from rlhfuse.planning.memory.memory_plan import MemoryPlan
from rlhfuse.planning.plan import Plan
from rlhfuse.planning.report.efficiency import Efficiency
from rlhfuse.planning.report.traffic import TrafficRow, traffic_lines
from rlhfuse.planning.training.stage_cuts import StageBalance
from rlhfuse.planning.training.training_orders import OrderPromise
from rlhfuse.simulator.iteration_seconds import IterationSeconds
from rlhfuse.simulator.threshold import Threshold
from rlhfuse.tasks.instance_limits import InstanceLimits
from rlhfuse.tasks.iteration import Iteration

WORTH_SEARCHING = 0.01  # gap of a schedule above which people should know how to search on


@dataclass(frozen=True)
class MinibatchSeconds:
    """A mini-batch of so many micro-batches per actor pipeline (M1): what part of all are such, by the lengths of the
    plan, and seconds of its schedule, of a bound, and of all models one after the other."""

    microbatches: int
    share: float
    makespan_seconds: float
    lower_bound_seconds: float
    serial_makespan_seconds: float

    def __str__(self) -> str:
        seconds = f"{self.makespan_seconds:.4g} s, lower bound {self.lower_bound_seconds:.4g} s"
        return f"{self.microbatches} micro-batches: {self.share:.0%} of mini-batches, {seconds}"


@dataclass(frozen=True)
class ScheduleSummary:
    """Training schedules of mini-batches; seconds are predicted means, activations are bytes on the fullest rank."""

    source: str
    nodes: int
    makespan_seconds: float
    lower_bound_seconds: float
    serial_makespan_seconds: float
    peak_activation_bytes: float
    serial_idle: float = 0.0  # part of the nodes' time in the serial makespan; plans of before do not say
    alternates: bool = True  # every second model's pipelines run in the other direction
    others: tuple[OrderPromise, ...] = ()  # of orders that the run does not train in
    stages: tuple[StageBalance, ...] = ()  # of the models that train in a pipeline
    by_microbatches: tuple[MinibatchSeconds, ...] = ()  # all that there may be

    @property
    def gap(self) -> float:
        """Makespan above the bound as a part of the bound."""
        return self.makespan_seconds / self.lower_bound_seconds - 1

    @property
    def likeliest(self) -> MinibatchSeconds:
        """The most mini-batches; other orders are compared with theirs."""
        return max(self.by_microbatches, key=lambda one: (one.share, one.microbatches))

    def seconds_of(self, microbatches: int) -> float:
        """Predicted for a mini-batch of so many micro-batches per actor pipeline."""
        return next(one.makespan_seconds for one in self.by_microbatches if one.microbatches == microbatches)

    def lines(self) -> tuple[str, ...]:
        drawn = [str(one) for one in self.by_microbatches if one.share] if len(self.by_microbatches) > 1 else []
        longer = (
            "to search longer, also under MPI: tools/plan.py --problem, tools/search_schedule.py, then fusion.schedule"
        )
        return (
            f"{self.makespan_seconds:.4g} s, lower bound {self.lower_bound_seconds:.4g} s: gap {self.gap:.2%}; all "
            f"models one after the other, each 1F1B, idle {self.serial_idle:.0%}: {self.serial_makespan_seconds:.4g} s",
            *drawn,
            self.source,
            *((longer,) if self.gap > WORTH_SEARCHING else ()),
            *map(self._other_line, self.others),
        )

    def _other_line(self, other: OrderPromise) -> str:
        if other.makespan_seconds is None or other.peak_activation_bytes is None:
            return f"{other.setting}: not here: {other.why_not}"
        times = other.makespan_seconds / self.likeliest.makespan_seconds
        held = other.peak_activation_bytes / self.peak_activation_bytes
        most = "at most " if other.searched else ""
        return f"{other.setting}: {most}{other.makespan_seconds:.4g} s (x{times:.3g}), x{held:.3g} of the activations"


@dataclass(frozen=True)
class PlannedRanks:
    """What the plan is for: so many ranks of an entry of the hardware table, and the format of their numbers; and in a
    paced run whose work theirs lasts as long as."""

    count: int
    hardware: str
    dtype: str
    paced: str = ""

    def __str__(self) -> str:
        paced = f", PACED, no measurement of hardware: {self.paced}" if self.paced else ""
        return f"{self.count} ranks of {self.hardware}, {self.dtype}{paced}"


@dataclass(frozen=True)
class ThresholdPlan:
    """R_t in samples, or None where it is chosen from the lengths of the first iteration; the curve that it was read
    from, if any, or would be at the lengths that are assumed; and what it rests on."""

    samples: int | None
    curve: Threshold | None
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class GenerationPlan:
    """Numbers from which every rank computes the same migration plan, and the recording of decode steps, if any."""

    limits: InstanceLimits
    capture: GraphCapture | None


@dataclass(frozen=True)
class PlanReport(Versioned):
    """A run's decisions and its predicted cost. `files` are what the run will write: names, and what each is."""

    version = 7

    ranks: PlannedRanks
    iteration: Iteration
    batch: BatchArithmetic
    memory: MemoryPlan
    weight_moves: tuple[LayoutMove, ...]
    seconds: IterationSeconds
    schedule: ScheduleSummary
    efficiency: Efficiency | None  # of a GPU
    threshold: ThresholdPlan
    generation: GenerationPlan
    files: tuple[tuple[str, str], ...]
    reasons: tuple[str, ...]
    traffic: tuple[TrafficRow, ...] = ()  # plans of before do not say

    @classmethod
    def of(cls, plan: Plan) -> PlanReport:
        """The report of a plan."""
        return cls.from_dict(plan.document, "plan")

    @property
    def title(self) -> str:
        return f"plan for {self.ranks}"

    def render(self) -> str:
        """The plan as text for people."""
        most_tokens = f"a micro-batch has up to {self.memory.microbatch_tokens:,.0f} tokens"
        stages = tuple(map(str, self.schedule.stages))
        blocks = (
            (self.title, ()),
            ("tasks of an iteration, by block", self.iteration.lines()),
            ("batch", (*self.batch.lines(), most_tokens)),
            ("memory per rank, at most: when all samples are as long as they can become", self.memory.lines()),
            ("weight moves per iteration, all ranks together", move_lines(self.weight_moves)),
            ("sent between ranks per iteration, all together", traffic_lines(self.traffic)),
            ("predicted seconds per iteration", self.seconds.lines(self.batch.optimizer_steps)),
            *((("layers of each training stage", stages),) if stages else ()),
            ("training schedule of a mini-batch", self.schedule.lines()),
            *((("predicted use of the hardware", self.efficiency.lines()),) if self.efficiency else ()),
            ("R_t, the unfinished samples at which instances are freed to score", self.threshold.reasons),
            ("files", tuple(f"{path:28s} {what}" for path, what in self.files)),
            ("why", self.reasons),
        )
        return "\n".join("\n".join((head, *(f"  {line}" for line in lines))) for head, lines in blocks)
