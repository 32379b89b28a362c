"""Draws one token per row, by Gumbel-max with noise that is a pure function of what is drawn.

    token = argmax_i  logits_i / temperature + g_i,     g_i = -log(-log(1 - u_i)),     u_i = hash(key, i) in (0, 1)

has exactly the softmax distribution; `key` is made of (seed, sample id, position) alone. So a draw depends on
nothing but the logits: not on the batch, not on the instance, not on earlier draws. Temperature 0 is argmax. Top-k
and top-p become one threshold on the logits (ties at the threshold stay). The log-probability returned
is of the distribution after temperature and before top-k, top-p and banned tokens (after temperature 1 if greedy).

On CPU the rows go through the numba kernel of sampler_cpu.py; elsewhere through the same formulas in torch: the same
hash bits, and noise equal to a few ulp. Knows nothing of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhfuse.gen import sampler_cpu
from rlhfuse.gen.sequence import Sequence

_MASK32 = 0xFFFFFFFF
_GOLDEN64 = 0x9E3779B97F4A7C15


class Draw(NamedTuple):
    """token is -1 where the row holds a number that is not finite; logprob is then NaN."""

    token: int
    logprob: float


@dataclass(frozen=True)
class DrawRequest:
    """What the draw of one row needs besides the logits."""

    key: tuple[int, int]  # two 32-bit numbers
    temperature: float
    top_k: int
    top_p: float
    banned: tuple[int, ...]

    @staticmethod
    def of(seq: Sequence) -> "DrawRequest":
        p = seq.params
        key = noise_key(p.seed, seq.sample_id, seq.total_tokens)
        return DrawRequest(key, p.temperature, p.top_k, p.top_p, seq.banned_tokens)


def noise_key(seed: int, sample_id: int, position: int) -> tuple[int, int]:
    """Two 32-bit numbers from (seed, sample id, position), by three rounds of splitmix64."""
    state = 0
    for word in (seed, sample_id, position):
        state = (state ^ (word & 0xFFFFFFFFFFFFFFFF)) + _GOLDEN64 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & _MASK32, state >> 32


def draw_tokens(logits: Tensor, requests: list[DrawRequest]) -> list[Draw]:
    """One draw per request; logits [R or more, vocab] float32, row r for request r."""
    if not requests:
        return []
    thresholds = [row_threshold(logits[r], request) for r, request in enumerate(requests)]
    if logits.device.type != "cpu":
        return _draw_torch(logits[: len(requests)], requests, thresholds)
    banned = np.full((len(requests), max(len(r.banned) for r in requests)), -1, np.int64)
    for row, request in enumerate(requests):
        banned[row, : len(request.banned)] = request.banned
    tokens, logprobs = sampler_cpu.draw_rows(
        logits.numpy(),
        np.array([r.key for r in requests], np.uint32),
        np.array([r.temperature for r in requests], np.float32),
        np.array(thresholds, np.float32),
        banned,
    )
    return [Draw(t, lp) for t, lp in zip(tokens.tolist(), logprobs.tolist())]


def row_threshold(row: Tensor, request: DrawRequest) -> float:
    """Least logit that top-k and top-p leave; minus infinity if both are off.

    Computed from one row by itself, so it cannot depend on the others; a logit of the row, so that the comparison
    with it is exact.
    """
    top_k = request.top_k if 0 < request.top_k < row.shape[0] else 0
    if request.temperature == 0 or not (top_k or request.top_p < 1):
        return float("-inf")
    if request.banned:  # what may not be drawn takes no place among the k, and no probability
        row = row.index_fill(0, torch.tensor(request.banned, device=row.device), float("-inf"))
    largest = torch.topk(row, top_k or row.shape[0]).values
    if request.top_p == 1:
        return float(largest[-1])
    before = torch.softmax(largest.double() / request.temperature, 0).cumsum(0).roll(1)  # of all more likely tokens
    before[0] = 0.0
    return float(largest[max(int((before < request.top_p).sum()), 1) - 1])


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


def _draw_torch(logits: Tensor, requests: list[DrawRequest], thresholds: list[float]) -> list[Draw]:
    device = logits.device
    temperatures = torch.tensor([r.temperature for r in requests], device=device)[:, None]
    greedy = temperatures == 0
    scaled = logits / temperatures.masked_fill(greedy, 1.0)
    keys = torch.tensor([r.key for r in requests], dtype=torch.int64, device=device)
    scores = torch.where(greedy, scaled, scaled + gumbel_noise(keys, logits.shape[1]))
    scores = scores.masked_fill(logits < torch.tensor(thresholds, device=device)[:, None], float("-inf"))
    for row, request in enumerate(requests):
        if request.banned:
            scores[row, list(request.banned)] = float("-inf")
    tokens = scores.argmax(dim=1)
    logprobs = torch.log_softmax(scaled, dim=1).gather(1, tokens[:, None])[:, 0]
    broken = ~torch.isfinite(logits.amax(dim=1))
    tokens, logprobs = tokens.masked_fill(broken, -1), logprobs.masked_fill(broken, float("nan"))
    return [Draw(t, lp) for t, lp in zip(tokens.tolist(), logprobs.tolist())]
