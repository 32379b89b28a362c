"""The memory that holds keys and values, cut into blocks.

Two layouts, one per kind of kernel; `read` and `write` speak a third, layout-free one, [2, layers, tokens, G, D]:

    lanes   keys [layers, blocks, G, D, block_tokens], values [layers, blocks, G, block_tokens, D]   CPU kernel
    rows    both [layers, blocks, block_tokens, G, D]                                               CUDA kernels

The last dimension of `lanes` is padded to whole panels of 16, which costs memory only for odd sizes. Knows which block holds what only from the tables it is given. G is the number of KV heads on this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhfuse.models.tiles import lanes_up


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
        self.block_tokens, self.head_dim = block_tokens, head_dim
        rows = (layers, num_blocks, block_tokens, kv_heads, head_dim)
        keys = (layers, num_blocks, kv_heads, head_dim, lanes_up(block_tokens)) if self.lanes else rows
        values = (layers, num_blocks, kv_heads, block_tokens, lanes_up(head_dim)) if self.lanes else rows
        # Zeros, not whatever the memory held: a masked NaN times a zero weight is still NaN in CUDA kernels.
        self.keys = torch.zeros(keys, dtype=dtype, device=device)
        self.values = torch.zeros(values, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def read(self, table: list[int], tokens: int) -> Tensor:
        """A copy of the first `tokens` tokens of a block table: [2, layers, tokens, G, D]."""
        used = torch.tensor(table[: -(-tokens // self.block_tokens)], device=self.keys.device)
        keys, values = self.keys[:, used], self.values[:, used]
        if self.lanes:
            keys = keys[..., : self.block_tokens].permute(0, 1, 4, 2, 3)
            values = values[..., : self.head_dim].permute(0, 1, 3, 2, 4)
        return torch.stack((keys.flatten(1, 2)[:, :tokens], values.flatten(1, 2)[:, :tokens]))

    def write(self, table: list[int], kv: Tensor) -> None:
        """Inverse of `read`: fill the blocks of a table with kv [2, layers, tokens, G, D]."""
        tokens, device = kv.shape[2], self.keys.device
        positions = torch.arange(tokens, device=device)
        blocks = torch.tensor(table, device=device)[positions // self.block_tokens]
        offsets = positions % self.block_tokens
        kv = kv.to(device)
        if self.lanes:
            # Indexed dimensions apart from each other come first in the indexed view: [tokens, layers, G, D].
            self.keys[:, blocks, :, :, offsets] = kv[0].transpose(0, 1)
            self.values[:, blocks, :, offsets, : self.head_dim] = kv[1].transpose(0, 1)
        else:
            self.keys[:, blocks, offsets] = kv[0]
            self.values[:, blocks, offsets] = kv[1]
