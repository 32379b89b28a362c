"""Sizes of kernels' blocks and of recorded steps."""

from __future__ import annotations


def power_of_two(least: int) -> int:
    """The least power of two from `least`, 1 or more, on."""
    return 1 << (least - 1).bit_length()
