"""What the ranks of a machine share: memory, and on a machine without GPUs its cores.

A plan counts this machine, as the process may use it, for each of the run's: all ranks must find the same.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs.hardware import at_speed, slowed
from rlhfuse.costs.measured import MeasuredRatios, Work
from rlhfuse.schedule.ir.problem import FusionProblem, Number
from rlhfuse.schedule.ir.ranks import FusedRanks, FusedShape
from rlhfuse.schedule.rules.builders import pipeline_work

CGROUP = Path("/sys/fs/cgroup/memory.max")
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of cores, in so many microseconds


def ranks_on_machine(hardware: HardwareSpec, world_size: int) -> int:
    """Ranks of a run on this machine."""
    return min(world_size, hardware.devices_per_node)


def machine_bytes() -> int:
    """Memory of this machine, or of the container that this process is in."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = CGROUP.read_text().strip() if CGROUP.exists() else "max"
    return total if allowed == "max" else min(total, int(allowed))


def machine_cores() -> float:
    """Cores that this process may use, or its container's quota of them where that is less."""
    cores = float(len(os.sched_getaffinity(0)))
    quota, _, period = QUOTA.read_text().partition(" ") if QUOTA.exists() else ("max", "", "")
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def host_memory(config: RunConfig, hardware: HardwareSpec) -> tuple[float, str]:
    """Host memory of a machine of the run in bytes, and where the number is from."""
    if config.trainer.host_memory_gb:
        return config.trainer.host_memory_gb * 1e9, "trainer.host_memory_gb"
    if hardware.name == "cpu":
        return machine_bytes(), "this machine's"
    return hardware.host_memory_bytes, f"assumed of {hardware.name} nodes"


def rank_groups(
    config: RunConfig, layouts: Mapping[str, ParallelLayout], ranks: FusedRanks, tied: Container[str]
) -> dict[int, tuple[int, int]]:
    """By rank of the first replica: groups in which it communicates, and its ends of channels. `layouts`: by task.

    As parallel/groups.py makes them: a group for the tensor ranks of each degree, of whatever models; for all ranks,
    among which weights move and gradients have their norms; for a model's replicas; for its pipeline where another
    optimizer than Adam takes norms by pipeline; for the ends of the pipeline of a model that is `tied`; and a channel
    for each direction between neighbouring stages, of all models together.
    """
    groups, channels = Counter[int](), Counter[int]()
    every = len({layout.tp for layout in layouts.values()} - {1}) + (ranks.size > 1)
    pairs: set[tuple[int, int]] = set()
    for model, layout in ranks.shape.layouts.items():
        every += layout.dp > 1
        by_pipeline = getattr(config, model).optim.name != "adam"
        every += by_pipeline and layout.dp > 1 and layout.tp * layout.pp > 1
        for name in ranks.shape.share(model).names:
            stages = ranks.stages(0, name)
            if model in tied and layout.pp > 1:
                groups.update({*stages[0], *stages[-1]})
            for here, there in itertools.pairwise(stages):
                pairs |= {pair for a, b in zip(here, there) if a != b for pair in ((a, b), (b, a))}
    channels.update(rank for pair in pairs for rank in pair)
    return {rank: (every + groups[rank], channels[rank]) for rank in range(ranks.size // ranks.shape.replicas)}


def communicator_bytes(
    config: RunConfig,
    hardware: HardwareSpec,
    layouts: Mapping[str, ParallelLayout],
    ranks: FusedRanks,
    tied: Container[str],
) -> int:
    """On a GPU, buffers of the groups of the rank that has most; as `rank_groups`."""
    each = rank_groups(config, layouts, ranks, tied).values()
    return max(groups * hardware.communicator_bytes + ends * hardware.channel_bytes for groups, ends in each)


@dataclass(frozen=True)
class SharedCores:
    """`count` cores of a machine, on which `ranks` ranks compute with `threads` threads each; of GPUs no bound.

    `ratios`: what a run measured of its work there, for rates at which other layouts are priced.
    """

    count: float = math.inf
    ranks: int = 1
    threads: int = 1
    ratios: MeasuredRatios = MeasuredRatios()

    @staticmethod
    def of(config: RunConfig, hardware: HardwareSpec, world_size: int) -> SharedCores:
        """Reads the cores of this machine, whatever the plan is for."""
        if hardware.name != "cpu":
            return SharedCores()
        return SharedCores(machine_cores(), ranks_on_machine(hardware, world_size), config.trainer.threads_per_rank)

    @property
    def waiting(self) -> float:
        """How many times longer than alone a rank takes while all compute."""
        return self._alone / min(self.threads, self.count / self.ranks)

    @property
    def _alone(self) -> float:
        return min(self.threads, self.count)

    def rates(self, core: HardwareSpec, work: Work) -> HardwareSpec:
        """Rates of a rank in this work, of those of a core or a GPU."""
        alone = self.in_turns(core) if work == "training" else self.together(core)
        return slowed(alone, self.ratios.of(work))

    def together(self, core: HardwareSpec) -> HardwareSpec:
        """Rates of a rank while all compute, of those of a core."""
        return at_speed(core, self._alone / self.waiting)

    def in_turns(self, core: HardwareSpec) -> HardwareSpec:
        """Rates of a rank in training, where others wait; its optimizer steps know that none does then."""
        return replace(at_speed(core, self._alone), step_waiting=self.waiting)

    def least_time(self, problem: FusionProblem, shape: FusedShape) -> Number:
        """That no order of a problem undercuts: the work of all ranks of a machine over its cores.

        A rank that waits for another leaves its core to it: where cores are short a pipeline's bubbles cost nothing.
        """
        work = sum(p.microbatches * pipeline_work(p) / shape.share(p.model).merge for p in problem.pipelines)
        return work / problem.nodes * self.ranks * self._alone / self.count if self.waiting > 1 else 0

    def lines(self, world_size: int) -> tuple[str, ...]:
        """Why seconds are longer than a rank's own; nothing where every rank has its cores."""
        if self.waiting == 1:
            return ()
        threads = f" with {self.threads} threads each" if self.threads > 1 else ""
        others = ", and so is every other machine assumed to be" if world_size > self.ranks else ""
        return (
            f"{self.ranks} ranks{threads} share this machine's {self.count:g} cores{others}: work of all at once takes "
            f"x{self.waiting:.3g}, and a mini-batch at least all ranks' work over the cores",
        )
