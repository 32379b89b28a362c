"""What one iteration of generation and inference is asked for: samples, and the numbers that decide who is freed."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfuse.decisions.migration import MoveCost
from rlhfuse.gen.sequence import SamplingParams


@dataclass(frozen=True)
class FusionLimits:
    """What decides m and how samples move (BS_max, M, C of paper section 4.2), and the size of a scoring pack."""

    bs_max: int
    sample_kv_bytes: float  # M
    capacity_kv_bytes: float  # C
    block_tokens: int
    move_cost: MoveCost
    score_tokens: int  # token budget of one scoring pack


@dataclass(frozen=True)
class Request:
    """One sample to generate."""

    sample_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
