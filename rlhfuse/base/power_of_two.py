"""Sizes of kernels' blocks, of recorded steps and of tables that grow."""

from __future__ import annotations


def power_of_two(least: int) -> int:
    """The least power of two from `least`, 1 or more, on."""
    return 1 << (least - 1).bit_length()


def table_rows(positions: int) -> int:
    """Rows of the rotary embedding's tables, which double as samples become longer, for so many positions."""
    return power_of_two(max(positions, 256))
