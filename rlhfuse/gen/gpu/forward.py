"""The forward pass for generation in torch and flash-attn: what CUDA runs (on CPU it runs too, slowly).

    decode   one token of each sequence: padded to a DecodeShape, in CUDA graphs or launched kernel after kernel
    mixed    chunks of prompts among decoding sequences: packed without padding, launched kernel after kernel

Neither waits: a token may be named by its place among the draws before. T tokens, H and G heads of this rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.core.draws import DrawBatch
from rlhfuse.gen.core.forward_batch import ForwardBatch
from rlhfuse.gen.core.kv_cache import KVCache
from rlhfuse.gen.core.model_shard import LayerWeights, ModelWeights, TensorParallel
from rlhfuse.gen.gpu.decode_graphs import DecodeGraphs, DecodeInputs, DecodeShape, Recorder, Staging, padded_arrays
from rlhfuse.gen.gpu.draws import DrawInputs, DrawKernels, DrawOutputs, StepInFlight, draw_array
from rlhfuse.models.attention import PagedQueries, decode_attention, flash_attention, flash_obstacle, paged_attention
from rlhfuse.models.rotary import rotary_tables, rotate, signed_tables

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (q [T, H, D], one layer's keys, its values) -> [T, H, D]


class DeviceForward:
    cache_type: type[KVCache] = KVCache
    spare_blocks = 1  # the last of the cache: padding rows write and read there

    def __init__(
        self,
        spec: ModelSpec,
        parallel: TensorParallel,
        device: torch.device,
        max_sequences: int,
        recorder: Recorder | None,
        kernels: DrawKernels,
    ) -> None:
        """`recorder` None: no graphs. `bind` must be called before `launch`."""
        self.spec, self.parallel, self.device = spec, parallel, device
        self.heads, self.kv_heads = spec.heads // parallel.size, spec.kv_heads // parallel.size
        self.max_sequences = max_sequences
        self.cos, self.sin = signed_tables(*rotary_tables(spec, device))
        self._staging = Staging(device)
        self._graphs = DecodeGraphs(recorder, device) if recorder else None
        self._kernels, self._outputs = kernels, DrawOutputs(device, max_sequences)
        self._weights: ModelWeights | None = None
        self._weight_addresses: tuple[int, ...] = ()
        self._warned: set[str] = set()

    @property
    def recording_seconds(self) -> float:
        return self._graphs.recording_seconds if self._graphs else 0.0

    def bind(self, weights: ModelWeights) -> None:
        """Read from these tensors from now on. Graphs stay if all lie where the old ones lay."""
        self._weights, self._weight_addresses = weights, weights.addresses()

    def unbind(self) -> None:
        """Let go of the weights. Graphs read them by address, so they go too."""
        self.release()
        self._weights, self._weight_addresses = None, ()

    def release(self) -> None:
        """Drop captured graphs and their memory, as before the cache is dropped."""
        if self._graphs is not None:
            self._graphs.release()

    @torch.inference_mode()
    def launch(self, batch: ForwardBatch, draws: DrawBatch, cache: KVCache) -> StepInFlight:
        """As `ModelRunner.launch`. A token ~i is what the step launched before drew at its place i."""
        self._explain_slow_attention(cache)
        assert cache.keys.shape[1] * cache.block_tokens < 2**31, "slots are sent as int32"
        if len(batch.tokens) == len(batch.contexts):
            self._decode_step(batch, draws, cache)
            return self._outputs.send(batch.draw_rows)
        logits, inputs = self.mixed(batch, draws, cache)
        if inputs.rows:
            self._kernels.draw(logits, inputs, self._outputs.newest)
        return self._outputs.send(np.arange(inputs.rows))

    def decode(self, inputs: DecodeInputs, cache: KVCache) -> Tensor:
        """Logits [rows, vocab] in the weights' dtype: of fixed shapes, never waiting; may be run twice."""
        self._kernels.feed(inputs.tokens, self._outputs.newest[0])
        tokens, positions, slots = inputs.indices()
        tables, contexts = inputs.tables, inputs.contexts

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return decode_attention(q, keys, values, tables, contexts)

        return self._logits(self._layers(tokens, positions, slots, cache, attend))

    def _decode_step(self, batch: ForwardBatch, draws: DrawBatch, cache: KVCache) -> None:
        most_blocks, banned = -(-self.spec.context // cache.block_tokens), draws.banned.shape[1]
        shape = DecodeShape.holding(
            len(batch.contexts), batch.tables.shape[1], self.max_sequences, most_blocks, cache.block_tokens, banned
        )
        arrays = padded_arrays(batch, draws, shape, cache.keys.shape[1] - 1, cache.block_tokens)

        def work(inputs: DecodeInputs) -> None:
            self._kernels.draw(self.decode(inputs, cache), inputs.draws, self._outputs.newest)

        if self._graphs is None:
            work(DecodeInputs(shape, self._staging.send(arrays)))
        else:
            self._graphs.keep_for((*self._weight_addresses, cache.keys.data_ptr(), cache.values.data_ptr()))
            self._graphs.run(shape, arrays, self._staging, work)

    def mixed(self, batch: ForwardBatch, draws: DrawBatch, cache: KVCache) -> tuple[Tensor, DrawInputs]:
        """Logits [drawing rows, vocab] in the weights' dtype, and what their draws need."""
        key_starts, rows = np.concatenate(([0], np.cumsum(batch.contexts))), len(batch.draw_rows)
        arrays = [batch.tokens, batch.positions, batch.slots, batch.draw_rows, batch.query_starts, key_starts]
        arrays += [batch.tables, draw_array(draws, np.arange(rows), rows)]
        sent = self._staging.send(arrays).split([array.size for array in arrays])
        self._kernels.feed(sent[0], self._outputs.newest[0])
        tokens, positions, slots, draw_rows = (x.long() for x in sent[:4])
        queries = PagedQueries(
            sent[6].view(batch.tables.shape), sent[4], sent[5], batch.query_starts.tolist(), batch.contexts.tolist()
        )

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return paged_attention(q, keys, values, queries)

        x = self._layers(tokens, positions, slots, cache, attend)
        logits = self._logits(x[draw_rows]) if rows else x.new_empty(0, self.spec.vocab)
        return logits, DrawInputs(rows, sent[7])

    def _layers(self, tokens: Tensor, positions: Tensor, slots: Tensor, cache: KVCache, attend: Attend) -> Tensor:
        """Hidden states [T, hidden] behind the last layer. tokens, positions, slots [T] int64."""
        assert self._weights is not None, "bind() comes first"
        cos, sin = self.cos[positions][:, None, None], self.sin[positions][:, None, None]
        x = self.parallel.embed(tokens, self._weights.embedding)
        for number, layer in enumerate(self._weights.layers):
            keys, values = cache.keys[number], cache.values[number]
            q, k, v = self._qkv(layer, self._norm(x, layer.input_norm), cos, sin)
            keys.flatten(0, 1).index_copy_(0, slots, k)
            values.flatten(0, 1).index_copy_(0, slots, v)
            x = self._add_product(x, attend(q, keys, values).flatten(1), layer.proj)
            if layer.proj_bias is not None:
                x.add_(layer.proj_bias)
            gate, up = F.linear(self._norm(x, layer.mlp_norm), layer.fc1).chunk(2, dim=-1)
            x = self._add_product(x, F.silu(gate).mul_(up), layer.fc2)
        return x

    def _qkv(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys and values [T, G, D], normed and turned. cos, sin [T, 1, 1, D]."""
        per_group = self.heads // self.kv_heads
        grouped = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), self.kv_heads, per_group + 2, self.spec.head_dim)
        turning, v = grouped[:, :, : per_group + 1], grouped[:, :, per_group + 1]  # a group's queries, then its key
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = turning.split((per_group, 1), dim=2)
            turning = torch.cat((self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)), dim=2)
        turned = rotate(turning, cos, sin)
        q, k = turned[:, :, :per_group].to(x.dtype), turned[:, :, per_group].to(x.dtype)
        return q.reshape(len(x), self.heads, self.spec.head_dim), k, v

    def _add_product(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """x + y @ weight^T, summed over the ranks; may be written over x."""
        if self.parallel.size == 1:
            return x.addmm_(y, weight.t())
        return self.parallel.sum(F.linear(y, weight)).add_(x)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.spec.norm_eps)

    def _logits(self, x: Tensor) -> Tensor:
        assert self._weights is not None, "bind() comes first"
        logits = self.parallel.gather(F.linear(self._norm(x, self._weights.final_norm), self._weights.output))
        return logits[:, : self.spec.vocab]

    def _explain_slow_attention(self, cache: KVCache) -> None:
        """Say once why flash-attn, though installed, is not used."""
        obstacle = flash_obstacle(cache.keys.dtype, self.device, self.spec.head_dim, cache.block_tokens)
        if obstacle and flash_attention() is not None and self.device.type == "cuda" and obstacle not in self._warned:
            self._warned.add(obstacle)
            warnings.warn(f"generation uses torch's attention, which is slow: {obstacle}", stacklevel=2)
