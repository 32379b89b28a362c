"""Draws follow the distribution and depend on nothing else."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.draw_batches import draw_batch, noise_key
from testkit.profiles import examples

from rlhfuse.gen import sampler
from rlhfuse.gen.core.forward_batch import RunningTable
from rlhfuse.gen.core.sequence import SamplingParams, Sequence
from rlhfuse.gen.cpu import sampling
from rlhfuse.gen.cpu.sampling import BINS, draw_tokens, row_cutoff

SEEDS = st.integers(0, 2**31)


def counts(probabilities: torch.Tensor, draws: int, **options) -> np.ndarray:
    logits = probabilities.log().float().expand(draws, -1).contiguous()
    return np.bincount(draw_tokens(logits, draw_batch([options] * draws)).tokens, minlength=len(probabilities))


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


def test_banned_tokens_are_out_before_top_k_and_top_p():
    """Else a ban of the one token they leave would leave none."""
    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    assert counts(p, 300, top_k=1, banned=(0,))[1] == 300
    assert counts(p, 300, top_p=0.3, banned=(0,))[1] == counts(p, 300, top_p=1e-6, banned=(0,))[1] == 300
    assert counts(p, 300, temperature=0.0, banned=(0, 1))[2] == 300
    kept = np.array([0, 0.3, 0.15, 0.1, 0]) / 0.55
    assert abs(chi_square(counts(p, 4000, top_k=3, banned=(0,)), kept)) < 4
    logprob = draw_tokens(p.log()[None], draw_batch([dict(top_k=1, banned=(0,))])).logprobs[0]
    assert abs(logprob - math.log(0.3)) < 1e-6  # of the policy, not of what was left


def gumbel_noise(keys: list[tuple[int, int]], vocab: int) -> torch.Tensor:
    hashes = [[sampling.noise_hash(np.uint32(k0), np.uint32(k1), i) for i in range(vocab)] for k0, k1 in keys]
    return -torch.tensor([[sampling.exponential(h) for h in row] for row in hashes]).log()


def test_noise_of_neighbouring_keys_is_uncorrelated():
    keys = [noise_key(s, i, t) for s in (0, 1) for i in (0, 1) for t in range(8)]
    noise = gumbel_noise(keys, 4096)
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.08  # 5 / sqrt(4096)
    assert torch.corrcoef(torch.stack((noise[0, 1:], noise[0, :-1])))[0, 1].abs() < 0.08
    assert abs(noise.mean() - 0.57722) < 0.01 and abs(noise.var() - math.pi**2 / 6) < 0.03


@examples(40)
@given(SEEDS, st.integers(1, 300), st.integers(1, 9))
def test_a_row_does_not_depend_on_the_others(seed, vocab, rows):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 4
    options = [
        dict(temperature=(0.0, 1.0, 0.7)[i % 3], top_k=i % 4, top_p=(1.0, 0.8)[i % 2], seed=seed) for i in range(rows)
    ]
    together = draw_tokens(logits, draw_batch(options))
    for i in range(rows):
        alone = draw_tokens(logits[i : i + 1], draw_batch([options[i]], first_position=i))
        assert alone == ([together.tokens[i]], [together.logprobs[i]], None)


def test_log_probabilities_that_nobody_asked_for_change_no_draw():
    """Only greedy rows go without them; a number that is not finite is found all the same."""
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(0))
    logits[1, [5, 70, 299]] = 9.0  # the first of equal ones
    logits[2, 299] = 9.0  # behind the last whole chunk
    logits[3, 170], logits[4, 3], logits[5] = math.nan, math.inf, -math.inf
    batch = draw_batch([dict(temperature=0.0)] * 6 + [{}])
    asked, unasked = draw_tokens(logits, batch), draw_tokens(logits, replace(batch, asked=np.zeros(7, np.bool_)))
    assert asked.tokens == unasked.tokens and asked.tokens[1:6] == [5, 299, -1, -1, -1]
    assert asked.tokens[0] == int(logits[0].argmax()) and np.isnan(unasked.logprobs[:6]).all()
    assert np.isfinite(asked.logprobs[:3]).all() and unasked.logprobs[6] == asked.logprobs[6]


@examples(40)
@given(SEEDS, st.integers(1, 300), st.integers(1, 9))
def test_entropies_are_of_the_whole_distribution_after_temperature(seed, vocab, rows):
    """Whatever top-k, top-p and bans leave of it, and whoever lies beside it; draws keep their bits."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4
    if vocab > 1:
        logits[::2, seed % vocab] = -math.inf
    options = [dict(temperature=(1.0, 0.7, 0.0)[i % 3], top_k=i % 4, top_p=(1.0, 0.8)[i % 2]) for i in range(rows)]
    batch = replace(draw_batch(options), measures=True)
    found, unmeasured = draw_tokens(logits, batch), draw_tokens(logits, draw_batch(options))
    temperatures = torch.tensor([one["temperature"] or 1.0 for one in options], dtype=torch.float64)[:, None]
    p = (logits.double() / temperatures).softmax(-1)
    assert found.entropies == pytest.approx(torch.special.entr(p).sum(-1).tolist(), rel=2e-6, abs=1e-6)
    assert (found.tokens, found.logprobs) == (unmeasured.tokens, unmeasured.logprobs)
    alone = draw_tokens(logits[-1:], replace(draw_batch([options[-1]], first_position=rows - 1), measures=True))
    assert alone.entropies == found.entropies[-1:]


def test_several_threads_give_the_same_bits():
    logits = torch.randn(9, 700, generator=torch.Generator().manual_seed(0)) * 4
    batch = draw_batch([dict(top_k=i % 3, top_p=(1.0, 0.8)[i % 2]) for i in range(9)])
    one = draw_tokens(logits, batch)
    torch.set_num_threads(2)  # put back by one_thread
    assert draw_tokens(logits, batch) == one


def test_logits_in_a_wider_buffer():
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    batch = draw_batch([{}] * 5)
    assert draw_tokens(logits[:, :77], batch) == draw_tokens(logits[:, :77].contiguous(), batch)


def threshold_twin(row: np.ndarray, temperature: float, top_k: int, top_p: float) -> float:
    """What the threshold means, in float64 and by a full sort."""
    ranked = np.sort(row)[::-1][: top_k if 0 < top_k < len(row) else len(row)]
    if top_p >= 1:
        return ranked[-1]
    shares = np.exp((ranked.astype(np.float64) - ranked[0]) / temperature)
    before = np.concatenate(([0.0], shares.cumsum()[:-1])) / shares.sum()
    return ranked[max(int((before < top_p).sum()), 1) - 1]


@examples(300)
@given(SEEDS, st.sampled_from([1e-3, 0.1, 3, 40, 1000]), st.booleans(), st.floats(0.05, 5), st.floats(0.01, 1))
def test_threshold_is_exact(seed, spread, ties, temperature, top_p):
    """Within float32 exponentials of top_p those between two thresholds are right; elsewhere there is one."""
    vocab, top_k = 1 + seed % 2000, seed // 2000 % 2100
    generator = np.random.default_rng(seed)
    row = (generator.normal(size=vocab) * spread).astype(np.float32)
    if ties:
        row = np.round(row / spread).astype(np.float32) * np.float32(spread)
    row[generator.random(vocab) < 0.1] = -np.inf
    row[seed % vocab] = 1.0
    found = row_cutoff(row, np.float32(temperature), top_k, top_p)
    most, least = (threshold_twin(row, np.float32(temperature), top_k, p) for p in (top_p - 1e-5, top_p + 1e-5))
    if top_p >= 1:
        most = least
    assert found in row and least <= found <= most


def test_threshold_of_equal_logits_and_of_one_token():
    assert row_cutoff(np.zeros(4 * BINS, np.float32), np.float32(1), 7, 0.5) == 0
    assert row_cutoff(np.full(1, -3, np.float32), np.float32(1), 0, 0.5) == -3
    peaked = np.full(100, -1e30, np.float32)
    peaked[40] = 5
    assert row_cutoff(peaked, np.float32(1), 0, 0.999) == 5
    assert row_cutoff(peaked, np.float32(1), 2, 1.0) == np.float32(-1e30)


def test_keys_are_of_seed_sample_and_position():
    """Rows of one table with several seeds and samples; seeds beyond 64 bits and below 0 count modulo 2**64."""
    table, cases = RunningTable(6), [(0, 0), (0, 1), (1, 0), (-1, 3), (2**64 + 5, 2), (7, 2**62)]
    sequences = [Sequence(i, [1, 2], SamplingParams(seed=s, min_tokens=3), 9, frozenset({4})) for s, i in cases]
    for seq in sequences:
        table.add(seq)
    totals = np.array([2, 2, 2, 4, 5, 100])
    batch = sampler.draw_batch(sequences, totals, table)
    assert batch.keys.tolist() == [list(noise_key(*case, total)) for case, total in zip(cases, totals.tolist())]
    assert batch.banned.tolist() == [[4], [4], [4], [4], [-1], [-1]]
    assert sampler.draw_batch(sequences[::-1], totals[::-1], table).keys.tolist() == batch.keys[::-1].tolist()


def test_largest_and_smallest_hash_give_finite_noise():
    for h in (0, 2**32 - 1):
        drawn = sampling.exponential(np.uint32(h))
        assert 0 < drawn < 30 and math.isfinite(-math.log(drawn))


@examples(150)
@given(SEEDS, st.sampled_from([1, 3, 64, 65, 700, 5000]), st.sampled_from([0.01, 1.0, 6.0, 400.0]))
def test_tokens_passed_over_would_have_lost(seed, vocab, spread):
    """Against scores of all tokens: also where what is likely is banned or cut off, and logits are far apart."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(vocab) * spread).astype(np.float32)
    temperature, top_k = np.float32(rng.choice([0.5, 1.0, 1.7])), int(rng.choice([0, 0, 2]))
    order = np.argsort(-logits)
    banned = tuple(order[: rng.integers(0, min(vocab, 4))].tolist())
    options = dict(temperature=temperature, top_k=top_k, banned=banned, seed=seed)
    token = draw_tokens(torch.from_numpy(logits)[None], draw_batch([options])).tokens[0]
    allowed = [t for t in order if t not in banned][: top_k or None]
    noise = gumbel_noise([noise_key(seed, 3, 0)], vocab)[0].numpy()
    scores = {int(t): logits[t] / temperature + noise[t] for t in allowed}
    assert scores[token] >= max(scores.values()) - 1e-5 * (1 + spread)
