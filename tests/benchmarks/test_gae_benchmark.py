"""The benchmark of GAE: its two loops agree with the product, and its memory counts what is alive."""

import pytest
import torch
from gae import LiveBytes, compare, padded_loop, scalar_loop  # noqa: E402


def test_a_small_size():
    row = compare(3, 40, 1)
    assert row["error"] < 1e-12 and row["product_seconds"] > 0 and row["loop_over_product"] > 0
    assert row["product_peak_mb"] > 0 and row["loop_peak_mb"] > 0


def test_both_loops_agree():
    rewards, values = torch.randn(2, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    padded = padded_loop(rewards, values, torch.tensor([3, 4])).tolist()
    split = [scalar_loop(rewards[part].tolist(), values[part].tolist()) for part in (slice(0, 3), slice(3, 7))]
    assert padded == pytest.approx(split[0] + split[1])


def test_live_bytes_count_what_lives_at_the_same_time():
    with LiveBytes() as live:
        for _ in range(3):
            torch.zeros(1000, dtype=torch.float64)
        kept = torch.zeros(1000, dtype=torch.float64)
        kept.view(10, 100)  # no memory of its own
        torch.ones(500, dtype=torch.float64)
    assert live.peak == 12000
