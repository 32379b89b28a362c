"""The memory that holds keys and values, cut into blocks.

Two layouts, one per kind of kernel; `read_blocks` and `write_blocks` speak a third one, the same for both, in which
a block is contiguous: [2, layers, block_tokens, G, D].

    lanes   keys [layers, blocks, G, D, block_tokens], values [layers, blocks, G, block_tokens, D]   CPU kernel
    rows    both [layers, blocks, block_tokens, G, D]                                               CUDA kernels

The last dimension of `lanes` is padded to whole panels of 16, which costs memory only for odd sizes. Knows which
block holds what only from the tables it is given. G is the number of KV heads on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhfuse.models.cpu.tiles import lanes_up


class KVCache:
    def __init__(
        self,
        layers: int,
        num_blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        *,
        lanes: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.lanes = lanes
        self.block_tokens, self.kv_heads, self.head_dim = block_tokens, kv_heads, head_dim
        rows = (layers, num_blocks, block_tokens, kv_heads, head_dim)
        keys = (layers, num_blocks, kv_heads, head_dim, lanes_up(block_tokens)) if self.lanes else rows
        values = (layers, num_blocks, kv_heads, block_tokens, lanes_up(head_dim)) if self.lanes else rows
        # Zeros, not whatever the memory held: a masked NaN times a zero weight is still NaN in CUDA kernels.
        self.keys = torch.zeros(keys, dtype=dtype, device=device)
        self.values = torch.zeros(values, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
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

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Views of keys and values as [layers, blocks, block_tokens, G, D]."""
        if self.lanes:
            keys, values = self.keys[..., : self.block_tokens], self.values[..., : self.head_dim]
            return keys.permute(0, 1, 4, 2, 3), values.permute(0, 1, 3, 2, 4)
        return self.keys, self.values
