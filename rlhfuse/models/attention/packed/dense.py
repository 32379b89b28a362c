"""Torch's dense attention, length by length: it runs everywhere, and slowly."""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfuse.models.attention.packed.sequences import SequenceBorders


def dense_attention(q: Tensor, k: Tensor, v: Tensor, sequences: SequenceBorders) -> Tensor:
    lengths = [b - a for a, b in zip(sequences.borders, sequences.borders[1:])]
    # Neighbours of one length, often the samples of one prompt that were cut, are one batch: same bits, fewer calls.
    runs = [(length, sum(1 for _ in run)) for length, run in groupby(lengths) if length]
    # Split and not sliced: the gradient of one split is one cat, that of each slice a whole tensor of zeros.
    parts = zip(*(x.split([length * count for length, count in runs]) for x in (q, k, v)))
    pieces = []
    for part, (_, count) in zip(parts, runs):
        q_run, k_run, v_run = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in part)
        shared = q_run.shape[1] != k_run.shape[1]
        out = F.scaled_dot_product_attention(q_run, k_run, v_run, is_causal=True, enable_gqa=shared)
        pieces.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces) if pieces else torch.empty_like(q)
