"""How many ranks to take: the fastest table of each number, what a sample costs there, and where nothing fits.

What FlexRLHF gives as a guideline, as a computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpi_ranks import MpiRanks
from text_table import aligned

from rlhfuse.base.errors import InputError
from rlhfuse.planning.job import Job
from rlhfuse.planning.search.search import Ranking, Row
from rlhfuse.planning.search.setting import Setting
from rlhfuse.planning.settle import settle_but_layouts

HEAD = ("ranks", "seconds", "samples/s", "per rank", "rank-s/sample", "generation", "inference", "actor_train")
HEAD += ("critic_train", "cut", "recompute")
LEFT = range(HEAD.index("generation"), len(HEAD))  # columns that begin at the left


@dataclass(frozen=True)
class Size:
    """`row`: the fastest table; None: none fits, and `why_not` in a line. `samples`: of an iteration."""

    world_size: int
    samples: int
    row: Row | None
    why_not: str = ""

    @property
    def rank_seconds(self) -> float | None:
        """That a sample costs."""
        return self.world_size * self.row.seconds / self.samples if self.row else None

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {"world_size": self.world_size, "why_not": self.why_not or None}
        if self.row:
            values |= {
                "seconds": self.row.seconds,
                "samples_per_second": self.samples / self.row.seconds,
                "rank_seconds_per_sample": self.rank_seconds,
                "overrides": list(self.row.table.overrides()),
            }
        return values


def sizes_of(job: Job, world_sizes: Sequence[int], ranks: MpiRanks) -> tuple[Size, ...]:
    """Each searched on its own, shared out over `ranks`; a row that is given holds for all."""

    def work(world_size: int, _: Any) -> Size:
        return _searched(replace(job, world_size=world_size))

    return tuple(ranks.shared(world_sizes, work))


def render_sizes(sizes: Sequence[Size]) -> str:
    """A line for each, then the cheapest and the fastest."""
    fitting = [size for size in sizes if size.row]
    lines = [*aligned([HEAD, *map(_cells, fitting)], LEFT)] if fitting else []
    lines += [f"{size.world_size} ranks: {size.why_not}" for size in sizes if not size.row]
    if fitting:
        cheapest = min(fitting, key=lambda size: size.rank_seconds or 0.0)
        fastest = min(fitting, key=lambda size: size.row.seconds if size.row else 0.0)
        lines.append(f"cheapest of a sample: {cheapest.world_size} ranks, {cheapest.rank_seconds:.3g} rank-seconds")
        assert fastest.row is not None, "it fits"
        lines.append(f"fastest: {fastest.world_size} ranks, {fastest.row.seconds:.4g} s an iteration")
    return "\n".join(lines)


def _searched(job: Job) -> Size:
    world_size, samples = job.world_size, job.config.samples_per_iteration
    try:
        ranking = Ranking(Setting.of(settle_but_layouts(job)))
        return Size(world_size, samples, ranking.fastest(1).best)
    except InputError as error:
        return Size(world_size, samples, None, str(error))


def _cells(size: Size) -> tuple[str, ...]:
    row = size.row
    assert row is not None, "only what fits has a line of the table"
    table, rate = row.table, size.samples / row.seconds
    numbers = f"{row.seconds:.4g}", f"{rate:.4g}", f"{rate / size.world_size:.3g}", f"{size.rank_seconds:.3g}"
    layouts = table.generation, table.inference, table.actor_train, table.critic_train or "-"
    return str(size.world_size), *numbers, *map(str, layouts), str(table.cut), table.recompute
