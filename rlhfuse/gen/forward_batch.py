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
    def of(work: list[Work], block_tokens: int) -> "ForwardBatch":
        counts = np.fromiter((w.count for w in work), np.int64, len(work))
        contexts = np.fromiter((w.context for w in work), np.int64, len(work))
        query_starts = np.concatenate(([0], np.cumsum(counts)))
        tables = np.zeros((len(work), max(len(w.seq.block_table) for w in work)), np.int32)
        tokens: list[int] = []
        for row, w in enumerate(work):
            tables[row, : len(w.seq.block_table)] = w.seq.block_table
            tokens += w.seq.slice(w.seq.computed_tokens, w.context)
        positions = np.arange(len(tokens)) + np.repeat(contexts - query_starts[1:], counts)
        sequence = np.repeat(np.arange(len(work)), counts)
        blocks = tables[sequence, positions // block_tokens].astype(np.int64)
        draws = np.fromiter((w.draws for w in work), np.bool_, len(work))
        return ForwardBatch(
            np.array(tokens, np.int64),
            positions,
            blocks * block_tokens + positions % block_tokens,
            query_starts,
            contexts,
            tables,
            query_starts[1:][draws] - 1,
        )
