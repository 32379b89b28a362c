"""The blocks of a cache as attention sees them, and what each backend over them gives.

Letters: T tokens, H query heads, G key/value heads (H % G == 0), D head_dim, S sequences, R rows, W columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q [T, H, D], one layer's keys, its values) -> [T, H, D]


@dataclass(frozen=True)
class CacheShape:
    """What kernels must be able to read: keys and values [blocks, block_tokens, G, D] of one rank."""

    dtype: torch.dtype
    device: torch.device
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    most_sequences: int  # of a step


@dataclass(frozen=True, eq=False)
class PagedQueries:
    """Which queries read which cache blocks. Sequence s owns queries starts[s]:starts[s + 1], its last tokens."""

    tables: Tensor  # [S, most blocks] int32
    query_starts: Tensor  # [S + 1] int32
    contexts_there: Tensor  # [S] int32, as `contexts`
    starts: list[int]  # query_starts, on the host
    contexts: list[int]  # [S] tokens up to the last query
    tables_here: Tensor  # `tables`, on the host

    @staticmethod
    def of(tables: Tensor, starts: list[int], contexts: list[int]) -> PagedQueries:
        """The same from the host's lists, copied to the device of `tables`."""
        query_starts, there = (torch.tensor(x, dtype=torch.int32, device=tables.device) for x in (starts, contexts))
        return PagedQueries(tables, query_starts, there, starts, contexts, tables.cpu())

    @property
    def lengths(self) -> list[int]:
        return [b - a for a, b in zip(self.starts, self.starts[1:])]


class PagedAttention(Protocol):
    """What lies past a context has no influence. Both return what each layer of the step calls."""

    def decode(self, tables: Tensor, contexts: Tensor) -> Attend:
        """The last token of each of R sequences, in shapes that a CUDA graph can hold.

        tables [R, W], contexts [R] int32: tokens of each.
        """
        ...

    def mixed(self, queries: PagedQueries) -> Attend:
        """Any mix of prefill and decode."""
        ...
