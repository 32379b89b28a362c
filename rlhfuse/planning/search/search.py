"""The first table of layouts, in a fixed order, with which the run can be planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from rlhfuse.base.errors import InputError
from rlhfuse.config.role import Role
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec, ParallelLayout
from rlhfuse.config.values import AUTO
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.planning.draft import draft_plan
from rlhfuse.planning.memory import memory_limit
from rlhfuse.planning.search.table import Table
from rlhfuse.simulator.lengths import SampleLengths

MICROBATCHES = (4, 8, 2, 1)


@dataclass(frozen=True)
class Candidate:
    """A table that the run can have."""

    table: Table


@dataclass(frozen=True)
class Found:
    """`tried`: tables that were held against the rules, the one that was found included."""

    best: Candidate
    tried: int

    def __str__(self) -> str:
        return f"the first that can run, of {self.tried} that were tried"


def search_tables(
    config: RunConfig, specs: Mapping[Role, ModelSpec], world_size: int, lengths: SampleLengths | None = None
) -> Found:
    """Raises InputError where no table fits."""
    hardware = hardware_by_name(config.trainer.hardware, config.trainer.device)
    limit = memory_limit(config, hardware, world_size)[0] * (1 - config.parallel.headroom)
    held, closest, refused = config.with_(trainer={"memory_limit_gb": limit / 1e9}), "", ""
    for tried, table in enumerate(_tables(config, world_size), start=1):
        try:
            draft_plan(table.of(held), specs, world_size, lengths)
            return Found(Candidate(table), tried)
        except InputError as error:
            refused = refused or f"{' '.join(table.overrides())}: {error}"
            if not closest and str(error).startswith("memory"):
                closest = f"{' '.join(table.overrides())}: {error}"
    raise InputError(f"no layouts of {world_size} ranks can run; such as {closest or refused}")


def _tables(config: RunConfig, world_size: int) -> Iterator[Table]:
    divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
    flat = [ParallelLayout(world_size // tp, tp, 1) for tp in divisors]
    deep = [ParallelLayout(world_size // tp // pp, tp, pp) for tp, pp in product(divisors, repeat=2)]
    deep = [layout for layout in deep if layout.size == world_size]
    parallel = config.parallel
    truths = (False, True) if parallel.sequence_parallel == AUTO else (parallel.sequence_parallel,)
    counts = config.fusion.actor_microbatches
    rows = (
        deep if parallel.actor_train == AUTO else [ParallelLayout.parse(parallel.actor_train)],
        MICROBATCHES if counts == AUTO else (counts,),
        ("none", "full") if config.trainer.recompute == AUTO else (config.trainer.recompute,),
        truths,
        flat if parallel.generation == AUTO else [ParallelLayout.parse(parallel.generation)],
        flat if parallel.inference == AUTO else [ParallelLayout.parse(parallel.inference)],
    )
    for actor, count, recompute, sequence, generation, inference in product(*rows):
        critic = actor if parallel.critic_train == AUTO else ParallelLayout.parse(parallel.critic_train)
        critic = critic if Role.CRITIC in config.roles() else None
        yield Table(generation, inference, actor, critic, count, recompute, sequence)
