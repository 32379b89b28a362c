"""One step's sequences as flat arrays, ready for the model: tokens lie one after another, without padding.

sequence 0      1   2            (a chunk of 4 prompt tokens, then two that decode)
tokens   a b c d e  f
query_starts 0, 4, 5, 6     contexts 7, 31, 12     draw_rows: the last row of each that draws
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rlhfuse.gen.core.sequence import Sequence

COLDEST = 1e-30  # temperature
NO_ROW = -1


class ScheduledSequence(NamedTuple):
    """Run the next `num_tokens` pending tokens of `seq`."""

    seq: Sequence
    num_tokens: int
    draws: bool  # these are all: the step ends with the draw of a new token
    guesses: list[int] = []  # tokens that may follow, run with it; each draws, and its draw counts if it was foreseen


class RunningTable:
    """What a step needs of the running sequences, one row each, so that a step gathers rows and does not loop.

    A sequence keeps its row while it runs; all but `blocks` is fixed by then. The scheduler owns the table.
    """

    def __init__(self, rows: int) -> None:
        self.blocks = np.zeros((rows, 8), np.int32)  # as in `Sequence.block_table`; columns are added when needed
        self.streams = np.zeros(rows, np.uint64)  # names of the samples' noise
        self.temperatures = np.zeros(rows, np.float32)
        self.top_ks = np.zeros(rows, np.int64)
        self.top_ps = np.zeros(rows, np.float64)
        self.asked = np.zeros(rows, np.bool_)  # for log-probabilities
        self.least_totals = np.zeros(rows, np.int64)  # total tokens before which no end token may be drawn
        self._free = list(range(rows - 1, -1, -1))

    def add(self, seq: Sequence) -> None:
        """Give `seq` a row, with the blocks it has. Last of all: a failure before leaves the table as it was."""
        assert seq.row == NO_ROW, f"sample {seq.sample_id} already has row {seq.row}"
        row, params = self._free[-1], seq.params
        self.streams[row] = seq.noise_stream
        # What is colder draws as the coldest: any difference of logits is endless; 0 stays, which means greedy.
        self.temperatures[row] = params.temperature and min(max(params.temperature, COLDEST), 1 / COLDEST)
        self.top_ks[row] = params.top_k
        self.top_ps[row] = params.top_p
        self.asked[row] = params.logprobs
        self.least_totals[row] = len(seq.prompt) + params.min_tokens
        self.blocks[row] = 0
        self.copy_blocks(row, seq.block_table, 0)
        seq.row = self._free.pop()

    def copy_blocks(self, row: int, block_table: list[int], start: int) -> None:
        """Copy the blocks of a row's sequence from number `start` on."""
        most = len(block_table)
        if most > self.blocks.shape[1]:
            wider = np.zeros((self.blocks.shape[0], max(most, 2 * self.blocks.shape[1])), np.int32)
            wider[:, : self.blocks.shape[1]] = self.blocks
            self.blocks = wider
        self.blocks[row, start:most] = block_table[start:]

    def remove(self, seq: Sequence) -> None:
        self._free.append(seq.row)
        seq.row = NO_ROW


@dataclass(frozen=True)
class ForwardBatch:
    tokens: np.ndarray  # [T] int64; ~i: what the step launched before draws at its place i
    positions: np.ndarray  # [T] int64, within each sequence
    slots: np.ndarray  # [T] int64: block * block_tokens + offset, where key and value go
    query_starts: np.ndarray  # [S + 1] int64: rows of each sequence
    contexts: np.ndarray  # [S] int64: tokens in the cache after the step
    tables: np.ndarray  # [S, most blocks] int32, short rows filled with 0
    draw_rows: np.ndarray  # [R] int64: rows whose logits are wanted
    guesses: np.ndarray | None = None  # [R] int64, as in DrawBatch
    longest: int = 1  # tokens that one of the sequences may have in the end

    @staticmethod
    def of(scheduled: list[ScheduledSequence], table: RunningTable, block_tokens: int) -> ForwardBatch:
        sequences, counts, draws, guesses = zip(*scheduled)
        tokens: list[int] = []
        for seq, count, drawing, guessed in scheduled:
            if count == 1 and drawing and seq.tokens:
                tokens.append(seq.tokens[-1])
                tokens += guessed
            else:
                tokens += seq.slice(seq.computed_tokens, seq.computed_tokens + count)
        computed, rows = np.array([seq.computed_tokens for seq in sequences]), np.array([seq.row for seq in sequences])
        verifies = any(guesses)
        if len(tokens) == len(scheduled):  # one token each: the usual step
            ends, contexts = np.arange(1, len(tokens) + 1), computed + 1
            positions, token_rows = computed, rows
        else:
            counts = np.array(counts) + np.array([len(guessed) for guessed in guesses])
            ends, contexts = counts.cumsum(), computed + counts
            positions = np.arange(ends[-1]) + np.repeat(contexts - ends, counts)
            token_rows = np.repeat(rows, counts)
        numbers, offsets = np.divmod(positions, block_tokens)
        return ForwardBatch(
            tokens=np.array(tokens),
            positions=positions,
            slots=table.blocks[token_rows, numbers].astype(np.int64) * block_tokens + offsets,
            query_starts=np.concatenate(([0], ends)),
            contexts=contexts,
            tables=table.blocks[rows, : int(numbers.max()) + 1],
            draw_rows=np.arange(ends[-1]) if verifies else ends[np.array(draws)] - 1,  # guesses run where all decode
            guesses=np.array([g for guessed in guesses for g in (*guessed, -1)]) if verifies else None,
            longest=max(seq.max_total_tokens for seq in sequences),
        )
