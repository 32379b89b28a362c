"""What an engine tells others: about its last step, and about a sample that is not finished."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepStats:
    """What one step did, as the cost model wants to know it."""

    batch: int  # sequences that ran
    prefill_tokens: int  # tokens run for sequences that were not decoding
    context_tokens: int  # tokens in the cache of all that ran, after the step
    seconds: float  # without the capture of a CUDA graph, which happens once for a shape
    reused_tokens: int = 0  # tokens of sequences that entered, found in known prefixes instead of being run


@dataclass(frozen=True)
class SequenceState:
    """An unfinished sample as others see it."""

    sample_id: int
    kv_tokens: int  # tokens in the cache
    total_tokens: int  # prompt and response so far
    blocks: int  # KV blocks held (a shared block counts for each sequence)
    shared_blocks: tuple[int, ...]  # those of them that others use too
    waiting: bool  # not running: never started, or preempted
