"""Shapes of decode steps on GPUs, rounded up so that few are recorded.

Rows to 1, 2, 4, 8, 16, 32, 48, ...; columns to powers of two, from those of 256 tokens up.
"""

from __future__ import annotations

from functools import lru_cache

from rlhfuse.base.power_of_two import power_of_two

SHORTEST_TOKENS = 256  # narrower tables are widened to this: attention over so little costs nothing
ROW_STEP = 16


def rounded_rows(sequences: int, most: int) -> int:
    """Rows of a step of so many sequences; beyond `most` only if they are."""
    short = sequences <= ROW_STEP // 2
    rows = power_of_two(sequences) if short else -(-sequences // ROW_STEP) * ROW_STEP
    return max(sequences, min(rows, most))


def rounded_width(blocks: int, most: int, block_tokens: int) -> int:
    """Columns of tables of at most so many blocks; beyond `most` only if they are."""
    width = power_of_two(max(blocks, -(-SHORTEST_TOKENS // block_tokens)))
    return max(blocks, min(width, most))


@lru_cache(maxsize=64)  # asked again and again by searches
def shapes_of_generation(sequences: int, tokens: range, context: int, block_tokens: int, most_sequences: int) -> int:
    """How many shapes `sequences` have that begin together, grow from the first of `tokens` to the last and end early.

    From step to step rows only become fewer and tables wider, so each row count and each width is new once.
    """
    most_blocks = -(-context // block_tokens)
    rows = {rounded_rows(count, most_sequences) for count in range(1, min(sequences, most_sequences) + 1)}
    blocks = range(-(-tokens.start // block_tokens), -(-tokens.stop // block_tokens) + 1)
    return len(rows) + len({rounded_width(count, most_blocks, block_tokens) for count in blocks}) - 1
