"""What it costs to insist on another value of one decision, by the tables that the search has priced anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from rlhfuse.planning.search.search import Ranking, Row
from rlhfuse.planning.search.table import ROWS, Table

DECISIONS: Mapping[str, Callable[[Table], Any]] = {
    **{row: attrgetter(row) for row in ROWS},
    "microbatch_tokens": lambda table: table.cut.value,
    "recompute": lambda table: table.recompute,
    "sequence_parallel": lambda table: table.sequence_parallel,
}


@dataclass(frozen=True)
class Wish:
    """`row`: the fastest priced table that has what is `wanted`. `best`: of all tables."""

    wanted: str
    best: Row
    row: Row

    @property
    def cost(self) -> float:
        """Seconds of an iteration more, as a share of the best's; a table that was not priced may cost less."""
        return self.row.seconds / self.best.seconds - 1

    @property
    def because(self) -> tuple[str, float, float] | None:
        """The part of the price that grows most, its seconds, and those of the best; None: none grows."""
        parts, least = self.row.price.parts, self.best.price.parts
        name = max(parts, key=lambda part: parts[part] - least[part])
        return (name, parts[name], least[name]) if parts[name] > least[name] else None

    def to_dict(self) -> dict[str, Any]:
        return {"wanted": self.wanted, "cost": self.cost, "because": self.because}


def wishes(ranking: Ranking, best: Row) -> Iterator[Wish]:
    """For each decision, the fastest priced table with another value than the best's, where there is one."""
    rows = sorted(ranking.priced, key=lambda row: (row.seconds, row.table.text))
    for name, value in DECISIONS.items():
        row = next((row for row in rows if value(row.table) != value(best.table)), None)
        if row is not None:
            found = value(row.table)
            yield Wish(f"{name}={str(found).lower() if isinstance(found, bool) else found}", best, row)
