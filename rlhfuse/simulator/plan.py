"""The plan of a run: everything decided before it starts, in a file that a person can read and diff.

A `Plan` is a value: it prints for people, writes itself as plan.json and reads itself back. It knows nothing of how
it is made (simulator/planner.py) and nothing of torch, process groups or the engine.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhfuse.errors import InputError
from rlhfuse.schedule.io import write_text
from rlhfuse.simulator.generation import InstanceLimits
from rlhfuse.simulator.iteration import IterationSeconds
from rlhfuse.simulator.layout_moves import LayoutMove
from rlhfuse.simulator.layouts import BatchArithmetic, Task
from rlhfuse.simulator.memory import PhaseMemory, readable_bytes
from rlhfuse.simulator.migration import MoveCost
from rlhfuse.simulator.threshold import Threshold
from rlhfuse.spec import ParallelLayout

VERSION = 2  # 1 had no weight moves in its seconds


@dataclass(frozen=True)
class ScheduleSummary:
    """One mini-batch's training schedule; seconds are predictions, activations are bytes on the fullest rank."""

    source: str
    nodes: int
    makespan_seconds: float
    lower_bound_seconds: float
    serial_makespan_seconds: float
    peak_activation_bytes: float


@dataclass(frozen=True)
class Plan:
    """What a run will do and what it is predicted to cost.

    `threshold_samples` is R_t, or None where it is chosen from the lengths of the first iteration; `threshold`
    holds the curve it was read from, if any. `limits` and `move_cost` are the numbers from which every rank computes
    the same migration plan.
    """

    world_size: int
    hardware: str
    dtype: str
    tasks: tuple[Task, ...]
    batch: BatchArithmetic
    memory: tuple[PhaseMemory, ...]
    memory_limit: float
    weight_moves: tuple[LayoutMove, ...]
    seconds: IterationSeconds
    schedule: ScheduleSummary
    threshold_samples: int | None
    threshold: Threshold | None
    limits: InstanceLimits
    move_cost: MoveCost
    reasons: tuple[str, ...]

    def to_dict(self) -> dict:
        raw = {"version": VERSION, **asdict(self)}
        raw["tasks"] = [{**asdict(task), "layout": str(task.layout), "ranks": list(task.ranks)} for task in self.tasks]
        raw["threshold"] = self.threshold.to_dict() if self.threshold else None
        raw["weight_moves"] = [move.to_dict() for move in self.weight_moves]
        raw["memory"], raw["reasons"] = [asdict(phase) for phase in self.memory], list(self.reasons)
        return raw

    @staticmethod
    def from_dict(raw: dict, where: str = "plan") -> "Plan":
        """Inverse of `to_dict`. Raises InputError naming `where` and the field."""
        try:
            fields = dict(raw)
            if fields.pop("version") != VERSION:
                raise InputError(
                    f"{where}: version {raw['version']!r} is unknown; this program reads version {VERSION}"
                )
            fields["tasks"] = tuple(
                Task(row["name"], row["role"], ParallelLayout.parse(row["layout"]), tuple(row["ranks"]))
                for row in raw["tasks"]
            )
            fields["batch"] = BatchArithmetic(**raw["batch"])
            fields["memory"] = tuple(PhaseMemory(**phase) for phase in raw["memory"])
            fields["weight_moves"] = tuple(LayoutMove.from_dict(move) for move in raw["weight_moves"])
            fields["seconds"] = IterationSeconds(**raw["seconds"])
            fields["schedule"] = ScheduleSummary(**raw["schedule"])
            fields["threshold"] = Threshold.from_dict(raw["threshold"], where) if raw["threshold"] else None
            fields["limits"], fields["move_cost"] = InstanceLimits(**raw["limits"]), MoveCost(**raw["move_cost"])
            fields["reasons"] = tuple(raw["reasons"])
            return Plan(**fields)
        except (KeyError, TypeError) as error:
            raise InputError(f"{where} is no plan.json: {error}; write one with tools/plan.py --json") from None

    def render(self) -> str:
        """The plan as text for people."""
        title = f"plan for {self.world_size} ranks of {self.hardware}, {self.dtype}"
        blocks = [(title, ())]
        blocks.append(("tasks", tuple(str(task) for task in self.tasks)))
        blocks.append(("batch", self.batch.lines()))
        blocks.append((f"memory per rank (limit {readable_bytes(self.memory_limit)})", self._memory_lines()))
        blocks.append(("weight moves per iteration, all ranks together", self._move_lines()))
        blocks.append(("predicted seconds per iteration", self._seconds_lines()))
        blocks.append(("why", self.reasons))
        return "\n".join("\n".join((head, *(f"  {line}" for line in lines))) for head, lines in blocks)

    def _memory_lines(self) -> tuple[str, ...]:
        columns = ("weights", "optimizer", "gradients", "activations", "kv", "buckets", "device", "host")
        lines = ["phase      " + "".join(f"{name:>12s}" for name in columns)]
        for phase in self.memory:
            values = "".join(f"{readable_bytes(getattr(phase, name)):>12s}" for name in columns)
            lines.append(f"{phase.phase:11s}{values}")
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
        return (
            f"weights moved             serial {s.weight_moves:9.4g}  fused {s.weight_moves:9.4g}",
            f"generation and inference  serial {s.gen_infer_serial:9.4g}  fused {s.gen_infer_fused:9.4g}",
            f"training                  serial {s.training_serial:9.4g}  fused {s.training_fused:9.4g}",
            f"iteration                 serial {s.serial:9.4g}  fused {s.fused:9.4g}  (x{s.speedup:.2f})",
        )


def load_plan(path: str | Path) -> Plan:
    """Read plan.json. Raises InputError naming the file."""
    try:
        return Plan.from_dict(json.loads(Path(path).read_text()), str(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not valid JSON: {error}") from None


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write beside and rename. Raises InputError where that fails."""
    write_text(path, json.dumps(plan.to_dict(), indent=1) + "\n")
