"""Draws one token per row, by Gumbel-max with noise that is a pure function of (seed, sample id, position, token).

    token = argmax_i  logits_i / temperature + g_i,     g_i = -log(-log(1 - u_i)),     u_i = hash(key, i) in (0, 1)

Temperature 0 is argmax. Banned tokens are taken out first; of the others top-k and top-p leave those at or above one
cutoff. Log-probabilities are after temperature and before bans, top-k and top-p (of temperature 1 if greedy).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhfuse.gen.core.forward_batch import RunningTable
from rlhfuse.gen.core.sequence import Sequence
from rlhfuse.gen.cpu import sampling
from rlhfuse.models.cpu.tiles import share_threads

_MASK32 = 0xFFFFFFFF


class Draws(NamedTuple):
    """Per row; a token is -1, its log-probability NaN, where the row holds a number that is not finite."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class DrawBatch:
    """What the draws of R rows need besides the logits."""

    keys: np.ndarray  # [R, 2] uint32: of (seed, sample id, position)
    temperatures: np.ndarray  # [R] float32, 0 = greedy
    top_ks: np.ndarray  # [R] int64, 0 = off
    top_ps: np.ndarray  # [R] float64, 1 = off
    banned: np.ndarray  # [R, B] int64, unused columns -1

    @staticmethod
    def of(drawing: list[Sequence], totals: np.ndarray, table: RunningTable) -> DrawBatch:
        """For the next tokens of running sequences that have `totals` [R] tokens."""
        rows = np.array([seq.row for seq in drawing], np.int64)
        return DrawBatch(
            keys=sampling.noise_keys(table.streams[rows], totals),
            temperatures=table.temperatures[rows],
            top_ks=table.top_ks[rows],
            top_ps=table.top_ps[rows],
            banned=_banned(drawing, totals < table.least_totals[rows]),
        )


def _banned(drawing: list[Sequence], early: np.ndarray) -> np.ndarray:
    """The end tokens of the sequences that are too short to end, [R, B]."""
    if not early.any():
        return np.empty((len(drawing), 0), np.int64)
    banned = np.full((len(drawing), max(len(seq.stop_ids) for seq in drawing)), -1, np.int64)
    for row in early.nonzero()[0]:
        banned[row, : len(drawing[row].stop_ids)] = sorted(drawing[row].stop_ids)
    return banned


def draw_tokens(logits: Tensor, batch: DrawBatch) -> Draws:
    """One draw per row of `batch`; logits [R or more, vocab] float32."""
    rows = len(batch.keys)
    if rows == 0:
        return Draws([], [])
    if logits.device.type != "cpu":
        return _draw_torch(logits[:rows], batch)
    share_threads()
    # Rows of a wider buffer are copied: the kernel is compiled for rows without gaps, which it reads several times.
    contiguous = np.ascontiguousarray(logits.numpy())
    tokens, logprobs = sampling.draw_rows(
        contiguous, batch.keys, batch.temperatures, batch.top_ks, batch.top_ps, batch.banned
    )
    return Draws(tokens.tolist(), logprobs.tolist())


def _draw_torch(logits: Tensor, batch: DrawBatch) -> Draws:
    def to_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(logits.device)

    temperatures = to_device(batch.temperatures)[:, None]
    greedy = temperatures == 0
    scaled = logits / temperatures.masked_fill(greedy, 1.0)
    allowed = logits
    if batch.banned.size:
        rows, columns = (batch.banned >= 0).nonzero()
        allowed = logits.clone()
        allowed[to_device(rows), to_device(batch.banned[rows, columns])] = float("-inf")
    noise = gumbel_noise(to_device(batch.keys.astype(np.int64)), logits.shape[1])
    scores = torch.where(greedy, scaled, scaled + noise)
    out = (allowed < cutoffs_torch(allowed, batch)[:, None]) | (allowed == float("-inf"))
    best, tokens = scores.masked_fill(out, float("-inf")).max(dim=1)
    logprobs = torch.log_softmax(scaled, dim=1).gather(1, tokens[:, None])[:, 0]
    broken = ~(torch.isfinite(logits.amax(dim=1)) & torch.isfinite(best))
    tokens, logprobs = tokens.masked_fill(broken, -1), logprobs.masked_fill(broken, float("nan"))
    return Draws(tokens.tolist(), logprobs.tolist())


def cutoffs_torch(logits: Tensor, batch: DrawBatch) -> Tensor:
    """As `row_cutoff` of gen/cpu/sampling.py, for all rows [R, vocab] at once: [R], minus infinity if both are off."""
    vocab = logits.shape[1]
    cutoffs = torch.full((len(logits),), float("-inf"), device=logits.device)
    limited = (batch.top_ks > 0) & (batch.top_ks < vocab)
    rows = ((batch.temperatures > 0) & (limited | (batch.top_ps < 1))).nonzero()[0]
    if not len(rows):
        return cutoffs

    def to_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array[rows]).to(logits.device)[:, None]

    where = torch.from_numpy(rows).to(logits.device)
    ranked = logits[where].sort(dim=1, descending=True).values
    beyond = torch.arange(vocab, device=logits.device) >= to_device(np.where(limited, batch.top_ks, vocab))
    shares = torch.softmax((ranked.double() / to_device(batch.temperatures)).masked_fill(beyond, float("-inf")), dim=1)
    before = shares.cumsum(1).roll(1, dims=1)  # of all more likely tokens
    before[:, 0] = 0.0
    # A running sum may round up to 1 too early: without top-p nothing is cut, whatever it is.
    least = to_device(np.where(batch.top_ps < 1, batch.top_ps, 2.0))
    kept = ((before < least) & ~beyond).sum(dim=1, keepdim=True)
    cutoffs[where] = ranked.gather(1, kept.clamp(min=1) - 1)[:, 0]
    return cutoffs


def gumbel_noise(keys: Tensor, vocab: int) -> Tensor:
    """Noise [R, vocab] float32 of keys [R, 2] int64 (holding 32-bit numbers), on their device."""
    index = torch.arange(vocab, device=keys.device)[None]
    h = _mix(((index * 0x9E3779B9) & _MASK32) ^ keys[:, :1])
    h = _mix((h + keys[:, 1:]) & _MASK32)
    return -torch.log(-torch.log1p(-_uniform(h)))


def _mix(h: Tensor) -> Tensor:
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK32
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK32
    return h ^ (h >> 16)


def _uniform(h: Tensor) -> Tensor:
    """(h + 1/2) / 2**32 in float32, kept below 1."""
    return ((h.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
