"""One sample to generate."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfuse.gen.core.sequence import SamplingParams


@dataclass(frozen=True)
class Request:
    """Its id, its prompt as tokens, and how its response is drawn."""

    sample_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
