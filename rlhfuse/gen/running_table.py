"""What a step needs of the running sequences, as arrays with one row each: a step gathers rows, it does not loop.

    row   blocks           streams  temperatures  top_ks  top_ps  least_totals
     0    5  9 12  0 ...   0x3f...      1.0          0      0.9        40
     1    7  9  0  0 ...   0x81...      0.0          0      1.0         9
     2    free: whatever was there

A sequence keeps its row (`Sequence.row`) from admission until it leaves. Everything but `blocks` is fixed by then;
`blocks` repeats `Sequence.block_table` and is told of each new block. The scheduler owns the table. Knows nothing of
torch, of tokens or of policy.
"""

from __future__ import annotations

import numpy as np

from rlhfuse.gen.sequence import Sequence

NO_ROW = -1


class RunningTable:
    def __init__(self, rows: int) -> None:
        self.blocks = np.zeros((rows, 8), np.int32)  # columns are added when a sequence needs them
        self.streams = np.zeros(rows, np.uint64)  # names of the samples' noise
        self.temperatures = np.zeros(rows, np.float32)
        self.top_ks = np.zeros(rows, np.int64)
        self.top_ps = np.zeros(rows, np.float64)
        self.least_totals = np.zeros(rows, np.int64)  # total tokens before which no end token may be drawn
        self._free = list(range(rows - 1, -1, -1))

    def enter(self, seq: Sequence) -> None:
        """Give `seq` a row, with the blocks it has. Last of all: a failure before leaves the table as it was."""
        assert seq.row == NO_ROW, f"sample {seq.sample_id} already has row {seq.row}"
        row, params = self._free[-1], seq.params
        self.streams[row] = seq.noise_stream
        self.temperatures[row] = params.temperature
        self.top_ks[row] = params.top_k
        self.top_ps[row] = params.top_p
        self.least_totals[row] = len(seq.prompt) + params.min_tokens
        self.blocks[row] = 0
        self._copy_blocks(row, seq.block_table, 0)
        seq.row = self._free.pop()

    def extend(self, seq: Sequence, start: int) -> None:
        """Copy the blocks of `seq` from number `start` on."""
        self._copy_blocks(seq.row, seq.block_table, start)

    def _copy_blocks(self, row: int, block_table: list[int], start: int) -> None:
        most = len(block_table)
        if most > self.blocks.shape[1]:
            wider = np.zeros((self.blocks.shape[0], max(most, 2 * self.blocks.shape[1])), np.int32)
            wider[:, : self.blocks.shape[1]] = self.blocks
            self.blocks = wider
        self.blocks[row, start:most] = block_table[start:]

    def leave(self, seq: Sequence) -> None:
        self._free.append(seq.row)
        seq.row = NO_ROW

    def check_integrity(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Assert that rows are held by running sequences alone and repeat what these say."""
        rows = [seq.row for seq in running]
        assert sorted(rows + self._free) == list(range(len(self.streams))), f"rows {rows} and free ones {self._free}"
        assert all(seq.row == NO_ROW for seq in waiting), "a waiting sequence holds a row"
        for seq in running:
            blocks = self.blocks[seq.row, : len(seq.block_table)].tolist()
            assert blocks == seq.block_table, f"sample {seq.sample_id}: row holds {blocks}, table {seq.block_table}"
            assert int(self.streams[seq.row]) == seq.noise_stream, f"sample {seq.sample_id} has another's row"
