"""The memory that holds keys and values, cut into blocks: [layers, blocks, block_tokens, G, D] for both.

`read_blocks` and `write_blocks` use a layout of their own, the same whatever the cache's: [2, layers, block_tokens, G,
D] for each block. G counts the KV heads on this rank. The CPU kernels' layout is `LaneKVCache` (gen/cpu/forward.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    def __init__(
        self,
        layers: int,
        num_blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_tokens, self.kv_heads, self.head_dim = block_tokens, kv_heads, head_dim
        keys, values = self._shapes(layers, num_blocks)
        # Zeros, not whatever the memory held: a masked NaN times a zero weight is still NaN in CUDA kernels.
        self.keys = torch.zeros(keys, dtype=dtype, device=device)
        self.values = torch.zeros(values, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def read_blocks(self, blocks: Sequence[int], heads: slice = slice(None)) -> Tensor:
        """A copy of whole blocks, of these KV heads: [blocks, 2, layers, block_tokens, heads, D]."""
        chosen = torch.tensor(list(blocks), dtype=torch.int64, device=self.keys.device)
        sides = [side[:, :, :, heads] for side in self._rows()]
        layers, _, tokens, count, dim = sides[0].shape
        out = torch.empty((len(blocks), 2, layers, tokens, count, dim), dtype=self.keys.dtype, device=chosen.device)
        for number, side in enumerate(sides):
            for layer in range(layers):  # layer by layer, so that no second copy of everything is made on the way
                out[:, number, layer] = side[layer][chosen]
        return out

    def write_blocks(self, blocks: Sequence[int], kv: Tensor, heads: slice = slice(None)) -> None:
        """Inverse of `read_blocks`: fill these heads of these blocks."""
        chosen = torch.tensor(list(blocks), dtype=torch.int64, device=self.keys.device)
        kv = kv.to(self.keys.device)
        for number, side in enumerate(self._rows()):
            for layer in range(side.shape[0]):
                side[layer, :, :, heads][chosen] = kv[:, number, layer]

    def _shapes(self, layers: int, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of keys and of values."""
        rows = (layers, num_blocks, self.block_tokens, self.kv_heads, self.head_dim)
        return rows, rows

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Views of keys and values as [layers, blocks, block_tokens, G, D]."""
        return self.keys, self.values
