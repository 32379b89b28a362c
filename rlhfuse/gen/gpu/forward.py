"""The forward pass for generation as CUDA runs it: GEMMs and nine launches a layer (on CPU it runs too, slowly).

    decode   one token of each sequence: padded to a DecodeShape, in CUDA graphs or launched one by one
    mixed    chunks of prompts among decoding sequences: packed without padding, launched kernel after kernel

Neither waits: a token may be named by its place among the draws before. T tokens, H and G heads of this rank.
"""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfuse.base.cuda_environment import recording_obstacle
from rlhfuse.base.errors import InputError
from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.core.draws import DrawBatch, Launched
from rlhfuse.gen.core.forward_batch import ForwardBatch
from rlhfuse.gen.core.kv_cache import KVCache
from rlhfuse.gen.core.model_shard import ModelWeights, TensorParallel
from rlhfuse.gen.gpu.decode_graphs import (
    CudaRecorder,
    DecodeGraphs,
    DecodeInputs,
    DecodeShape,
    Staging,
    padded_arrays,
)
from rlhfuse.gen.gpu.draws import DrawInputs, DrawKernels, DrawOutputs, draw_array
from rlhfuse.models.attention.paged.cache import Attend, PagedAttention, PagedQueries
from rlhfuse.models.layers.decode_layer import LayerKernels
from rlhfuse.models.layers.rotation import RotaryTables
from rlhfuse.parallel.weight_gradients import product


class DeviceForward:
    """Launches steps of this rank's share of a model without waiting for them, with the weights bound last."""

    cache_type: type[KVCache] = KVCache
    spare_blocks = 1  # the last of the cache: padding rows write and read there
    runs_ahead = True  # a step may be launched before the draws of the one before are read

    def __init__(
        self,
        spec: ModelSpec,
        parallel: TensorParallel,
        device: torch.device,
        max_sequences: int,
        recorder: CudaRecorder | None,
        kernels: DrawKernels,
        attention: PagedAttention,
        layer_kernels: LayerKernels,
        measures: bool = False,
    ) -> None:
        """`recorder` None: no graphs; `measures`: entropies of the draws. `bind` must be called before `launch`.

        Raises InputError where tensor ranks would record NCCL unsafely.
        """
        if recorder and parallel.size > 1 and (obstacle := recording_obstacle(os.environ)):
            raise InputError(f"{obstacle}, or set rollout.cuda_graphs=false")
        self.spec, self.parallel, self.device = spec, parallel, device
        self.max_sequences = max_sequences
        self._attention, self._layer_kernels = attention, layer_kernels
        self._rotary = RotaryTables(spec, device)
        self._cos_sin = self._rotary.up_to(1)
        self._staging = Staging(device)
        self._graphs = DecodeGraphs(recorder, device)
        self._kernels, self._outputs = kernels, DrawOutputs(device, max_sequences, measures)
        self._weights: ModelWeights | None = None
        self._weight_addresses: tuple[int, ...] = ()

    @property
    def recording_seconds(self) -> float:
        """Seconds spent on capturing CUDA graphs since the beginning."""
        return self._graphs.recording_seconds

    @property
    def recorded_shapes(self) -> int:
        """Decode steps captured since the beginning; what was dropped and captured anew counts again."""
        return self._graphs.recorded_shapes

    def bind(self, weights: ModelWeights) -> None:
        """Read from these tensors from now on. Graphs stay if all lie where the old ones lay."""
        self._weights, self._weight_addresses = weights, weights.addresses()

    def unbind(self) -> None:
        """Let go of the weights. Graphs read them by address, so they go too."""
        self.release()
        self._weights, self._weight_addresses = None, ()

    def release(self) -> None:
        """Drop captured graphs and their memory, as before the cache is dropped."""
        self._graphs.release()

    @torch.inference_mode()
    def launch(self, batch: ForwardBatch, draws: DrawBatch, cache: KVCache) -> Launched:
        """Run one step, filling the cache, and draw at the rows that draw.

        A token may be ~i: what the step launched before draws at its place i.
        """
        assert cache.keys.shape[1] * cache.block_tokens < 2**31, "slots are sent as int32"
        self._cos_sin = self._rotary.up_to(batch.longest)  # graphs read them by address, so they should seldom grow
        if len(batch.tokens) == len(batch.contexts):
            self._decode_step(batch, draws, cache)
            return self._outputs.send(batch.draw_rows)
        logits, inputs = self.mixed(batch, draws, cache)
        if inputs.rows:
            self._kernels.draw(logits, inputs, self._outputs.newest)
        return self._outputs.send(np.arange(inputs.rows))

    def decode(self, inputs: DecodeInputs, cache: KVCache) -> Tensor:
        """Logits [rows, vocab] float32: of fixed shapes, never waiting; may be run twice."""
        facts, _, contexts, tables = inputs
        self._kernels.feed(facts[0], self._outputs.newest[0])
        tokens, positions, slots = facts.long()  # new tensors, made by one kernel
        attend = self._attention.decode(tables, contexts)
        return self._logits(*self._layers(tokens, positions, slots, cache, attend))

    def _decode_step(self, batch: ForwardBatch, draws: DrawBatch, cache: KVCache) -> None:
        (sequences, blocks), most_blocks = batch.tables.shape, -(-self.spec.context // cache.block_tokens)
        shape = DecodeShape.holding(sequences, blocks, self.max_sequences, most_blocks, cache.block_tokens)
        shape = shape._replace(draws=DrawInputs.columns(draws.banned.shape[1]))
        arrays = padded_arrays(batch, draws, shape, cache.keys.shape[1] - 1, cache.block_tokens)

        def work(inputs: DecodeInputs) -> None:
            draws = DrawInputs(shape.rows, inputs.draws.flatten())
            self._kernels.draw(self.decode(inputs, cache), draws, self._outputs.newest)

        self._graphs.keep_for(
            (*self._weight_addresses, cache.keys.data_ptr(), cache.values.data_ptr(), self._cos_sin[0].data_ptr())
        )
        self._graphs.run(shape, arrays, self._staging, work)

    def mixed(self, batch: ForwardBatch, draws: DrawBatch, cache: KVCache) -> tuple[Tensor, DrawInputs]:
        """Logits [drawing rows, vocab] float32, and what their draws need."""
        rows = len(batch.draw_rows)
        arrays = [batch.tokens, batch.positions, batch.slots, batch.draw_rows, batch.query_starts, batch.contexts]
        arrays += [batch.tables, draw_array(draws, np.arange(rows), rows)]
        *indices, query_starts, contexts, tables, packed = self._staging.send(arrays)
        self._kernels.feed(indices[0], self._outputs.newest[0])
        tokens, positions, slots, draw_rows = (x.long() for x in indices)
        runs, here = (batch.query_starts.tolist(), batch.contexts.tolist()), torch.from_numpy(batch.tables)
        attend = self._attention.mixed(PagedQueries(tables, query_starts, contexts, *runs, here))
        x, delta = self._layers(tokens, positions, slots, cache, attend)
        none = torch.empty(0, self.spec.vocab, device=self.device)
        return self._logits(x[draw_rows], delta[draw_rows]) if rows else none, DrawInputs(rows, packed.flatten())

    def _layers(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, cache: KVCache, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Two parts of the hidden states [T, hidden] behind the last layer. tokens, positions, slots [T] int64.

        The sums are rounded as the training side rounds them: each product, then the residual.
        """
        assert self._weights is not None, "bind() comes first"
        add_norm, place_heads, swiglu = self._layer_kernels
        product_sum, eps = self.parallel.product_sum, self.spec.norm_eps
        x, delta = self.parallel.embed(tokens, self._weights.embedding), None
        for number, layer in enumerate(self._weights.layers):
            keys, values = cache.keys[number], cache.values[number]
            bias, q_norm, k_norm = layer.linear_qkv_bias, layer.q_layernorm, layer.k_layernorm
            qkv = F.linear(add_norm(x, delta, None, layer.input_layernorm, eps), layer.linear_qkv, bias)
            norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
            q = place_heads(qkv, norms, eps, self._cos_sin, (positions, slots), (keys, values))
            delta = product_sum(attend(q, keys, values).flatten(1), layer.linear_proj)
            bias, norm = layer.linear_proj_bias, layer.pre_mlp_layernorm
            mlp = swiglu(F.linear(add_norm(x, delta, bias, norm, eps), layer.linear_fc1))
            delta = product_sum(mlp, layer.linear_fc2)
        assert delta is not None, "a model has layers"
        return x, delta

    def _logits(self, x: Tensor, delta: Tensor) -> Tensor:
        """[rows, vocab] float32: the products' own sums, not rounded between."""
        assert self._weights is not None, "bind() comes first"
        x = self._layer_kernels.add_norm(x, delta, None, self._weights.final_norm, self.spec.norm_eps)
        logits = product(x, self._weights.output.t())
        return self.parallel.gather(logits)[:, : self.spec.vocab]
