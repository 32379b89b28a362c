"""Sizes and choices of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rlhfuse.base.errors import InputError

Attention = Literal["auto", "flashinfer", "triton", "torch"]
AllReduce = Literal["auto", "nccl", "switch"]
NAMES = {"kernels": ("auto", "torch", "triton"), "attention": get_args(Attention), "all_reduce": get_args(AllReduce)}


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of an engine, and by whose kernels it runs."""

    num_blocks: int = 1024  # KV blocks
    block_tokens: int = 16  # tokens in one block
    max_sequences: int = 256  # running at the same time
    max_batched_tokens: int = 2048  # tokens in one step, prefill included
    cuda_graphs: bool = True  # replay decode steps as CUDA graphs; without effect on CPU
    run_ahead: bool = True  # launch a step before the draws of the one before are read; without effect on CPU kernels
    entropies: bool = False  # measured of every distribution that is drawn from
    keep_memory: bool = False  # while the engine is paused its cache stays, and graphs that were recorded over it
    # Of a decode step with CPU kernels, that guesses may fill up; 0 = off. None: 16 where they are measured to pay
    draft_rows: int | None = None
    # On CPU: what GPUs run, with torch's kernels or Triton's in its interpreter, neither of which promises bits.
    kernels: Literal["auto", "torch", "triton"] = "auto"
    attention: Attention = "auto"  # whose kernels read the cache (models/attention/backends.py), unless CPU kernels do
    all_reduce: AllReduce = "auto"  # who sums over tensor ranks (gen/gpu/switch_sum.py), on CUDA

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_tokens", "max_sequences", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if self.draft_rows is not None and self.draft_rows < 0:
            raise InputError(f"draft_rows={self.draft_rows} must be at least 0; 0 turns speculation off")
        for name, known in NAMES.items():
            if getattr(self, name) not in known:
                raise InputError(f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(known)}")
