"""The Triton sampler against the CPU's, in the interpreter: the same noise, kept tokens and draws; and compiled."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from testkit import triton_interpreter  # noqa: F401
from testkit.draw_batches import draw_batch
from testkit.triton_compile import compiled_launches

from rlhfuse.gen.core.draws import DrawBatch
from rlhfuse.gen.cpu import sampling as cpu
from rlhfuse.gen.gpu import sampling
from rlhfuse.gen.gpu.draws import DrawInputs, draw_array

NOTHING = -7  # what the outputs hold before


def inputs_of(batch: DrawBatch, places: np.ndarray, rows: int) -> DrawInputs:
    return DrawInputs(rows, torch.from_numpy(draw_array(batch, places, rows)).flatten())


def draw(logits: torch.Tensor, batch: DrawBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, log-probabilities and entropies, by the kernels; the first two are equal without the third."""
    rows = len(logits)
    measured, outputs = (torch.full((count, rows + 3), NOTHING, dtype=torch.int32) for count in (3, 2))
    for each in (measured, outputs):
        sampling.draw(logits, inputs_of(batch, np.arange(rows), rows), each)
    assert (measured[:, rows:] == NOTHING).all() and torch.equal(measured[:2], outputs)
    return outputs[0, :rows].numpy(), *measured[1:, :rows].numpy().view(np.float32)


def draw_on_cpu(logits: torch.Tensor, batch: DrawBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    arrays = batch.keys, batch.temperatures, batch.top_ks, batch.top_ps, batch.banned
    rows = np.arange(len(batch.keys))
    asked = np.ones(len(rows), np.bool_)
    none, here = np.full(len(rows), -1), np.ascontiguousarray(logits.float().numpy())
    return cpu.draw_rows(here, *arrays, asked, rows, none, True)


def random_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Narrow, ordinary and wide rows, some of few different values."""
    generator = torch.Generator().manual_seed(seed)
    widths = torch.tensor([0.01, 1.0, 3.0, 30.0])[torch.arange(rows) % 4, None]
    logits = torch.randn(rows, vocab, generator=generator) * widths
    logits[::5] = (logits[::5] * 4).round() / 4
    return logits


def random_batch(rows: int, vocab: int, seed: int, limited: bool) -> DrawBatch:
    rng = np.random.default_rng(seed)
    banned = np.full((rows, 3), -1)
    for row in banned:
        count = rng.integers(0, min(4, vocab))
        row[:count] = rng.choice(vocab, count, replace=False)
    return DrawBatch(
        rng.integers(0, 2**32, (rows, 2), dtype=np.uint32),
        rng.choice([0, 0.3, 0.7, 1, 1.7], rows).astype(np.float32),
        rng.choice([0, 1, 5, 50, vocab // 2] if limited else [0, vocab], rows),
        rng.choice([1, 0.5, 0.9, 0.99, 0.1] if limited else [1.0], rows),
        banned,
    )


SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("limited", "cases"),
    [
        (False, [(20, 301), (4, 5000)]),
        pytest.param(False, [(1200, 301), (790, 64), (6, 32_000), (4, 5000)], marks=SLOW),
        pytest.param(True, [(490, 301), (10, 32_000)], marks=SLOW),
    ],
    ids=["few", "thousands", "limited"],
)
def test_draws_are_the_cpus(limited, cases):
    """Not one token differs, though only those whose best scores are 1e-5 apart were to agree."""
    for seed, (rows, vocab) in enumerate(cases):
        logits, batch = random_logits(rows, vocab, seed), random_batch(rows, vocab, seed, limited)
        tokens, *numbers = draw(logits, batch)
        expected, *expected_numbers = draw_on_cpu(logits, batch)
        assert tokens.tolist() == expected.tolist()
        assert np.abs(np.subtract(numbers, expected_numbers)).max() < 2e-6


@pytest.mark.parametrize(("rows", "vocab"), [(3, 1), (3, 2), (8, 61), (6, 1003), (2, 9000)])
def test_kept_tokens_are_the_cpus(rows, vocab):
    """With top-k and top-p the draws agree, and so does the least logit kept, ties included."""
    logits, batch = random_logits(rows, vocab, vocab), random_batch(rows, vocab, vocab, limited=True)
    tokens, *numbers = draw(logits, batch)
    expected, *expected_numbers = draw_on_cpu(logits, batch)
    assert tokens.tolist() == expected.tolist()
    assert np.abs(np.subtract(numbers, expected_numbers)).max() < 2e-6
    inputs, cutoffs = inputs_of(batch, np.arange(rows), rows), torch.full((rows,), float("nan"))
    sampling._cutoffs[(rows,)](logits, logits.stride(0), vocab, inputs.packed, rows, cutoffs, BLOCK=8192)
    for row in range(rows):
        allowed = logits[row].numpy().copy()
        allowed[batch.banned[row][batch.banned[row] >= 0]] = -np.inf
        wanted = -np.inf
        temperature, top_k, top_p = batch.temperatures[row], batch.top_ks[row], batch.top_ps[row]
        if temperature > 0 and (0 < top_k < vocab or top_p < 1):
            wanted = cpu.row_cutoff(allowed, temperature, top_k, top_p)
        assert cutoffs[row] == wanted, (row, temperature, top_k, top_p)


def test_exact_shares_and_ties():
    """Half of four equal tokens is two of them: the third is likelier than nothing, so ties keep all."""
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [-0.0, 0.0, 1.0, -5.0], [2.0, 1.0, 1.0, 0.0], [0.0, -0.0, -1.0, -2.0]])
    batch = draw_batch([dict(top_p=0.5), dict(top_k=2), dict(top_k=2, top_p=0.8), dict(top_p=0.9)])
    cutoffs = torch.empty(4)
    packed = inputs_of(batch, np.arange(4), 4).packed
    sampling._cutoffs[(4,)](logits, 4, 4, packed, 4, cutoffs, BLOCK=4)
    rows = zip(logits.numpy(), batch.top_ks, batch.top_ps)
    assert cutoffs.tolist() == [cpu.row_cutoff(row, np.float32(1), k, p) for row, k, p in rows] == [0, 0, 1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wider_buffers_and_rows_that_draw_nothing(dtype):
    logits = random_logits(9, 400, 3).to(dtype)[:, :333]
    places = np.array([0, 3, 4, 8])
    batch = random_batch(4, 333, 3, limited=True)
    outputs = torch.full((2, 12), NOTHING, dtype=torch.int32)
    sampling.draw(logits, inputs_of(batch, places, 9), outputs)
    tokens, logprobs, _ = draw_on_cpu(logits[places], batch)
    assert outputs[0, places].tolist() == tokens.tolist()
    assert np.abs(outputs[1, places].numpy().view(np.float32) - logprobs).max() < 1e-6
    assert (np.delete(outputs.numpy(), places, axis=1) == NOTHING).all()


@pytest.mark.parametrize("drawn_by", [draw, draw_on_cpu], ids=["triton", "cpu"])
def test_rows_that_are_not_finite(drawn_by):
    bad = [math.nan, math.inf] * 2
    logits = torch.zeros(6, 5000)
    for row, (value, place) in enumerate(zip(bad, (0, 66, 4999, 4999))):
        logits[row, place] = value
    logits[4] = -math.inf
    batch = draw_batch([{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}, {}, {}])
    tokens, *numbers = drawn_by(logits, batch)
    assert tokens[:5].tolist() == [-1] * 5 and np.isnan(np.array(numbers)[:, :5]).all()
    assert tokens[5] >= 0 and all(abs(abs(found[5]) - math.log(5000)) < 1e-5 for found in numbers)


@triton.jit
def _noise(keys, hashes, noise, count, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    key0, key1 = tl.load(keys).to(tl.uint32, bitcast=True), tl.load(keys + 1).to(tl.uint32, bitcast=True)
    h = sampling._noise_hash(key0, key1, index.to(tl.uint32))
    tl.store(hashes + index, h.to(tl.int32, bitcast=True), mask=index < count)
    tl.store(noise + index, sampling._gumbel(h), mask=index < count)


def test_noise_is_the_cpus():
    keys, hashes, noise = np.array([2**31 + 5, 77], np.uint32), torch.zeros(3000, dtype=torch.int32), torch.zeros(3000)
    _noise[(1,)](torch.from_numpy(keys.view(np.int32)), hashes, noise, 3000, BLOCK=4096)
    expected = [cpu.noise_hash(keys[0], keys[1], index) for index in range(3000)]
    assert hashes.numpy().view(np.uint32).tolist() == expected
    exact = -np.log([-np.log1p(-min((h + 0.5) / 2**32, 1 - 2**-24)) for h in expected])
    assert np.abs(noise.numpy() - exact).max() < 1e-6 * 20


def test_tokens_that_are_places_are_fed():
    newest = torch.arange(100, 2100, dtype=torch.int32)
    tokens = torch.arange(3000, dtype=torch.int32)
    tokens[::7] = ~torch.arange(0, 1287, 3, dtype=torch.int32)
    wanted = torch.where(tokens < 0, newest[(~tokens).clamp(min=0, max=1999)], tokens)
    sampling.feed(tokens, newest)
    assert torch.equal(tokens, wanted)


def launch_all() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rows, vocab in ((1, 128_256), (256, 262_144), (5, 301)):
            inputs = DrawInputs(rows, torch.empty(DrawInputs.columns(0) * rows, dtype=torch.int32))
            sampling.draw(torch.empty(rows, vocab, dtype=dtype), inputs, torch.empty(2, 256, dtype=torch.int32))
    sampling.feed(torch.empty(256, dtype=torch.int32), torch.empty(256, dtype=torch.int32))


def test_kernels_compile_for_gpus(programs):
    launches = compiled_launches(programs, __file__, 90)
    assert len(launches) == 19 and {launch.kernel for launch in launches} == {"_cutoffs", "_scores", "_merge", "_feed"}
    assert all(launch.stack == 0 for launch in launches), "registers spill"
