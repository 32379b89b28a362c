"""What it costs to insist on another value of one decision, by the tables that the search has priced anyway."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlhfuse.planning.search.search import Ranking, Row
from rlhfuse.planning.search.table import Table, shared
from rlhfuse.tasks.task import TRAINED


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
    for number, decision in enumerate(decisions(best.table)):
        row = next((row for row in rows if decisions(row.table)[number] != decision), None)
        if row is not None:
            yield Wish(decisions(row.table)[number], best, row)


def decisions(table: Table) -> tuple[str, ...]:
    """The decisions of a table as settings."""
    return (
        f"generation={table.generation}",
        " ".join(f"{row}={layout}" for row, layout in shared(table.inference).items()),
        *(f"{row}={getattr(table, row)}" for row in TRAINED),
        f"microbatch_tokens={table.cut.value}",
        f"recompute={table.recompute}",
        f"sequence_parallel={str(table.sequence_parallel).lower()}",
    )
