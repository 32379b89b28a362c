"""flashinfer's attention over cache blocks: XQA where each sequence has one query, its paged prefill for mixed steps.

Both read the cache as it is. XQA takes block tables and contexts from the device and plans nothing, so a CUDA graph can
hold it; the prefill plans on the host, once per step for all layers. Written for flashinfer-python 0.6.4.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhfuse.base.optional_package import import_obstacle

BLOCKS = (16, 32, 64, 128)  # tokens of a block that XQA was written for
HEAD_DIMS = (64, 128, 256)  # that its prefill for Hopper compiles for; with another the build fails in every process
WORKSPACE = 128 << 20  # bytes, as flashinfer advises, for each of the two


def flashinfer_obstacle(
    dtype: torch.dtype, device: torch.device, group: int, head_dim: int, block_tokens: int
) -> str | None:
    """Why flashinfer cannot read such a cache; None if it can. `group`: query heads per key/value head."""
    if device.type != "cuda":
        return "flashinfer runs on CUDA alone"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flashinfer computes in 16 bits, not in {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"flashinfer takes a head_dim of 64, 128 or 256, not {head_dim}"
    if group > 32:
        return f"flashinfer takes up to 32 query heads per key/value head, not {group}"
    if block_tokens not in BLOCKS:
        return f"flashinfer reads blocks of 16, 32, 64 or 128 tokens, not {block_tokens}"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (9, 10, 12):
        return f"flashinfer's XQA needs compute capability 9, 10 or 12, not {major}.{minor}"
    # It must be there before the import, which starts CUDA on every device otherwise.
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}a")
    return import_obstacle("flashinfer", "flashinfer") or None


class FlashInferAttention:
    """Kernels for one shape of heads and blocks. Making one compiles them, unless that was done on this machine."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, heads: int, kv_heads: int, head_dim: int, block_tokens: int
    ) -> None:
        self._library: Any = importlib.import_module("flashinfer")
        self._dtype, self._device = dtype, device
        self._sizes = heads, kv_heads, head_dim, block_tokens
        self._scale, self._block_tokens = head_dim**-0.5, block_tokens
        self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)  # XQA counts in it, from zero
        buffer = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._prefill = self._library.BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD")
        self._compile()

    def _compile(self) -> None:
        """Run both once, so that what cannot be built is told now and not in the middle of a step."""
        heads, kv_heads, head_dim, block_tokens = self._sizes
        keys = torch.zeros(1, block_tokens, kv_heads, head_dim, dtype=self._dtype, device=self._device)
        q = torch.zeros(2, heads, head_dim, dtype=self._dtype, device=self._device)
        table = torch.zeros(1, 1, dtype=torch.int32)
        ones = torch.ones(1, dtype=torch.int32, device=self._device)
        self.decode(table.to(self._device), ones)(q[:1], keys, keys)
        self.mixed(table, [0, 2], [2])(q, keys, keys)

    def decode(self, tables: Tensor, contexts: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """For one query of each of R sequences: tables [R, W], contexts [R] int32, both on the device."""
        lengths, most = contexts.view(torch.uint32), tables.shape[1] * self._block_tokens

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return self._library.decode.xqa_batch_decode_with_kv_cache(
                query=q,
                kv_cache=(keys, values),
                workspace_buffer=self._workspace,
                block_tables=tables,
                seq_lens=lengths,
                max_seq_len=most,
                bmm1_scale=self._scale,
                bmm2_scale=1.0,
                kv_layout="NHD",
            )

        return attend

    def mixed(
        self, tables: Tensor, starts: list[int], contexts: list[int]
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """For any numbers of queries: tables [S, W] int32 on the host, starts [S + 1], contexts [S]."""
        heads, kv_heads, head_dim, block_tokens = self._sizes
        lengths = torch.tensor(contexts, dtype=torch.int32)
        blocks = (lengths + block_tokens - 1) // block_tokens
        used = torch.arange(tables.shape[1])[None] < blocks[:, None]
        self._prefill.plan(
            torch.tensor(starts, dtype=torch.int32),
            torch.cat((torch.zeros(1, dtype=torch.int32), blocks.cumsum(0).int())),
            tables[used].to(self._device, non_blocking=True),
            lengths - (blocks - 1) * block_tokens,
            heads,
            kv_heads,
            head_dim,
            block_tokens,
            causal=True,
            sm_scale=self._scale,
            q_data_type=self._dtype,
        )

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return self._prefill.run(q, (keys, values))

        return attend
