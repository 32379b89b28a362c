"""Files of costs: a profile, profiles by tensor degree, or what a run measured of itself.

Of profiles by tensor degree, in one file, the profile of any layouts is put together: a table of layouts whose every
degree was measured is priced with what was measured; no other is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import read_json
from rlhfuse.config.settings import TrainerConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.measured import MeasuredCost
from rlhfuse.costs.profiled import ProfiledCost, made_for
from rlhfuse.costs.table import CostFile, CostTable
from rlhfuse.tasks.role import ROLES, Role
from rlhfuse.tasks.task import ModelTask


@dataclass(frozen=True)
class TensorProfiles(CostFile):
    """`profiles`: in each every task has the same degree."""

    version, kind = ProfiledCost.version, "profiles"

    profiles: tuple[ProfiledCost, ...]

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(int(profile.made_for["generation_tp"]) for profile in self.profiles)

    def link_bandwidth(self) -> float:
        """The network is the same at every degree."""
        return self.profiles[0].link_bandwidth()

    def at(self, tp: int) -> CostTable:
        if tp not in self.degrees:
            raise InputError(f"tensor degree {tp} was not measured")
        return self.profiles[self.degrees.index(tp)].table

    def of(self, tasks: Sequence[ModelTask], where: str = "profile") -> ProfiledCost:
        """What a run with these layouts would have measured: each task's grids from the profile of its degree.

        Raises InputError naming `where` and a degree that was not measured.
        """
        profiles = {task.name: self._at(task, where) for task in tasks}
        scorers = {role: profiles[name] for role in ROLES if (name := f"{role}_inference") in profiles}
        trained = {task.role: profiles[task.name].training for task in tasks if task.training}
        decoding = profiles["generation"]
        degrees = {f"{role}_inference_tp": profile.made_for["generation_tp"] for role, profile in scorers.items()}
        return replace(
            decoding,
            made_for={**decoding.made_for, **degrees},
            # a role that was not profiled is named by `check`, as are other models
            score={role: profile.score[role] for role, profile in scorers.items() if role in profile.score},
            swap_in=max((profile.swap_in for profile in scorers.values()), default=0.0),
            training={role: grids[role] for role, grids in trained.items() if role in grids},
        )

    def _at(self, task: ModelTask, where: str) -> ProfiledCost:
        degree, known = task.layout.tp, self.degrees
        if degree not in known:
            have = ", ".join(map(str, known))
            wanted = ",".join(map(str, sorted({*known, degree})))
            raise InputError(
                f"{where} has tensor degrees {have}, parallel.{task.name}={task.layout} needs {degree}; run "
                f"tools/profile_costs.py --tensor {wanted} with this config"
            )
        return self.profiles[known.index(degree)]

    def __str__(self) -> str:
        return "\n".join(f"tensor degree {tp}\n{profile}" for tp, profile in zip(self.degrees, self.profiles))


def load_costs(path: str | Path) -> CostFile:
    """profile.json of tools/profile_costs.py or the costs.json of a run. Raises InputError naming the file."""
    raw = read_json(path)
    kind = raw.get("kind") if isinstance(raw, dict) else None
    if kind == TensorProfiles.kind:
        return TensorProfiles.from_dict(raw, str(path))
    return (ProfiledCost if kind == ProfiledCost.kind else MeasuredCost).from_dict(raw, str(path))


def run_costs(
    file: CostFile, trainer: TrainerConfig, tasks: Sequence[ModelTask], specs: Mapping[Role, ModelSpec], where: str
) -> CostTable:
    """The table of what was loaded from `where`, for the layouts of a run's `tasks`; '': the costs of trainer.pace,
    which are of other models.

    Raises InputError, also for a profile of other models or settings.
    """
    file = file.of(tasks, where)
    if where:
        file.check(made_for(trainer, tasks, specs), where)
    return file.table
