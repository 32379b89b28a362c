"""What a step's draws need on the device, and the way of their results back to the host, which reads them later.

The parameters travel as integers among the step's others (`Staging`); tokens and log-probabilities come back by one
copy into page-locked memory and an event that is waited for only when they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhfuse.gen.core.draws import DrawBatch, Draws, Launched

FEWEST_BANS = 8  # columns: so that few shapes of a step occur
_NO_DRAW = np.float32(-1).view(np.int32)  # the temperature of a row that draws nothing


@dataclass(frozen=True, eq=False)
class DrawInputs:
    """`packed` [(7 + bans) * rows] int32: two words of noise key, temperature, top_k, two words of top_p, the number of
    banned tokens, then these, each for all rows."""

    rows: int
    packed: Tensor

    @staticmethod
    def columns(banned: int) -> int:
        """Integers of a row with so many banned tokens."""
        return 7 + max(FEWEST_BANS, 1 << (banned - 1).bit_length())

    def unpack(self) -> tuple[np.ndarray, DrawBatch]:
        """The rows that draw, and their draws as they were given, of inputs on the CPU."""
        words = self.packed.numpy().reshape(-1, self.rows)
        places = (words[2].view(np.float32) >= 0).nonzero()[0]
        words = words[:, places]
        return places, DrawBatch(
            keys=words[:2].T.copy().view(np.uint32),
            temperatures=words[2].copy().view(np.float32),
            top_ks=words[3].astype(np.int64),
            top_ps=words[4:6].T.copy().view(np.float64)[:, 0],
            banned=words[7 : 7 + int(words[6].max(initial=0))].T.astype(np.int64),
        )


def draw_array(batch: DrawBatch, places: np.ndarray, rows: int) -> np.ndarray:
    """`DrawInputs.packed` [7 + bans, rows] for draws at `places` [R] of a step's rows; the others draw nothing."""
    banned = batch.banned.shape[1]
    packed = np.zeros((DrawInputs.columns(banned), rows), np.int32)
    packed[2] = _NO_DRAW
    packed[7:] = -1
    packed[:2, places] = batch.keys.view(np.int32).T
    packed[2, places] = batch.temperatures.view(np.int32)
    packed[3, places] = batch.top_ks
    packed[4:6, places] = batch.top_ps.view(np.int32).reshape(-1, 2).T
    packed[6, places] = (batch.banned >= 0).sum(axis=1)
    packed[7 : 7 + banned, places] = batch.banned.T
    return packed


class DrawKernels(NamedTuple):
    """Who draws; neither waits for a device."""

    feed: Callable[[Tensor, Tensor], None]  # tokens ~i become the i-th of the newest tokens, in place; both int32
    # Of logits [rows, vocab], tokens and the bits of their log-probabilities into [2, rows or more] int32, and those of
    # entropies where it is [3, rows or more].
    draw: Callable[[Tensor, DrawInputs, Tensor], None]


class DrawOutputs:
    """The newest draws on the device, and two places on the host to which they are copied in turn."""

    def __init__(self, device: torch.device, most_rows: int, entropies: bool = False) -> None:
        self._device, cuda = device, device.type == "cuda"
        shape = 3 if entropies else 2, most_rows
        self.newest = torch.zeros(shape, dtype=torch.int32, device=device)
        self._hosts = [torch.empty(shape, dtype=torch.int32, pin_memory=cuda) for _ in range(2)]
        self._events = [torch.cuda.Event() if cuda else None for _ in range(2)]

    def send(self, places: np.ndarray) -> Launched:
        """Copy what the launched step will have drawn to the host, without waiting.

        places [R]: where its draws lie among the outputs.
        """
        host, done = self._hosts[0], self._events[0]
        self._hosts.reverse()
        self._events.reverse()
        host.copy_(self.newest, non_blocking=True)
        if done is not None:
            done.record(torch.cuda.current_stream(self._device))

        def read() -> Draws:
            if done is not None:
                done.synchronize()
            tokens, *bits = host.numpy()[:, places]
            return Draws(tokens.tolist(), *(each.view(np.float32).tolist() for each in bits))

        return Launched(places, read)
