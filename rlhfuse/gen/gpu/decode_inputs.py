"""The integers of one decode step on the device: one tensor, one copy, and few different shapes.

A decode step runs one token of each sequence. Its shape is rounded up, so that few shapes ever occur:

    rows     1, 2, 4, 8, 16, 32, 48, ...       sequences, up to the most that may run at once
    width    powers of two                     columns of the block tables, from 256 tokens up to the context

Rows past the batch are padding: token 0 at position 0 with a context of 1, in a spare block of the cache that no
sequence ever gets. So padding writes where nobody reads, and reads only what padding wrote. Knows nothing of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhfuse.gen.forward_batch import ForwardBatch

SHORTEST_TOKENS = 256  # narrower tables are widened to this: attention over so little costs nothing
ROW_STEP = 16


class DecodeShape(NamedTuple):
    rows: int
    width: int  # columns of the block tables

    @property
    def integers(self) -> int:
        return self.rows * (4 + self.width)

    @staticmethod
    def holding(sequences: int, blocks: int, most_sequences: int, most_blocks: int, block_tokens: int) -> DecodeShape:
        """The smallest shape for so many sequences of at most `blocks` blocks each.

        No shape exceeds `most_sequences` rows or `most_blocks` columns, unless the batch itself does.
        """
        short = sequences <= ROW_STEP // 2
        rows = _power_of_two(sequences) if short else -(-sequences // ROW_STEP) * ROW_STEP
        width = _power_of_two(max(blocks, -(-SHORTEST_TOKENS // block_tokens)))
        return DecodeShape(max(sequences, min(rows, most_sequences)), max(blocks, min(width, most_blocks)))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True, eq=False)
class DecodeInputs:
    """Views into `packed`, int32 [shape.integers] on the device, which the next step of this shape overwrites."""

    shape: DecodeShape
    packed: Tensor

    @staticmethod
    def empty(shape: DecodeShape, device: torch.device) -> DecodeInputs:
        return DecodeInputs(shape, torch.empty(shape.integers, dtype=torch.int32, device=device))

    def indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """tokens, positions, slots, each [rows] int64: new tensors, made by one kernel."""
        tokens, positions, slots = self.packed[: 3 * self.shape.rows].long().chunk(3)
        return tokens, positions, slots

    @property
    def contexts(self) -> Tensor:
        """[rows] int32: tokens in the cache after the step."""
        return self.packed[3 * self.shape.rows : 4 * self.shape.rows]

    @property
    def tables(self) -> Tensor:
        """[rows, width] int32 cache blocks; those past a context are never looked at."""
        return self.packed[4 * self.shape.rows :].view(self.shape)


def padded_arrays(batch: ForwardBatch, shape: DecodeShape, spare_block: int, block_tokens: int) -> list[np.ndarray]:
    """The parts of DecodeInputs.packed for a batch of one token per sequence, in order, with padding rows."""
    sequences = len(batch.contexts)
    assert len(batch.tokens) == sequences <= shape.rows, f"{len(batch.tokens)} tokens of {sequences} sequences"
    tables = np.full(shape, spare_block, np.int32)
    tables[:sequences, : batch.tables.shape[1]] = batch.tables
    facts = np.zeros((4, shape.rows), np.int32)
    facts[2], facts[3] = spare_block * block_tokens, 1
    facts[:, :sequences] = batch.tokens, batch.positions, batch.slots, batch.contexts
    return [facts, tables]


class Staging:
    """Page-locked host memory through which a step's integers reach the device in one copy that nobody waits for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.int32)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def send(self, arrays: list[np.ndarray], target: Tensor | None = None) -> Tensor:
        """All arrays one after another as int32 on the device: in `target`, or a new tensor.

        The copy is ordered before what the current stream runs next; the arrays may change at once.
        """
        total = sum(array.size for array in arrays)
        if self._copied is not None:
            self._copied.synchronize()  # the copy before this one still reads the host memory
        if total > self._host.numel():
            self._host = torch.empty(2 * total, dtype=torch.int32, pin_memory=self._copied is not None)
        np.concatenate([array.reshape(-1) for array in arrays], out=self._host.numpy()[:total], casting="same_kind")
        if target is None:
            target = torch.empty(total, dtype=torch.int32, device=self._device)
        target.copy_(self._host[:total], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        return target
