"""The plan of a run: everything decided before it starts, once, and the same on every rank.

`PlanReport` is what plan.json holds, for people and tools; `RunPlan` adds what the ranks execute: the schedule and
the programs lowered from it. planner.py makes both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhfuse.base.json_values import from_json, to_json
from rlhfuse.base.readable_bytes import readable_bytes
from rlhfuse.config.spec import DeviceKind
from rlhfuse.costs.cost_model import CostModel
from rlhfuse.costs.layout_moves import LayoutMove
from rlhfuse.decisions.batch_arithmetic import BatchArithmetic
from rlhfuse.decisions.layouts import Task
from rlhfuse.decisions.migration import SampleMoveCost
from rlhfuse.planning.efficiency import Efficiency
from rlhfuse.planning.graph_capture import GraphCapture
from rlhfuse.planning.memory import DEVICE_PARTS, OptimizerOffload, PhaseMemory
from rlhfuse.planning.training.stage_cuts import StageBalance
from rlhfuse.planning.training.training_orders import OrderPromise
from rlhfuse.schedule.ir.ranks import FusedRanks
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.program import Programs
from rlhfuse.simulator.instance_limits import InstanceLimits
from rlhfuse.simulator.iteration_seconds import IterationSeconds
from rlhfuse.simulator.threshold import Threshold

VERSION = 2
WORTH_SEARCHING = 0.01  # gap of a schedule above which people should know how to search on


@dataclass(frozen=True)
class ScheduleSummary:
    """One mini-batch's training schedule; seconds are predictions, activations are bytes on the fullest rank."""

    source: str
    nodes: int
    makespan_seconds: float
    lower_bound_seconds: float
    serial_makespan_seconds: float
    peak_activation_bytes: float
    serial_idle: float = 0.0  # part of the nodes' time in the serial makespan; plans of before do not say
    alternates: bool = True  # every second model's pipelines run in the other direction
    others: tuple[OrderPromise, ...] = ()  # of orders that the run does not train in

    @property
    def gap(self) -> float:
        """Makespan above the bound as a part of the bound."""
        return self.makespan_seconds / self.lower_bound_seconds - 1

    def lines(self) -> tuple[str, ...]:
        longer = (
            "to search longer, also under MPI: tools/plan.py --problem, tools/search_schedule.py, then fusion.schedule"
        )
        return (
            f"{self.makespan_seconds:.4g} s, lower bound {self.lower_bound_seconds:.4g} s: gap {self.gap:.2%}; all "
            f"models one after the other, each 1F1B, idle {self.serial_idle:.0%}: {self.serial_makespan_seconds:.4g} s",
            f"activations up to {readable_bytes(self.peak_activation_bytes)} on the fullest rank",
            self.source,
            *((longer,) if self.gap > WORTH_SEARCHING else ()),
            *map(self._other_line, self.others),
        )

    def _other_line(self, other: OrderPromise) -> str:
        if other.makespan_seconds is None or other.peak_activation_bytes is None:
            return f"{other.setting}: not here: {other.why_not}"
        times, held = other.makespan_seconds / self.makespan_seconds, readable_bytes(other.peak_activation_bytes)
        most = "at most " if other.searched else ""
        return f"{other.setting}: {most}{other.makespan_seconds:.4g} s (x{times:.3g}), activations up to {held}"


@dataclass(frozen=True)
class PlanReport:
    """A run's decisions and its predicted cost.

    `memory` holds where all samples are as long as they can become: micro-batches then have `microbatch_tokens`.
    `process_bytes` is what a rank's process takes of `memory_limit` beside it. `threshold_samples` is R_t, or None
    where it is chosen from the lengths of the first iteration; `threshold` holds the curve it was read from, if any,
    or would be at the lengths that are assumed.
    `limits` and `move_cost` are the numbers from which every rank computes the same migration plan. `files` are what
    the run will write: names, and what each is.
    """

    world_size: int
    hardware: str
    dtype: str
    tasks: tuple[Task, ...]
    batch: BatchArithmetic
    memory: tuple[PhaseMemory, ...]
    memory_limit: float
    memory_limit_source: str
    microbatch_tokens: float
    process_bytes: int
    ranks_per_node: int
    weight_moves: tuple[LayoutMove, ...]
    seconds: IterationSeconds
    schedule: ScheduleSummary
    threshold_samples: int | None
    threshold: Threshold | None
    limits: InstanceLimits
    move_cost: SampleMoveCost
    files: tuple[tuple[str, str], ...]
    threshold_reasons: tuple[str, ...]
    reasons: tuple[str, ...]
    stages: tuple[StageBalance, ...] = ()
    efficiency: Efficiency | None = None  # of a GPU
    keeps_generation: bool = False  # its weights and KV cache stay on the device between iterations
    offload: OptimizerOffload | None = None  # None: the optimizer stays on the device
    capture: GraphCapture | None = None  # of decode steps, None where none are recorded

    def to_dict(self) -> dict[str, Any]:
        return to_json(self, VERSION)

    @staticmethod
    def from_dict(raw: Mapping[str, Any], where: str = "plan") -> PlanReport:
        """Inverse of `to_dict`. Raises InputError naming `where` and the field."""
        return from_json(PlanReport, raw, where, VERSION)

    @property
    def title(self) -> str:
        return f"plan for {self.world_size} ranks of {self.hardware}, {self.dtype}"

    def render(self) -> str:
        """The plan as text for people."""
        blocks = (
            (self.title, ()),
            ("tasks", tuple(str(task) for task in self.tasks)),
            ("batch", (*self.batch.lines(), f"a micro-batch has up to {self.microbatch_tokens:,.0f} tokens")),
            ("memory per rank, at most: when all samples are as long as they can become", self._memory_lines()),
            ("weight moves per iteration, all ranks together", self._move_lines()),
            ("predicted seconds per iteration", self._seconds_lines()),
            *((("layers of each training stage", tuple(map(str, self.stages))),) if self.stages else ()),
            ("training schedule of a mini-batch", self.schedule.lines()),
            *((("predicted use of the hardware", self.efficiency.lines()),) if self.efficiency else ()),
            ("R_t, the unfinished samples at which instances are freed to score", self.threshold_reasons),
            ("files", tuple(f"{path:28s} {what}" for path, what in self.files)),
            ("why", self.reasons),
        )
        return "\n".join("\n".join((head, *(f"  {line}" for line in lines))) for head, lines in blocks)

    def needed_bytes(self, phase: PhaseMemory) -> int:
        """Part of `memory_limit` on the fullest rank; on a CPU host copies are in it."""
        return phase.device + self.process_bytes + (0 if DeviceKind.of(self.hardware).own_memory else phase.host)

    def _memory_lines(self) -> tuple[str, ...]:
        columns = (*DEVICE_PARTS, "host")
        lines = ["phase      " + "".join(f"{name:>12s}" for name in (*columns, "process", "needed", "of limit"))]
        for phase in self.memory:
            needed = self.needed_bytes(phase)
            shown = [readable_bytes(getattr(phase, name)) for name in columns]
            shown += [readable_bytes(self.process_bytes), readable_bytes(needed), f"{needed / self.memory_limit:.1%}"]
            lines.append(f"{phase.phase:11s}" + "".join(f"{text:>12s}" for text in shown))
        host = "host copies count"
        if DeviceKind.of(self.hardware).own_memory:
            node = readable_bytes(self.ranks_per_node * max(phase.host for phase in self.memory))
            host += f" for host memory alone: {node} on a node of {self.ranks_per_node} ranks"
        lines.append(f"limit {readable_bytes(self.memory_limit)} ({self.memory_limit_source}); {host}")
        return tuple(lines)

    def _move_lines(self) -> tuple[str, ...]:
        columns = ("stays", "within", "across", "minimum_across", "fullest_sender", "fullest_receiver")
        titles = ("on its rank", "in a node", "across", "at least", "top sender", "top receiver")
        lines = ["move" + " " * 45 + "".join(f"{title:>13s}" for title in titles) + "     seconds"]
        for move in self.weight_moves:
            values = "".join(f"{readable_bytes(getattr(move.traffic, name)):>13s}" for name in columns)
            lines.append(f"{f'{move.source} -> {move.target}':49s}{values}{move.seconds:12.3g}")
        return tuple(lines)

    def _seconds_lines(self) -> tuple[str, ...]:
        s = self.seconds
        rows = [
            ("weights moved", s.weight_moves, s.weight_moves),
            ("generation and inference", s.gen_infer_serial, s.gen_infer_fused),
            (f"training, {self.batch.optimizer_steps} mini-batches", s.training_serial, s.training_fused),
            ("iteration", s.serial, s.fused),
        ]
        if s.capture:
            rows.insert(1, ("CUDA graphs recorded", s.capture, s.capture))
        if s.generation_serial is not None and s.generation_fused is not None:
            rest = s.gen_infer_serial - s.generation_serial, s.gen_infer_fused - s.generation_fused
            generation = ("generation", s.generation_serial, s.generation_fused)
            rows[-3:-2] = [generation, ("inference beyond it", *rest)]
        head = f"{'':26s}{'serial':>12s}{'fused':>12s}"
        lines = [f"{name:26s}{serial:12.4g}{fused:12.4g}" for name, serial, fused in rows]
        return (head, *lines[:-1], f"{lines[-1]}  (x{s.speedup:.2f})")


@dataclass(frozen=True)
class RunPlan:
    """A report with what it is about; `costs`, called `costs_name`, hold until the run has measured its own."""

    report: PlanReport
    schedule: Schedule
    ranks: FusedRanks
    programs: Programs
    costs: CostModel
    costs_name: str

    def to_text(self) -> str:
        """The text that one rank sends the others, for `planner.parse_plan`; the rest follows from their drafts."""
        return json.dumps({"report": self.report.to_dict(), "schedule": self.schedule.text()})
