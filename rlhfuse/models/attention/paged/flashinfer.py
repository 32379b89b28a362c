"""flashinfer's attention over cache blocks: XQA where each sequence has one query, its paged prefill for mixed steps.

Both read the cache as it is. XQA takes block tables and contexts from the device and plans nothing, so a CUDA graph can
hold it; the prefill plans on the host, once per step for all layers. Written for flashinfer-python 0.6.4.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor

from rlhfuse.base.cuda_environment import import_obstacle
from rlhfuse.models.attention.paged.cache import Attend, CacheShape, PagedQueries

BLOCKS = (16, 32, 64, 128)  # tokens of a block that XQA was written for
HEAD_DIMS = (64, 128, 256)  # that its prefill for Hopper compiles for; with another the build fails in every process
WORKSPACE = 128 << 20  # bytes, as flashinfer advises, for each of the two


def obstacle(shape: CacheShape) -> str:
    """Why flashinfer cannot read such a cache, '' if it can."""
    if shape.device.type != "cuda":
        return "flashinfer runs on CUDA alone"
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"flashinfer computes in 16 bits, not in {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim not in HEAD_DIMS:
        return f"flashinfer takes a head_dim of 64, 128 or 256, not {shape.head_dim}"
    if (group := shape.heads // shape.kv_heads) > 32:
        return f"flashinfer takes up to 32 query heads per key/value head, not {group}"
    if shape.block_tokens not in BLOCKS:
        return f"flashinfer reads blocks of 16, 32, 64 or 128 tokens, not {shape.block_tokens}"
    major, minor = torch.cuda.get_device_capability(shape.device)
    if major not in (9, 10, 12):
        return f"flashinfer's XQA needs compute capability 9, 10 or 12, not {major}.{minor}"
    # It must be there before the import, which starts CUDA on every device otherwise.
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}a")
    return import_obstacle("flashinfer", "flashinfer")


class FlashInferAttention:
    """Kernels for one shape of heads and blocks. Making one compiles them, unless that was done on this machine."""

    def __init__(self, shape: CacheShape) -> None:
        self._library: Any = importlib.import_module("flashinfer")
        self._shape = shape
        self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=shape.device)  # XQA counts in it, from zero
        buffer = torch.empty(WORKSPACE, dtype=torch.uint8, device=shape.device)
        self._prefill = self._library.BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD")
        # Both are run once, so that what cannot be built is told now and not in the middle of a step.
        kind: Any = dict(dtype=shape.dtype, device=shape.device)
        keys = torch.zeros(1, shape.block_tokens, shape.kv_heads, shape.head_dim, **kind)
        q = torch.zeros(2, shape.heads, shape.head_dim, **kind)
        table = torch.zeros(1, 1, dtype=torch.int32, device=shape.device)
        self.decode(table, torch.ones(1, dtype=torch.int32, device=shape.device))(q[:1], keys, keys)
        self.mixed(PagedQueries.of(table, [0, 2], [2]))(q, keys, keys)

    def decode(self, tables: Tensor, contexts: Tensor) -> Attend:
        lengths, most = contexts.view(torch.uint32), tables.shape[1] * self._shape.block_tokens

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return self._library.decode.xqa_batch_decode_with_kv_cache(
                query=q,
                kv_cache=(keys, values),
                workspace_buffer=self._workspace,
                block_tables=tables,
                seq_lens=lengths,
                max_seq_len=most,
                bmm1_scale=self._shape.head_dim**-0.5,
                bmm2_scale=1.0,
                kv_layout="NHD",
            )

        return attend

    def mixed(self, queries: PagedQueries) -> Attend:
        shape, tables = self._shape, queries.tables_here
        lengths = torch.tensor(queries.contexts, dtype=torch.int32)
        blocks = (lengths + shape.block_tokens - 1) // shape.block_tokens
        used = torch.arange(tables.shape[1])[None] < blocks[:, None]
        self._prefill.plan(
            torch.tensor(queries.starts, dtype=torch.int32),
            torch.cat((torch.zeros(1, dtype=torch.int32), blocks.cumsum(0).int())),
            tables[used].to(shape.device, non_blocking=True),
            lengths - (blocks - 1) * shape.block_tokens,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.block_tokens,
            causal=True,
            sm_scale=shape.head_dim**-0.5,
            q_data_type=shape.dtype,
        )
        return lambda q, keys, values: self._prefill.run(q, (keys, values))
