"""Analytic costs of a run's tasks, whatever their layouts: by these work is priced that was not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.config.values import Recompute, known
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.analytic_table import analytic_table
from rlhfuse.costs.kernels import Kernels
from rlhfuse.costs.machine import SharedCores
from rlhfuse.costs.measured import Work
from rlhfuse.costs.table import CostTable
from rlhfuse.planning.job import Job
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.tasks.role import Role
from rlhfuse.tasks.task import SCORERS, TRAINED, ModelTask


@dataclass(frozen=True)
class Rooflines:
    """A roofline for each task: shapes of models, and rates of a rank. `recompute` and `sequence_parallel` are of
    training; `switch_sums`: tensor ranks add up in the NVLink switch where there is one; `by_token`: a token's loss
    depends on no other."""

    specs: Mapping[Role, ModelSpec]
    hardware: HardwareSpec
    cores: SharedCores
    element_bytes: int
    switch_sums: bool
    by_token: bool
    recompute: Recompute
    sequence_parallel: bool

    @staticmethod
    def of(run: Job, hardware: HardwareSpec, cores: SharedCores) -> Rooflines:
        """As the run has what is not open; else without."""
        trainer, parallel = run.config.trainer, run.config.parallel
        return Rooflines(
            run.specs,
            hardware,
            cores,
            trainer.element_bytes,
            switch_sums=run.config.rollout.all_reduce != "nccl",
            by_token=run.config.algorithm.policy_loss.by_token,
            recompute=known(trainer.recompute, "none"),
            sequence_parallel=parallel.sequence_parallel is True,
        )

    def costs(self, tasks: Sequence[ModelTask]) -> dict[str, AnalyticCost]:
        """By the task's name."""
        return {task.name: self.cost(task) for task in tasks}

    def cost(self, task: ModelTask) -> AnalyticCost:
        work: Work = "training" if task.training else "generation" if task.name == "generation" else "inference"
        return AnalyticCost(
            self.specs[task.role],
            task.layout,
            self.cores.rates(self.hardware, work),
            self.element_bytes,
            task.role.scalar_head,
            sequence_parallel=task.training and self.sequence_parallel,
            recompute=self.recompute if task.training else "none",
            kernels=Kernels.on(self.hardware, self.switch_sums, self.by_token),
        )

    def table(self, costs: Mapping[str, AnalyticCost], world_size: int, lengths: SampleLengths) -> CostTable:
        """Costs of samples of these lengths, from the `costs` of each task."""
        generation = costs["generation"]
        scorers = tuple(costs[name] for name in SCORERS if name in costs)
        crosses = world_size > generation.hardware.devices_per_node
        return analytic_table(generation, scorers, crosses, lengths.output_share, self.cores.ratios.reward)


def optimizer_step_seconds(analytic: Mapping[str, AnalyticCost]) -> float:
    """Seconds of a mini-batch's optimizer steps: all models that train, one after the other."""
    return sum(analytic[task].optimizer_step_seconds() for task in TRAINED if task in analytic)
