"""What CUDA computes with, rehearsed on CPU: near what the CPU computes with, and nothing of the CPU's padding."""

import pytest
import torch
from testkit.flat import rms_norm

from rlhfuse.models import stage
from rlhfuse.models.layers.norm import exact_rms_norm
from rlhfuse.models.layers.operations import EXACT, TORCH, operations_for
from rlhfuse.models.stage import PackedTokens


def test_the_device_chooses():
    assert operations_for(torch.device("cpu")) is EXACT
    assert operations_for(torch.device("cuda", 1)) is TORCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_give_the_same_up_to_rounding(dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 20, generator=generator), torch.randn(7, 20, generator=generator)
    norm, bound = 1 + 0.1 * torch.randn(20, generator=generator), 1e-5 if dtype == torch.float32 else 5e-2
    calls = (
        lambda kind, x: kind.linear(x, weight.to(dtype)),
        lambda kind, x: (kind.rms_norm if dtype != torch.float32 or kind is TORCH else rms_norm)(
            x, norm.to(dtype), 1e-5
        ),
    )
    for call in calls:
        outcomes = []
        for kind in (EXACT, TORCH):
            leaf = x.to(dtype).requires_grad_(True)
            y = call(kind, leaf)
            y.float().square().sum().backward()
            assert y.dtype == dtype
            outcomes.append((y.detach().float(), leaf.grad.float()))
        for a, b in zip(*outcomes):
            assert (a - b).abs().max() <= bound * b.abs().max()


def test_only_the_cpu_fills_short_batches_up(monkeypatch):
    cpu = torch.device("cpu")
    assert PackedTokens.pack([[1, 2], [3]], cpu).padding == 13
    monkeypatch.setattr(stage, "operations_for", lambda device: TORCH)
    assert PackedTokens.pack([[1, 2], [3]], cpu).padding == 0
    assert PackedTokens.pack([[1, 2], [3]], cpu, shards=2).padding == 1  # equal parts of two tensor ranks


@pytest.mark.parametrize("shape", [(7, 1, 64), (3, 5, 20), (1, 16), (2, 3)])
def test_row_norm_is_its_formula_in_float64(shape):
    generator = torch.Generator().manual_seed(0)
    x, upstream = (torch.randn(*shape, generator=generator) for _ in range(2))
    weight = 1 + 0.1 * torch.randn(shape[-1], generator=generator)
    outcomes = []
    for dtype in (torch.float32, torch.float64):
        leaves = [leaf.detach().to(dtype).requires_grad_(True) for leaf in (x, weight)]
        normed = (rms_norm if dtype == torch.float32 else TORCH.rms_norm)(*leaves, 1e-5)
        normed.backward(upstream.to(dtype))
        outcomes.append([normed.detach(), *(leaf.grad for leaf in leaves)])
    for ours, exact in zip(*outcomes):
        assert ours.shape == exact.shape and (ours - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_row_norm_in_threads_and_of_parts_of_a_tensor():
    """A row's bits depend on that row alone, however many threads there are and wherever it lies."""
    x = torch.randn(11, 4, 24, generator=torch.Generator().manual_seed(1))
    weight, threads = torch.linspace(0.5, 1.5, 24), torch.get_num_threads()
    alone = torch.stack([exact_rms_norm(row, weight, 1e-6) for row in x[:, 1].contiguous()])
    try:
        torch.set_num_threads(3)
        assert torch.equal(exact_rms_norm(x[:, 1], weight, 1e-6), alone)
    finally:
        torch.set_num_threads(threads)
