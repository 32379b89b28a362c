"""Lines of cells under each other: the one form of tables that programs print."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence


def aligned(lines: Iterable[Sequence[str]], left: Container[int] | None = None) -> list[str]:
    """Two blanks between columns; the cells of those numbered in `left`, or of all, begin at the left, of others end at
    the right."""
    rows = [tuple(line) for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows)]
    placed = (
        "  ".join(
            cell.ljust(width) if left is None or at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )
    return [line.rstrip() for line in placed]
