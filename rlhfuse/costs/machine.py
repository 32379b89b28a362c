"""What the ranks of a machine share: memory, and on a machine without GPUs its cores.

A plan counts this machine, as the process may use it, for each of the run's: all ranks must find the same.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlhfuse.base.launcher import cores_of_machine
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.base.readable_bytes import readable_bytes
from rlhfuse.base.remembered import remembered
from rlhfuse.config.settings import TrainerConfig
from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs.forms.training import TICK_SECONDS
from rlhfuse.costs.hardware import at_speed, slowed
from rlhfuse.costs.measured import MeasuredRatios, Work
from rlhfuse.schedule.ir.problem import FusionProblem, Number
from rlhfuse.schedule.ir.ranks import FusedRanks, FusedShape, neighbour_pairs
from rlhfuse.schedule.rules.builders import pipeline_work
from rlhfuse.tasks.task import BENEATH

CGROUP = Path("/sys/fs/cgroup/memory.max")
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of cores, in so many microseconds


def ranks_on_machine(hardware: HardwareSpec, world_size: int) -> int:
    """Ranks of a run on this machine."""
    return min(world_size, hardware.devices_per_node)


@dataclass(frozen=True)
class Host:
    """What a process finds of the machine that it is on: `cores` that it may use, memory of the machine or of the
    container in bytes, and the kind of its GPU as the planner knows it, '' for none or one that it does not know."""

    cores: float
    memory_bytes: int
    gpu: str = ""

    def __str__(self) -> str:
        gpu = f"GPUs {self.gpu}, " if self.gpu else ""
        return f"{gpu}{self.cores:g} cores, {readable_bytes(self.memory_bytes)}"

    @staticmethod
    def here(gpu: str = "") -> Host:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        allowed = CGROUP.read_text().strip() if CGROUP.exists() else "max"
        memory = total if allowed == "max" else min(total, int(allowed))
        cores = float(len(cores_of_machine()))
        quota, _, period = QUOTA.read_text().partition(" ") if QUOTA.exists() else ("max", "", "")
        return Host(cores if quota == "max" else min(cores, int(quota) / int(period)), memory, gpu)

    @staticmethod
    def least(hosts: Sequence[Host]) -> Host:
        """What all ranks can count on, `hosts` in their order: GPUs of several kinds become a list with counts."""
        kinds = [(gpu, len(list(same))) for gpu, same in itertools.groupby(host.gpu for host in hosts)]
        known = all(gpu for gpu, _ in kinds)
        listed = kinds[0][0] if len(kinds) == 1 else ",".join(f"{gpu}:{count}" for gpu, count in kinds)
        cores, memory = min(host.cores for host in hosts), min(host.memory_bytes for host in hosts)
        return Host(cores, memory, listed if known else "")


def host_memory(trainer: TrainerConfig, hardware: HardwareSpec, host: Host) -> tuple[float, str]:
    """Host memory of a machine of the run in bytes, and where the number is from."""
    if trainer.host_memory_gb:
        return trainer.host_memory_gb * 1e9, "trainer.host_memory_gb"
    if not hardware.device.own_memory:
        return host.memory_bytes, "this machine's"
    return hardware.host_memory_bytes, f"assumed of {hardware.name} nodes"


def memory_limit(trainer: TrainerConfig, hardware: HardwareSpec, world_size: int, host: Host) -> tuple[float, str]:
    """Bytes that one rank may use, and where the number is from. The ranks of a CPU node, or of a GPU, share them."""
    if trainer.memory_limit_gb:
        return trainer.memory_limit_gb * 1e9, "trainer.memory_limit_gb"
    if hardware.device.own_memory and not trainer.share_gpu:
        return hardware.memory_bytes, f"of {'the smallest of' if ',' in hardware.name else 'one'} {hardware.name}"
    ranks = ranks_on_machine(hardware, world_size)
    whole, owner = hardware.memory_bytes, f"this {hardware.name}'s"
    if not hardware.device.own_memory:
        whole, owner = host_memory(trainer, hardware, host)
    return whole / ranks, f"{owner} {readable_bytes(whole)} / {ranks} ranks"


def rank_groups(
    layouts: Mapping[str, ParallelLayout], ranks: FusedRanks, tied: Container[str], by_pipeline: Container[str]
) -> dict[int, tuple[int, int]]:
    """By rank of the first replica: groups in which it communicates, and its ends of channels. `layouts`: by task.

    As parallel/groups.py makes them: a group for the tensor ranks of each degree, of whatever models; for all ranks,
    among which weights move and gradients have their norms, and one more where weights move beneath generation; for a
    model's replicas; for its pipeline where its optimizer takes norms `by_pipeline`; for the ends of the pipeline of a
    model that is `tied`; and a channel for each direction between neighbouring stages, of all models together.
    """
    groups, of_all = Counter[int](), 1 + any(task in layouts for task in BENEATH)
    every = len({layout.tp for layout in layouts.values()} - {1}) + of_all * (ranks.size > 1)
    pairs: set[tuple[int, int]] = set()
    for model, layout in ranks.shape.layouts.items():
        every += layout.dp > 1
        every += model in by_pipeline and layout.dp > 1 and layout.tp * layout.pp > 1
        cells = ranks.pipelines(model)[: ranks.shape.share(model).pipelines]
        for places in cells if model in tied and layout.pp > 1 else ():
            groups.update({*places[0], *places[-1]})
        pairs.update(neighbour_pairs(cells, layout))
    channels = Counter(rank for pair in pairs for rank in pair)
    return {rank: (every + groups[rank], channels[rank]) for rank in range(ranks.size // ranks.shape.replicas)}


def communicator_bytes(
    hardware: HardwareSpec,
    layouts: Mapping[str, ParallelLayout],
    ranks: FusedRanks,
    tied: Container[str],
    by_pipeline: Container[str],
) -> int:
    """On a GPU, buffers of the groups of the rank that has most; as `rank_groups`."""
    each = rank_groups(layouts, ranks, tied, by_pipeline).values()
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
    def of(threads_per_rank: int, hardware: HardwareSpec, world_size: int, host: Host) -> SharedCores:
        """The cores are those of `host`, whatever the plan is for."""
        if not hardware.device.shared_cores:
            return SharedCores()
        return SharedCores(host.cores, ranks_on_machine(hardware, world_size), threads_per_rank)

    @property
    def waiting(self) -> float:
        """How many times longer than alone a rank takes while all compute."""
        return self._alone / min(self.threads, self.count / self.ranks)

    @property
    def _alone(self) -> float:
        return min(self.threads, self.count)

    @remembered  # every table of layouts asks for the same
    def rates(self, core: HardwareSpec, work: Work) -> HardwareSpec:
        """Rates of a rank in this work, of those of a core or a GPU."""
        alone = self.in_turns(core) if work == "training" else self.together(core)
        return slowed(alone, getattr(self.ratios, work))

    def together(self, core: HardwareSpec) -> HardwareSpec:
        """Rates of a rank while all compute, of those of a core."""
        return at_speed(core, self._alone / self.waiting)

    def in_turns(self, core: HardwareSpec) -> HardwareSpec:
        """Rates of a rank in training, where others wait; its optimizer steps know that none does then."""
        return replace(at_speed(core, self._alone), step_waiting=self.waiting)

    def least_time(self, problem: FusionProblem, shape: FusedShape, host: Mapping[str, Sequence[float]]) -> Number:
        """Ticks that no order of a problem undercuts: the work of all ranks of a machine over its cores, and what a
        rank's host launches beside its GPU; `host`: AnalyticCost.host_seconds by model, where seconds lack them.

        A rank that waits for another leaves its core to it: where cores are short a pipeline's bubbles cost nothing. A
        host waits for neither peer nor device: it runs ahead during backwards.
        """
        work, hosts = 0.0, [0.0] * problem.nodes
        for p in problem.pipelines:
            merge = shape.share(p.model).merge
            work += p.microbatches * pipeline_work(p) / merge
            for stage, seconds in enumerate(host.get(p.model, ())):  # of merged ones the mean
                hosts[p.placement[stage // merge]] += p.microbatches * seconds / TICK_SECONDS / merge
        shared = work / problem.nodes * self.ranks * self._alone / self.count if self.waiting > 1 else 0
        return max(shared, *hosts)

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
