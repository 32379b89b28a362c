"""Draws follow the distribution, depend on nothing else, and agree between the two implementations."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfuse.gen import sampler, sampler_cpu
from rlhfuse.gen.sampler import DrawRequest, draw_tokens, noise_key


def request(position: int, temperature=1.0, top_k=0, top_p=1.0, banned=(), seed=0) -> DrawRequest:
    return DrawRequest(noise_key(seed, 3, position), temperature, top_k, top_p, banned)


def counts(probabilities: torch.Tensor, draws: int, **options) -> np.ndarray:
    logits = probabilities.log().float().expand(draws, -1).contiguous()
    drawn = draw_tokens(logits, [request(i, **options) for i in range(draws)])
    return np.bincount([d.token for d in drawn], minlength=len(probabilities))


def chi_square(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """Standard score of the statistic: below 4 unless the draws are wrong."""
    expected = probabilities * observed.sum()
    inside = expected > 0
    assert observed[~inside].sum() == 0
    statistic = ((observed - expected)[inside] ** 2 / expected[inside]).sum()
    freedom = inside.sum() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_distribution():
    p = torch.linspace(1, 20, 100)
    p = p / p.sum()
    assert abs(chi_square(counts(p, 40000), p.numpy())) < 4
    cool = (p**2 / (p**2).sum()).numpy()
    assert abs(chi_square(counts(p, 40000, temperature=0.5), cool)) < 4


def test_top_k_and_top_p_keep_the_likely_tokens():
    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    kept = np.array([0.4, 0.3, 0, 0, 0]) / 0.7
    assert abs(chi_square(counts(p, 4000, top_k=2), kept)) < 4
    assert abs(chi_square(counts(p, 4000, top_p=0.6), kept)) < 4
    assert counts(p, 100, top_p=1e-6)[0] == counts(p, 100, top_k=1)[0] == 100
    # A banned token takes no place among the k: with top_k=1 nothing would be left to draw.
    others = np.array([0, 0.3, 0.15, 0, 0]) / 0.45
    assert abs(chi_square(counts(p, 4000, top_k=2, banned=(0,)), others)) < 4
    assert counts(p, 300, top_k=1, banned=(0,))[1] == counts(p, 300, top_p=0.1, banned=(0,))[1] == 300


def test_noise_of_neighbouring_keys_is_uncorrelated():
    keys = torch.tensor([noise_key(s, i, t) for s in (0, 1) for i in (0, 1) for t in range(8)])
    noise = sampler.gumbel_noise(keys, 4096)
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.08  # 5 / sqrt(4096)
    assert torch.corrcoef(torch.stack((noise[0, 1:], noise[0, :-1])))[0, 1].abs() < 0.08
    assert abs(noise.mean() - 0.57722) < 0.01 and abs(noise.var() - math.pi**2 / 6) < 0.03


def test_both_implementations_agree():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 1003, generator=generator) * 3
    options = [{}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.5}, {"banned": (1, 2)}]
    requests = [request(i, **options[i % 6]) for i in range(40)]
    ours = draw_tokens(logits, requests)
    thresholds = [sampler.row_threshold(logits[i], r) for i, r in enumerate(requests)]
    theirs = sampler._draw_torch(logits, requests, thresholds)
    assert [d.token for d in ours] == [d.token for d in theirs]
    assert max(abs(a.logprob - b.logprob) for a, b in zip(ours, theirs)) < 1e-5
    noise = sampler.gumbel_noise(torch.tensor([requests[0].key]), 1000)[0]
    k0, k1 = np.array(requests[0].key, np.uint32)
    assert max(abs(-math.log(sampler_cpu.exponential(k0, k1, i)) - float(noise[i])) for i in range(1000)) < 1e-5


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 300), st.integers(1, 9))
def test_a_row_does_not_depend_on_the_others(seed, vocab, rows):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 4
    requests = [request(i, (0.0, 1.0, 0.7)[i % 3], i % 4, (1.0, 0.8)[i % 2], seed=seed) for i in range(rows)]
    together = draw_tokens(logits, requests)
    assert together == [draw_tokens(logits[i : i + 1], [requests[i]])[0] for i in range(rows)]


def test_rows_that_are_not_finite():
    for draw in (draw_tokens, lambda x, r: sampler._draw_torch(x, r, [-math.inf] * len(r))):
        for bad in (math.nan, math.inf):
            logits = torch.zeros(2, 70)
            logits[0, 66] = bad
            broken, good = draw(logits, [request(0), request(1)])
            assert broken.token == -1 and math.isnan(broken.logprob)
            assert good.token >= 0 and abs(good.logprob + math.log(70)) < 1e-5


def test_largest_and_smallest_hash_give_finite_noise():
    for h in (0, 2**32 - 1):
        u = sampler._uniform(torch.tensor([h]))
        assert 0 < float(u) < 1 and torch.isfinite(-torch.log(-torch.log1p(-u)))
