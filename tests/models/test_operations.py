"""What CUDA computes with, rehearsed on CPU: near what the CPU computes with, and nothing of the CPU's padding."""

from __future__ import annotations

import pytest
import torch

from rlhfuse.models import stage
from rlhfuse.models.operations import BATCH_INVARIANT, TORCH, operations_for
from rlhfuse.models.stage import PackedTokens


def test_the_device_chooses():
    assert operations_for(torch.device("cpu")) is BATCH_INVARIANT
    assert operations_for(torch.device("cuda", 1)) is TORCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_give_the_same_up_to_rounding(dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 20, generator=generator), torch.randn(7, 20, generator=generator)
    norm, bound = 1 + 0.1 * torch.randn(20, generator=generator), 1e-5 if dtype == torch.float32 else 5e-2
    calls = (
        lambda kind, x: kind.linear(x, weight.to(dtype)),
        lambda kind, x: kind.silu(x),
        lambda kind, x: kind.rms_norm(x, norm.to(dtype), 1e-5),
    )
    for call in calls:
        outcomes = []
        for kind in (BATCH_INVARIANT, TORCH):
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
