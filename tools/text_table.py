"""Lines of cells under each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(lines: Iterable[Sequence[str]], left: int = 0) -> list[str]:
    """Two blanks between columns; those from number `left` on begin at the left, others end at the right."""
    rows = [tuple(line) for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows)]
    placed = (
        "  ".join(
            cell.ljust(width) if at >= left else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )
    return [line.rstrip() for line in placed]
