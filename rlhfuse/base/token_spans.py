"""Runs of tokens within a response: those that were drawn, and those observed between two turns."""

from __future__ import annotations

from collections.abc import Sequence

TokenSpan = tuple[int, int]  # first and last + 1


def drawn_spans(observed: Sequence[TokenSpan], tokens: int) -> list[TokenSpan]:
    """What lies around the `observed` runs of a response of so many tokens."""
    starts, ends = [0, *(end for _, end in observed)], [*(start for start, _ in observed), tokens]
    return list(zip(starts, ends))
