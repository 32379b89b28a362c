"""Attention by its formula in float64, and sequences whose keys and values lie scattered over blocks of a cache."""

from itertools import accumulate

import torch
from torch import Tensor


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v in float64; the last query sees everything, each earlier one a token less."""
    queries, heads, dim = q.shape
    k, v = (x.double().repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) / dim**0.5
    visible = torch.ones(queries, k.shape[0], dtype=torch.bool).tril(k.shape[0] - queries)
    return torch.einsum("hts,shd->thd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


class PagedCase:
    """Sequences whose keys and values lie in shuffled blocks; every other place of the cache holds NaN."""

    def __init__(
        self,
        queries: list[int],
        contexts: list[int],
        heads: int,
        groups: int,
        dim: int,
        block: int,
        dtype: torch.dtype = torch.float32,
        more_columns: int = 2,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(contexts) + dim)
        self.queries, self.contexts, self.starts = queries, contexts, [0, *accumulate(queries)]
        blocks = [-(-n // block) for n in contexts]
        order = torch.randperm(sum(blocks) + 1, generator=generator).int()
        self.tables = torch.full((len(contexts), max(blocks) + more_columns), int(order[-1]), dtype=torch.int32)
        self.keys, self.values = torch.full((2, len(order), block, groups, dim), torch.nan, dtype=dtype)
        self.q = torch.randn(sum(queries), heads, dim, generator=generator).to(dtype)
        self.kv = [torch.randn(2, n, groups, dim, generator=generator).to(dtype) for n in contexts]
        for s, (kv, part) in enumerate(zip(self.kv, order.split([*blocks, 1]))):
            self.tables[s, : len(part)] = part
            places = torch.arange(contexts[s])
            slots = part.long()[places // block] * block + places % block
            for memory, side in zip((self.keys, self.values), kv):
                memory.flatten(0, 1)[slots] = side

    def expected(self) -> Tensor:
        return torch.cat([causal(q, *kv) for q, kv in zip(self.q.split(self.queries), self.kv)])
