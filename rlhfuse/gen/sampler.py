"""Draws one token per row, by Gumbel-max with noise that is a pure function of (seed, sample id, position, token).

    token = argmax_i  logits_i / temperature + g_i,     g_i = -log(-log(1 - u_i)),     u_i = hash(key, i) in (0, 1)

Temperature 0 is argmax. Banned tokens are taken out first; of the others top-k and top-p leave those at or above one
cutoff. Log-probabilities are after temperature and before bans, top-k and top-p (of temperature 1 if greedy).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlhfuse.gen.core.draws import DrawBatch
from rlhfuse.gen.core.forward_batch import RunningTable
from rlhfuse.gen.core.sequence import Sequence, stop_table
from rlhfuse.gen.cpu import sampling
from rlhfuse.gen.gpu.draws import DrawInputs, DrawKernels


def draw_batch(
    drawing: list[Sequence],
    totals: np.ndarray,
    table: RunningTable,
    guesses: np.ndarray | None = None,
    measures: bool = False,
) -> DrawBatch:
    """For the next tokens of running sequences that have `totals` [R] tokens; the last two as in DrawBatch."""
    rows = np.array([seq.row for seq in drawing], np.int64)
    early, banned = totals < table.least_totals[rows], np.empty((len(drawing), 0), np.int64)
    if early.any():  # the end tokens of the sequences that are too short to end
        banned = np.where(early[:, None], stop_table(drawing), -1)
    return DrawBatch(
        keys=sampling.noise_keys(table.streams[rows], totals),
        temperatures=table.temperatures[rows],
        top_ks=table.top_ks[rows],
        top_ps=table.top_ps[rows],
        banned=banned,
        asked=table.asked[rows],
        measures=measures,
        guesses=guesses,
    )


def draw_kernels(device: torch.device) -> DrawKernels:
    """Who draws on this device without waiting for it."""
    if device.type != "cuda":
        return DrawKernels(feed, draw_into)
    from rlhfuse.gen.gpu import sampling as on_gpu  # Triton is there where CUDA is

    return DrawKernels(on_gpu.feed, on_gpu.draw)


def draw_into(logits: Tensor, inputs: DrawInputs, outputs: Tensor) -> None:
    """What gen/gpu/sampling.py does on a GPU, of logits [rows, vocab] on the CPU."""
    places, batch = inputs.unpack()
    batch = replace(batch, measures=len(outputs) == 3)
    tokens, *numbers = sampling.draw_logits(logits[torch.from_numpy(places)].float(), batch)
    rows = tokens.astype(np.int32), *(array.view(np.int32) for array in numbers)
    outputs.numpy()[:, places] = rows[: len(outputs)]


def feed(tokens: Tensor, newest: Tensor) -> None:
    """Tokens ~i become the i-th of `newest`, in place."""
    fed = (tokens < 0).nonzero()[:, 0]
    tokens[fed] = newest[~tokens[fed]]
