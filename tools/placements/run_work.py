"""What a run does in an iteration, whatever its layouts: models, a batch of samples, and how it is split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.config.values import AUTO, Recompute
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.decisions.layouts import possible_layouts
from rlhfuse.planning.candidate import CandidateInputs
from rlhfuse.planning.job import Job
from rlhfuse.planning.rooflines import Rooflines
from rlhfuse.tasks.role import Role
from rlhfuse.tasks.task import TASKS, ModelTask

ENDLESS_GB = 1e6  # of a rank


@dataclass(frozen=True)
class RunWork:
    """Layouts of `run` do not matter, and may be open, as micro-batches and recomputation may. Its cache is as large as
    memory allows unless it asks for another.

    Ranks on a part of a machine have that part of its cores.
    """

    run: Job
    inputs: CandidateInputs

    @property
    def config(self) -> RunConfig:
        return self.run.config

    @property
    def specs(self) -> Mapping[Role, ModelSpec]:
        return self.run.specs

    @property
    def with_all_memory(self) -> RunWork:
        """The same on ranks whose memory never ends."""
        roomy = self.config.with_(trainer={"memory_limit_gb": ENDLESS_GB})
        return replace(self, run=self.run.with_config(roomy))

    @property
    def sharding(self) -> tuple[bool, ...]:
        """What training's sequence_parallel may be."""
        asked = self.config.parallel.sequence_parallel
        return (False, True) if asked == AUTO else (bool(asked),)

    @property
    def longest_tokens(self) -> int:
        """Tokens of a sample that is as long as it can become."""
        return sum(self.config.longest_sample)

    def cost(
        self,
        task: str,
        layout: ParallelLayout,
        hardware: HardwareSpec,
        recompute: Recompute = "none",
        sequence_parallel: bool = False,
    ) -> AnalyticCost:
        """The roofline of a task in a layout; the last two are of training."""
        rooflines = Rooflines.of(self.run, hardware, self.inputs.cores)
        rooflines = replace(rooflines, recompute=recompute, sequence_parallel=sequence_parallel)
        return rooflines.cost(ModelTask.of(task, layout, layout.size))

    def layouts(self, task: str, ranks: int, devices_per_node: int) -> Iterator[ParallelLayout]:
        """Layouts of a task on so many ranks: whole tensor groups in a node, pipelines for training alone, and a sample
        at least for each replica."""
        role, trains = TASKS[task].role, task.endswith("_train")
        most = self.config.samples_per_iteration // (int(self.config.algorithm.minibatches) if trains else 1)
        return possible_layouts(self.specs[role], ranks, devices_per_node, most, (1,) if trains else ())
