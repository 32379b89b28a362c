"""What a search of layouts found, for people and as search.json: the best tables, and the proof that none is faster.

Two searches of the same say the same to the last byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from rlhfuse.planning.price import CAPTURE, GENERATION, MOVES, OFFLOAD, SCHEDULES, STEPS
from rlhfuse.planning.search.search import Found, Row

VERSION = 1
PHASES = {  # columns of the table, and the parts of a price that each sums
    "gen+inf": (GENERATION,),
    "train": (SCHEDULES, STEPS),
    "moves": (MOVES,),
    "other": (OFFLOAD, CAPTURE),
}
HEAD = ("", "seconds", *PHASES, "peak GB", "phase", "generation", "inference", "actor_train", "critic_train", "M1")
HEAD += ("recompute", "sequence_parallel")
LEFT = HEAD.index("phase")  # from here on columns begin at the left


@dataclass(frozen=True)
class SearchAnswer:
    """What was found, and a line on the lengths that it was searched for."""

    found: Found
    lengths: str

    def render(self) -> str:
        return "\n".join((*header(self.found), self.lengths, *proof(self.found), *best_tables(self.found.rows)))

    def to_dict(self) -> dict[str, Any]:
        """search.json; tools/try_plans.py reads world_size and, of each of the tables, overrides and parts."""
        found = self.found
        return {
            "version": VERSION,
            "world_size": found.world_size,
            "hardware": found.hardware,
            "lengths": self.lengths,
            "training_rows": found.training_rows,
            "generation_rows": found.generation_rows,
            "tables": [row_to_dict(row) for row in found.rows],
            "refused": dict(found.refused),
            "bound": None if found.bound == inf else found.bound,
            "priced": found.priced,
            "drafted": found.drafted,
        }


def overrides(row: Row) -> list[str]:
    """Arguments that give a run this table, whatever layouts its file has."""
    return ["parallel=auto", *row.table.overrides()]


def row_to_dict(row: Row) -> dict[str, Any]:
    """Seconds and bytes are not rounded."""
    return {
        "overrides": overrides(row),
        "seconds": row.seconds,
        "parts": dict(row.price.parts),
        "needed_bytes": row.needed_bytes,
        "limit_bytes": row.limit_bytes,
        "fullest_phase": row.fullest.phase,
    }


def header(found: Found) -> tuple[str, ...]:
    tables = f"{found.training_rows:,} training tables x {found.generation_rows} of generation and inference"
    return (f"searched {tables} on {found.world_size} {found.hardware}",)


def proof(found: Found) -> tuple[str, ...]:
    """What was refused, what was looked at how closely, and why no other table can be among the best."""
    counts = ", ".join(f"{count:,} {rule}" for rule, count in found.refused.items())
    looked = f"  priced exactly: {found.priced}; memory checked: {found.drafted}"
    if found.bound == inf:
        return f"  refused: {counts or 'none'}", f"{looked}; no other table fits"
    others = f"all others have a bound of {found.bound:.4g} s or more: no table of this space is predicted to be faster"
    return f"  refused: {counts or 'none'}", f"{looked}; {others}"


def best_tables(rows: Sequence[Row]) -> list[str]:
    """A line for each, the fastest first, seconds of an iteration."""
    lines = [HEAD, *(_cells(number, row) for number, row in enumerate(rows, start=1))]
    widths = [max(map(len, column)) for column in zip(*lines)]
    aligned = (
        "  ".join(
            cell.ljust(width) if place >= LEFT else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths))
        )
        for line in lines
    )
    return [line.rstrip() for line in aligned]


def by_phase(parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds of the columns."""
    return {phase: sum(parts[name] for name in names) for phase, names in PHASES.items()}


def gigabytes(count: float) -> str:
    """In 10^9 bytes, as trainer.memory_limit_gb."""
    return f"{count / 1e9:.3g}"


def _cells(number: int, row: Row) -> tuple[str, ...]:
    table, seconds = row.table, by_phase(row.price.parts).values()
    layouts = table.generation, table.inference, table.actor_train, table.critic_train or "-"
    return (
        str(number),
        f"{row.seconds:.4g}",
        *(f"{part:.3g}" for part in seconds),
        gigabytes(row.needed_bytes),
        row.fullest.phase,
        *map(str, layouts),
        str(table.microbatches),
        table.recompute,
        str(table.sequence_parallel).lower(),
    )
