"""The plan that the ranks of a run receive: text that one process makes and the others parse, lower, verify and run.

It imports nothing else of planning, and of a plan's report knows the decisions alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rlhfuse.base.json_values import from_json
from rlhfuse.config.load import validate
from rlhfuse.config.settings import RunConfig
from rlhfuse.costs.paced import PacedCost
from rlhfuse.decisions.batch_arithmetic import BatchArithmetic
from rlhfuse.decisions.layouts import training_layouts
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.ir.ranks import FusedRanks, rank_map
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Programs
from rlhfuse.schedule.program.verify import verify
from rlhfuse.simulator.iteration_seconds import IterationSeconds
from rlhfuse.tasks.instance_limits import InstanceLimits
from rlhfuse.tasks.iteration import Iteration
from rlhfuse.tasks.role import Role, role_named
from rlhfuse.tasks.task import ModelTask


@dataclass(frozen=True)
class Plan:
    """Everything decided before a run starts.

    `config`: every setting has a value. `document`: the contents of plan.json, from which the decisions are read;
    `summary`: the same as text for people; `notes`: lines on settings that the plan chose. `schedules`: by the number
    of micro-batches per actor pipeline. `tied`: roles that train with their embedding as output layer; `reduction`:
    how the device reduces gradients; `cores`: of the smallest machine. `pace`: the prices of a
    paced run. `costs`, named `costs_name`, belong to the process that planned, and are no part of the text.
    """

    config: RunConfig
    document: Mapping[str, Any]
    summary: str
    notes: tuple[str, ...]
    schedules: Mapping[int, Schedule]
    tied: frozenset[Role]
    reduction: str
    cores: float
    costs_name: str
    pace: PacedCost | None = None
    costs: Any = field(default=None, compare=False, repr=False)  # CostTable

    @cached_property
    def world_size(self) -> int:
        return self.document["ranks"]["count"]

    @property
    def tasks(self) -> tuple[ModelTask, ...]:
        return self.iteration.models

    @cached_property
    def iteration(self) -> Iteration:
        """The tasks of an iteration, verified. Raises InputError for a table that could hang, or does not run yet."""
        table = from_json(Iteration, self.document["iteration"], "plan").verify(self.world_size)
        models = [ModelTask.of(task.name, task.layout, self.world_size) for task in table.models]
        return table.refuse_unless(Iteration.of(models, bool(self.config.reward.function)))

    @cached_property
    def batch(self) -> BatchArithmetic:
        return from_json(BatchArithmetic, self.document["batch"], "plan")

    @cached_property
    def limits(self) -> InstanceLimits:
        """Sizes of a generation instance."""
        return from_json(InstanceLimits, self.document["generation"]["limits"], "plan")

    @property
    def threshold(self) -> int | None:
        """R_t in samples; None: the lengths of the first iteration decide."""
        return self.document["threshold"]["samples"]

    @property
    def keeps_generation(self) -> bool:
        """Whether weights and KV cache of generation stay on the device between iterations."""
        return self.document["memory"]["keeps_generation"]

    @property
    def offload_phase(self) -> str | None:
        """The phase from which on the optimizer's state rests on the host; None: it stays on the device."""
        offload = self.document["memory"]["offload"]
        return offload and offload["first_phase"]

    @property
    def process_bytes(self) -> int:
        """Memory of a rank's process besides the phases."""
        return self.document["memory"]["process_bytes"]

    @property
    def title(self) -> str:
        return self.summary.partition("\n")[0]

    @property
    def paced(self) -> str:
        """In a paced run the models whose work its own lasts as long as, else ''."""
        return self.document["ranks"]["paced"]

    @property
    def iteration_seconds(self) -> float:
        """Predicted, with both fusions."""
        return from_json(IterationSeconds, self.document["seconds"], "plan").fused

    def makespan_seconds(self, microbatches: int) -> float:
        """Predicted for a mini-batch of this number of micro-batches per actor pipeline."""
        rows = self.document["schedule"]["by_microbatches"]
        return next(row["makespan_seconds"] for row in rows if row["microbatches"] == microbatches)

    @cached_property
    def ranks(self) -> FusedRanks:
        return rank_map(training_layouts(self.tasks), self.config.fusion.alternates)

    @cached_property
    def programs(self) -> Mapping[int, Programs]:
        """Lowered from the schedules and verified. Raises ScheduleError for one that could hang."""
        programs = {}
        for rung, schedule in sorted(self.schedules.items()):
            programs[rung] = lower(schedule, self.ranks, tied=self.tied, reduce=self.reduction)
            verify(programs[rung], schedule, self.ranks, tied=self.tied, one_queue=self.reduction == "joint")
        return programs

    @property
    def likeliest(self) -> Schedule:
        """The schedule of the most mini-batches."""
        rows = self.document["schedule"]["by_microbatches"]
        return self.schedules[max(rows, key=lambda row: (row["share"], row["microbatches"]))["microbatches"]]

    def to_text(self) -> str:
        """JSON text; `parse` is the inverse, but for `costs`."""
        values = {name: getattr(self, name) for name in ("document", "summary", "notes", "cores", "costs_name")}
        schedules = {
            rung: {"problem": schedule.problem.to_dict(), "orders": schedule.text()}
            for rung, schedule in self.schedules.items()
        }
        values["config"] = self.config.model_dump(mode="json")
        values["pace"] = self.pace and self.pace.to_dict()
        return json.dumps({"schedules": schedules, "tied": sorted(self.tied), "reduction": self.reduction, **values})

    @staticmethod
    def parse(text: str) -> Plan:
        """Read the output of `to_text`. Raises InputError or ScheduleError for a text that breaks a rule."""
        values = json.loads(text)
        schedules = {}
        for rung, row in values["schedules"].items():
            schedules[int(rung)] = Schedule.parse(FusionProblem.from_dict(row["problem"]), row["orders"])
        changed = {
            "config": validate(values["config"], "plan"),
            "schedules": schedules,
            "tied": frozenset(map(role_named, values["tied"])),
            "notes": tuple(values["notes"]),
            "pace": values["pace"] and PacedCost.from_dict(values["pace"], "plan"),
        }
        plan = Plan(**{**values, **changed})
        _ = plan.iteration
        return plan
