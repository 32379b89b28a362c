"""The forward pass for generation on CPU: numba kernels over panels of 16 tokens (models/layers/).

All intermediate results lie in one workspace that is kept between steps. In float32 a token's bits depend on its own
sequence alone (docs/explanation/engine.md). In bfloat16 weights and cache are bfloat16, all between is float32.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.core.draws import DrawBatch, Launched
from rlhfuse.gen.core.forward_batch import ForwardBatch
from rlhfuse.gen.core.kv_cache import KVCache
from rlhfuse.gen.core.model_shard import LayerWeights, ModelWeights, TensorParallel
from rlhfuse.gen.cpu.sampling import draw_tokens
from rlhfuse.models.attention.paged.cpu import Queries, paged_attention
from rlhfuse.models.cpu.tiles import FEW, LANES, lanes_up, panel_offsets, share_threads
from rlhfuse.models.layers import decode_layer_cpu as decoder
from rlhfuse.models.layers.rotation import RotaryTables

WEIGHT_BYTES = 25e6  # that a step reads in the unit of prices, about a millisecond


class LaneKVCache(KVCache):
    """The layout that the CPU kernels read, the last dimension padded to whole panels.

    keys [layers, blocks, G, D, block_tokens], values [layers, blocks, G, block_tokens, D]
    """

    def _shapes(self, layers: int, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        head = (layers, num_blocks, self.kv_heads)
        return (
            (*head, self.head_dim, lanes_up(self.block_tokens)),
            (*head, self.block_tokens, lanes_up(self.head_dim)),
        )

    def _rows(self) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[..., : self.block_tokens], self.values[..., : self.head_dim]
        return keys.permute(0, 1, 4, 2, 3), values.permute(0, 1, 3, 2, 4)


def _layer_arrays(layer: LayerWeights[Tensor]) -> LayerWeights[np.ndarray]:
    none = as_array(layer.linear_qkv)[0, :0]  # of the same type, so that one compiled kernel serves all models
    return LayerWeights(**{name: none if weight is None else as_array(weight) for name, weight in vars(layer).items()})


class CpuForward:
    """Runs steps at once: what is launched is done. The interface is that of gen/gpu/forward.py."""

    cache_type: type[KVCache] = LaneKVCache
    spare_blocks, runs_ahead = 0, False
    idle_rows = LANES  # of a decode step that are computed anyway, whole panels, so that guesses may fill them
    recording_seconds, recorded_shapes = 0.0, 0

    def __init__(self, spec: ModelSpec, parallel: TensorParallel) -> None:
        self.spec, self.parallel = spec, parallel
        self.eps = np.float32(spec.norm_eps)
        self.scale = np.float32(spec.head_dim**-0.5)
        self.rotary = RotaryTables(spec, torch.device("cpu"))
        self.heads, self.kv_heads = spec.heads // parallel.size, spec.kv_heads // parallel.size
        self._features = dict.fromkeys(("x", "delta", "normed", "drawn"), spec.hidden) | {
            "qkv": (self.heads + 2 * self.kv_heads) * spec.head_dim,
            "attention": self.heads * spec.head_dim,
            "mlp": spec.mlp // parallel.size,
        }
        self._arrays: dict[str, np.ndarray] = {}

    def bind(self, weights: ModelWeights) -> None:
        """Read from these tensors from now on."""
        self.layers = [_layer_arrays(layer) for layer in weights.layers]
        self.embedding, self.output = as_array(weights.embedding), as_array(weights.output)
        if self.parallel.size == 1:
            self.output = self.output[: self.spec.vocab]  # without the rows that only fill up
        self.final_norm = as_array(weights.final_norm)
        read = self.output.nbytes + sum(w.nbytes for layer in self.layers for w in vars(layer).values())
        self.weights_price = read / WEIGHT_BYTES

    def unbind(self) -> None:
        """Let go of the weights."""
        del self.layers, self.embedding, self.output, self.final_norm

    def step_price(self, sequences: int, guesses: int) -> float:
        """A decode step with guesses, in about milliseconds: weights once and panels; each row; the host's work."""
        rows = sequences + guesses
        panels = 1.0 if rows <= FEW else 0.12 + 1.05 * -(-rows // LANES)
        host = 0.3 + 0.06 * sequences + (0.1 + 0.02 * guesses if guesses else 0.0)
        return self.weights_price * (panels + 0.01 * rows) + host

    def release(self) -> None:
        """Give the working memory back."""
        self._arrays.clear()

    def array(self, name: str, panels: int) -> np.ndarray:
        """float32 [panels, features, LANES], kept, and grown when a step needs more panels than any before."""
        if name not in self._arrays or panels > len(self._arrays[name]):
            self._arrays[name] = np.zeros((panels, self._features[name], LANES), np.float32)
        return self._arrays[name][:panels]

    @torch.inference_mode()
    def launch(self, batch: ForwardBatch, draws: DrawBatch, cache: KVCache) -> Launched:
        drawn = draw_tokens(self.forward(batch, cache), draws)
        return Launched(batch.draw_rows, lambda: drawn)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Logits [drawing rows, vocab] float32 of one step; keys and values go into the cache."""
        threads, panels = share_threads(), -(-len(batch.tokens) // LANES)
        keys, values = as_array(cache.keys), as_array(cache.values)
        step = _Step(self, batch, panels, threads)
        for number, layer in enumerate(self.layers):
            step.attend(layer, keys[number], values[number])
            step.run_mlp(layer)
        return step.logits()


class _Step:
    """One step's arrays, and the kernels that run over them in order."""

    def __init__(self, forward: CpuForward, batch: ForwardBatch, panels: int, threads: int) -> None:
        self.forward, self.batch, self.threads = forward, batch, threads
        self.x, self.delta, self.normed, self.qkv, self.attention, self.mlp = (
            forward.array(name, panels) for name in ("x", "delta", "normed", "qkv", "attention", "mlp")
        )
        self.hidden_at, self.attention_at, self.mlp_at = (
            panel_offsets(panels, array.shape[1]) for array in (self.x, self.attention, self.mlp)
        )
        self.q = np.empty((len(batch.tokens), forward.heads, forward.spec.head_dim), np.float32)
        self.queries = Queries.of(batch.query_starts, batch.contexts, forward.kv_heads, threads)
        self.cos, self.sin = (table.numpy() for table in forward.rotary.up_to(int(batch.contexts.max())))
        self.no_bias = forward.final_norm[:0]
        first_row = forward.parallel.rank * forward.embedding.shape[0]
        decoder.embed(batch.tokens, forward.embedding, first_row, self.x)
        forward.parallel.sum(torch.from_numpy(self.x))
        self.delta[...] = 0

    def attend(self, layer: LayerWeights[np.ndarray], keys: np.ndarray, values: np.ndarray) -> None:
        """delta = proj(attention(norm(x + delta))), a bias of proj still to be added"""
        forward, batch, tokens = self.forward, self.batch, len(self.batch.tokens)
        decoder.add_norm(self.x, self.delta, self.no_bias, layer.input_layernorm, forward.eps, self.normed)
        decoder.multiply(layer.linear_qkv, self.normed, self.hidden_at, tokens, self.qkv, self.threads)
        places = batch.positions, batch.slots, self.cos, self.sin
        norms = layer.linear_qkv_bias, layer.q_layernorm, layer.k_layernorm, forward.eps
        decoder.place_heads(self.qkv, *places, *norms, keys, values, self.q, self.threads)
        paged_attention(self.q, keys, values, batch.tables, *self.queries, forward.scale, self.attention)
        decoder.multiply(layer.linear_proj, self.attention, self.attention_at, tokens, self.delta, self.threads)
        self.forward.parallel.sum(torch.from_numpy(self.delta))

    def run_mlp(self, layer: LayerWeights[np.ndarray]) -> None:
        """delta = fc2(silu(gate) * up) of norm(x + delta + bias of proj)"""
        tokens, eps = len(self.batch.tokens), self.forward.eps
        decoder.add_norm(self.x, self.delta, layer.linear_proj_bias, layer.pre_mlp_layernorm, eps, self.normed)
        decoder.multiply_swiglu(layer.linear_fc1, self.normed, self.hidden_at, tokens, self.mlp, self.threads)
        decoder.multiply(layer.linear_fc2, self.mlp, self.mlp_at, tokens, self.delta, self.threads)
        self.forward.parallel.sum(torch.from_numpy(self.delta))

    def logits(self) -> Tensor:
        forward, rows = self.forward, self.batch.draw_rows
        panels = -(-len(rows) // LANES)
        drawn = forward.array("drawn", panels)
        decoder.add_norm(self.x, self.delta, self.no_bias, forward.final_norm, forward.eps, self.normed)
        decoder.take_tokens(self.normed, rows, drawn)
        out = np.empty((len(rows), forward.output.shape[0]), np.float32)
        decoder.multiply_to_rows(forward.output, drawn, self.hidden_at, out, self.threads)
        return forward.parallel.gather(torch.from_numpy(out))[:, : forward.spec.vocab]


def as_array(weight: Tensor) -> np.ndarray:
    """A tensor as an array over the same memory: float32, or bfloat16 as uint16."""
    return (weight.view(torch.uint16) if weight.dtype == torch.bfloat16 else weight).numpy()
