"""The model's forward pass for generation: weights are read in place, under their Megatron-core names.

    x = embedding[token]
    per layer:  x += proj(attention(rope(qkv(norm(x))), cache));  x += fc2(silu(gate) * up),  [gate, up] = fc1(norm(x))
    logits = output(norm(x)), at the rows that draw

With a tensor-parallel group each rank holds a share of heads, MLP columns and vocabulary rows; the outputs of proj
and fc2 are summed over the ranks and the logits are gathered, so that all ranks see the same numbers. Every
matrix product goes over at least SAFE_ROWS rows (models/invariance.py), so a token's bits do not depend on the
batch. Knows nothing of sequences, scheduling or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlhfuse.errors import InputError
from rlhfuse.gen.cpu_forward import CpuForward
from rlhfuse.gen.forward_batch import ForwardBatch
from rlhfuse.gen.kv_cache import KVCache
from rlhfuse.gen.rotary import rotary_tables, rotate
from rlhfuse.models.attention import paged_attention
from rlhfuse.models.invariance import SAFE_ROWS, linear, pad_rows, rms_norm, silu_mul
from rlhfuse.spec import ModelSpec


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer's tensors: references, never copies."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    proj: Tensor
    mlp_norm: Tensor
    fc1: Tensor
    fc2: Tensor


class ModelRunner:
    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        *,
        device: torch.device,
        dtype: torch.dtype,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.spec, self.device, self.dtype, self.tp_group = spec, device, dtype, tp_group
        self.tp_size = dist.get_world_size(tp_group) if tp_group is not None else 1
        self.tp_rank = dist.get_rank(tp_group) if tp_group is not None else 0
        for name, value in (("heads", spec.heads), ("kv_heads", spec.kv_heads), ("mlp", spec.mlp)):
            if value % self.tp_size:
                raise InputError(f"{name}({value}) % tp({self.tp_size}) = {value % self.tp_size}, must be 0")
        self.heads, self.kv_heads = spec.heads // self.tp_size, spec.kv_heads // self.tp_size
        self.cos, self.sin = rotary_tables(spec, device)
        self._cpu = CpuForward(self) if self.uses_cpu_kernels else None
        self.bind(weights)

    @property
    def uses_cpu_kernels(self) -> bool:
        return self.device.type == "cpu"

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Read from these tensors from now on. Raises InputError naming a missing or ill-shaped one."""
        spec = self.spec

        def take(name: str, *shape: int) -> Tensor:
            if name not in weights:
                raise InputError(f"weights lack {name}; give one tensor for each name of this model")
            tensor = weights[name].detach()
            if tuple(tensor.shape) != shape or tensor.dtype != self.dtype or tensor.device.type != self.device.type:
                raise InputError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device.type}, "
                    f"but {self.dtype} {list(shape)} on {self.device.type} is needed (tp={self.tp_size})"
                )
            return tensor

        embedding = "embedding.word_embeddings.weight"
        rows = weights[embedding].shape[0] if embedding in weights else 0
        if embedding in weights and rows * self.tp_size < spec.vocab:
            raise InputError(f"{embedding} has {rows} rows on each of {self.tp_size} ranks, vocab is {spec.vocab}")
        heads_dim = self.heads * spec.head_dim
        qkv_dim = heads_dim + 2 * self.kv_heads * spec.head_dim
        mlp = spec.mlp // self.tp_size

        def layer(number: int) -> LayerWeights:
            p = f"decoder.layers.{number}."
            return LayerWeights(
                input_norm=take(p + "input_layernorm.weight", spec.hidden),
                qkv=take(p + "self_attention.linear_qkv.weight", qkv_dim, spec.hidden),
                qkv_bias=take(p + "self_attention.linear_qkv.bias", qkv_dim) if spec.qkv_bias else None,
                q_norm=take(p + "self_attention.q_layernorm.weight", spec.head_dim) if spec.qk_norm else None,
                k_norm=take(p + "self_attention.k_layernorm.weight", spec.head_dim) if spec.qk_norm else None,
                proj=take(p + "self_attention.linear_proj.weight", spec.hidden, heads_dim),
                mlp_norm=take(p + "pre_mlp_layernorm.weight", spec.hidden),
                fc1=take(p + "mlp.linear_fc1.weight", 2 * mlp, spec.hidden),
                fc2=take(p + "mlp.linear_fc2.weight", spec.hidden, mlp),
            )

        # Everything is checked before anything is replaced: after an InputError the old weights still serve.
        found = take(embedding, rows, spec.hidden)
        layers = [layer(number) for number in range(spec.layers)]
        final_norm = take("decoder.final_layernorm.weight", spec.hidden)
        output = found if spec.tied_embeddings else take("output_layer.weight", rows, spec.hidden)
        self.embedding, self.layers, self.final_norm, self.output = found, layers, final_norm, output
        if self._cpu is not None:
            self._cpu.bind()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Run one step, filling the cache. Returns float32 logits [R or more rows, vocab], one row per drawing row.

        Rows past R, if any, are padding.
        """
        if self._cpu is not None:
            return self._cpu.forward(batch, cache)
        step = _DeviceStep(self, batch, cache)
        tokens = batch.tokens if len(batch.tokens) >= SAFE_ROWS else _padded(batch.tokens, SAFE_ROWS)
        x = self._embed(torch.from_numpy(tokens).to(self.device))
        for number, layer in enumerate(self.layers):
            qkv = linear(rms_norm(x, layer.input_norm, self.spec.norm_eps), layer.qkv, layer.qkv_bias)
            attention = step.attend(number, layer, qkv)
            x = x + self._sum(linear(attention, layer.proj))
            gate_up = linear(rms_norm(x, layer.mlp_norm, self.spec.norm_eps), layer.fc1)
            x = x + self._sum(linear(silu_mul(gate_up), layer.fc2))
        drawing = pad_rows(x[torch.from_numpy(batch.draw_rows).to(self.device)])
        logits = linear(rms_norm(drawing, self.final_norm, self.spec.norm_eps), self.output)
        return self.gather(logits)[:, : self.spec.vocab].float()

    def _embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding; with tensor parallelism other ranks' rows count as zero and the sum is exact."""
        if self.tp_size == 1:
            return F.embedding(tokens, self.embedding)
        local = tokens - self.tp_rank * self.embedding.shape[0]
        mine = (local >= 0) & (local < self.embedding.shape[0])
        return self._sum(F.embedding(local.where(mine, 0), self.embedding) * mine[:, None])

    def _sum(self, x: Tensor) -> Tensor:
        if self.tp_size > 1:
            dist.all_reduce(x, group=self.tp_group)
        return x

    def sum_in_place(self, x: Tensor) -> None:
        """Sum over the tensor-parallel ranks in rank order: an element's bits do not depend on its place."""
        if self.tp_size == 1:
            return
        parts = [torch.empty_like(x) for _ in range(self.tp_size)]
        dist.all_gather(parts, x, group=self.tp_group)
        x.copy_(parts[0])
        for part in parts[1:]:
            x += part

    def gather(self, logits: Tensor) -> Tensor:
        """This rank's columns -> the columns of all ranks."""
        if self.tp_size == 1:
            return logits
        parts = [torch.empty_like(logits) for _ in range(self.tp_size)]
        dist.all_gather(parts, logits.contiguous(), group=self.tp_group)
        return torch.cat(parts, dim=-1)


class _DeviceStep:
    """Attention of one step with torch and flash-attn."""

    def __init__(self, runner: ModelRunner, batch: ForwardBatch, cache: KVCache) -> None:
        self.runner, self.cache = runner, cache
        device, self.rows = runner.device, len(batch.tokens)
        positions = torch.from_numpy(batch.positions).to(device)
        self.cos, self.sin = runner.cos[positions], runner.sin[positions]
        slots = torch.from_numpy(batch.slots).to(device)
        self.slot_block, self.slot_offset = slots // cache.block_tokens, slots % cache.block_tokens
        self.tables = torch.from_numpy(batch.tables).to(device)
        self.query_starts, self.contexts = batch.query_starts.tolist(), batch.contexts.tolist()

    def attend(self, number: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        """As _CpuStep.attend."""
        runner, dim = self.runner, self.runner.spec.head_dim
        per_group = runner.heads // runner.kv_heads
        grouped = qkv[: self.rows].view(self.rows, runner.kv_heads, per_group + 2, dim)
        q = grouped[:, :, :per_group].reshape(self.rows, runner.heads, dim)
        k, v = grouped[:, :, per_group], grouped[:, :, per_group + 1]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, runner.spec.norm_eps)
            k = rms_norm(k, layer.k_norm, runner.spec.norm_eps)
        q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        keys, values = self.cache.keys[number], self.cache.values[number]
        keys[self.slot_block, self.slot_offset] = k
        values[self.slot_block, self.slot_offset] = v
        out = paged_attention(q, keys, values, self.tables, self.query_starts, self.contexts)
        return pad_rows(out.flatten(1))


def _padded(tokens: np.ndarray, rows: int) -> np.ndarray:
    """Token 0 in the rows added: they are computed and never looked at."""
    return np.concatenate((tokens, np.zeros(rows - len(tokens), tokens.dtype)))
