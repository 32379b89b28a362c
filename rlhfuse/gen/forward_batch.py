"""One step's work as flat arrays, ready for the model.

The tokens of all sequences lie one after another, without padding between them:

    sequence 0      1   2            (a chunk of 4 prompt tokens, then two that decode)
    tokens   a b c d e  f
    query_starts 0, 4, 5, 6     contexts 7, 31, 12     draw_rows: the last row of each that draws

Knows nothing of torch, of weights or of policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhfuse.gen.running_table import RunningTable
from rlhfuse.gen.scheduler import Work


@dataclass(frozen=True)
class ForwardBatch:
    tokens: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64, within each sequence
    slots: np.ndarray  # [T] int64: block * block_tokens + offset, where key and value go
    query_starts: np.ndarray  # [S + 1] int64: rows of each sequence
    contexts: np.ndarray  # [S] int64: tokens in the cache after the step
    tables: np.ndarray  # [S, most blocks] int32, short rows filled with 0
    draw_rows: np.ndarray  # [R] int64: rows whose logits are wanted

    @staticmethod
    def of(work: list[Work], table: RunningTable, block_tokens: int) -> ForwardBatch:
        counts = np.array([count for _, count, _ in work])
        contexts = np.array([seq.computed_tokens + count for seq, count, _ in work])  # w.context, in place: hot
        rows = np.array([seq.row for seq, _, _ in work])
        draws = np.array([draws for _, _, draws in work])
        ends = counts.cumsum()
        if ends[-1] == len(work):  # one token each: the usual step
            positions, token_rows = contexts - 1, rows
        else:
            positions = np.arange(ends[-1]) + np.repeat(contexts - ends, counts)
            token_rows = np.repeat(rows, counts)
        numbers, offsets = np.divmod(positions, block_tokens)
        return ForwardBatch(
            tokens=_tokens(work),
            positions=positions,
            slots=table.blocks[token_rows, numbers].astype(np.int64) * block_tokens + offsets,
            query_starts=np.concatenate(([0], ends)),
            contexts=contexts,
            tables=table.blocks[rows, : int(numbers.max()) + 1],
            draw_rows=ends[draws] - 1,
        )


def _tokens(work: list[Work]) -> np.ndarray:
    """The tokens of all sequences one after another."""
    tokens: list[int] = []
    for seq, count, draws in work:
        if count == 1 and draws and seq.tokens:
            tokens.append(seq.tokens[-1])
        else:
            tokens += seq.slice(seq.computed_tokens, seq.computed_tokens + count)
    return np.array(tokens)
