"""The model as generation sees it: weights are read in place, under their Megatron-core names.

x = embedding[token]
per layer:  x += proj(attention(rope(qkv(norm(x))), cache));  x += fc2(silu(gate) * up),  [gate, up] = fc1(norm(x))
logits = output(norm(x)), at the rows that draw
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhfuse.base.errors import InputError
from rlhfuse.config.spec import ModelSpec
from rlhfuse.decisions.decode_shapes import queries_within
from rlhfuse.gen.core.draws import DrawBatch, Draws
from rlhfuse.gen.core.forward_batch import ForwardBatch
from rlhfuse.gen.core.kv_cache import KVCache
from rlhfuse.gen.core.model_shard import LayerWeights, ModelWeights, TensorParallel
from rlhfuse.gen.cpu.forward import CpuForward
from rlhfuse.gen.gpu.decode_graphs import CudaRecorder
from rlhfuse.gen.gpu.draws import DrawKernels, StepInFlight
from rlhfuse.gen.gpu.forward import DeviceForward
from rlhfuse.gen.gpu.layer_kernels import torch_layer, triton_layer
from rlhfuse.gen.gpu.switch_sum import choose_parallel
from rlhfuse.gen.sampler import draw_into, draw_tokens, feed
from rlhfuse.models.cpu.tiles import LANES
from rlhfuse.models.paged_attention import CacheShape, choose_attention

Attention = Literal["auto", "flashinfer", "triton", "flash_attn", "torch"]
AllReduce = Literal["auto", "nccl", "switch"]
NAMES = {"kernels": ("auto", "torch", "triton"), "attention": get_args(Attention), "all_reduce": get_args(AllReduce)}


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of an engine."""

    num_blocks: int = 1024  # KV blocks
    block_tokens: int = 16  # tokens in one block
    max_sequences: int = 256  # running at the same time
    max_batched_tokens: int = 2048  # tokens in one step, prefill included
    cuda_graphs: bool = True  # replay decode steps as CUDA graphs; without effect on CPU
    run_ahead: bool = True  # launch a step before the draws of the one before are read; without effect on CPU kernels
    keep_memory: bool = False  # while the engine is paused its cache stays, and graphs that were recorded over it
    draft_rows: int | None = None  # of a decode step, that guesses may fill up; 0 = off; None: see below
    # On CPU: what GPUs run, with torch's kernels or Triton's in its interpreter, neither of which promises bits.
    kernels: Literal["auto", "torch", "triton"] = "auto"
    attention: Attention = "auto"  # whose kernels read the cache (models/paged_attention.py), unless CPU kernels do
    all_reduce: AllReduce = "auto"  # who sums over tensor ranks (gen/gpu/switch_sum.py), on CUDA
    # Without a number of draft_rows CPU kernels guess up to 16 where it is measured to pay, others do not guess.

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_tokens", "max_sequences", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if self.draft_rows is not None and self.draft_rows < 0:
            raise InputError(f"draft_rows={self.draft_rows} must be at least 0; 0 turns speculation off")
        for name, known in NAMES.items():
            if getattr(self, name) not in known:
                raise InputError(f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(known)}")


class DrawnStep(NamedTuple):
    """A step that is done."""

    places: np.ndarray
    draws: Draws

    def read(self) -> Draws:
        return self.draws


class ModelRunner:
    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor] | None,
        options: EngineOptions,
        *,
        device: torch.device,
        dtype: torch.dtype,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Raises InputError where the tensor-parallel group does not divide the model.

        Each of its ranks holds a share of heads, MLP columns and vocabulary rows; all see the same logits.
        """
        self.spec, self.options, self.device, self.dtype = spec, options, device, dtype
        self.tp_size, self.tp_rank = TensorParallel(tp_group).size, TensorParallel(tp_group).rank
        for name, value in (("heads", spec.heads), ("kv_heads", spec.kv_heads), ("mlp", spec.mlp)):
            if value % self.tp_size:
                raise InputError(f"{name}({value}) % tp({self.tp_size}) = {value % self.tp_size}, must be 0")
        self.heads, self.kv_heads = spec.heads // self.tp_size, spec.kv_heads // self.tp_size
        self._forward: CpuForward | DeviceForward
        self.lines: tuple[str, ...] = ()  # what was chosen by name, and why not another
        if device.type == "cpu" and options.kernels == "auto":
            self._forward = CpuForward(spec, TensorParallel(tp_group))
        else:
            on_cuda = device.type == "cuda"
            recorder = CudaRecorder(device) if options.cuda_graphs and on_cuda else None
            layer = triton_layer() if on_cuda or options.kernels == "triton" else torch_layer()
            sizes = spec.head_dim, options.block_tokens, options.max_sequences
            shape = CacheShape(dtype, device, self.heads, self.kv_heads, *sizes)
            chosen = choose_attention(shape, options.attention)
            summed = tp_group, options.all_reduce, device, options.max_sequences, spec.hidden, dtype
            parallel, sums = choose_parallel(*summed)
            self.lines = tuple(line for line in (chosen.line(), sums) if line)
            kernels = _draw_kernels(device), chosen.kernels, layer
            rows = options.draft_rows or 0
            self._forward = DeviceForward(spec, parallel, device, options.max_sequences, recorder, *kernels, rows)
        self.runs_ahead = options.run_ahead and isinstance(self._forward, DeviceForward)
        here = LANES if isinstance(self._forward, CpuForward) else 0  # a step computes whole panels of tokens anyway
        self.draft_rows = here if options.draft_rows is None else options.draft_rows
        self.weights: ModelWeights | None = None
        if weights is not None:
            self.bind(weights)

    @property
    def recording_seconds(self) -> float:
        """Seconds spent on capturing CUDA graphs since the beginning."""
        return self._forward.recording_seconds

    @property
    def recorded_shapes(self) -> int:
        """Decode steps captured since the beginning; what was dropped and captured anew counts again."""
        return self._forward.recorded_shapes

    def guesses_each(self, sequences: int) -> int:
        """Guesses that one of so many sequences may have in a step: on CPU rows are packed, on GPUs padded."""
        if isinstance(self._forward, CpuForward):
            return self.draft_rows
        return max(0, queries_within(self.draft_rows, sequences, self.options.max_sequences) - 1)

    def agree(self, number: int) -> int:
        """The first tensor rank's number on all of them, of 64 bits; a collective."""
        return self._forward.parallel.first(number)

    def step_price(self, sequences: int, guesses: int) -> float:
        """What a decode step with guesses costs, beside one of few rows: roughly, and whatever the machine."""
        return self._forward.step_price(sequences, guesses)

    def new_cache(self) -> KVCache:
        """An empty cache of this rank's KV heads, in the layout that its kernels read."""
        blocks = self.options.num_blocks + self._forward.spare_blocks
        shape = self.spec.layers, blocks, self.options.block_tokens, self.kv_heads, self.spec.head_dim
        return self._forward.cache_type(*shape, dtype=self.dtype, device=self.device)

    def release(self) -> None:
        """Give back what was built over the cache, which the caller is about to drop, and working memory."""
        self._forward.release()

    def unbind(self) -> None:
        """Let go of the weights, so that their memory can be given back; `bind` comes before the next step."""
        self._forward.unbind()
        self.weights = None

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
                proj_bias=take(p + "self_attention.linear_proj.bias", spec.hidden) if spec.proj_bias else None,
                mlp_norm=take(p + "pre_mlp_layernorm.weight", spec.hidden),
                fc1=take(p + "mlp.linear_fc1.weight", 2 * mlp, spec.hidden),
                fc2=take(p + "mlp.linear_fc2.weight", spec.hidden, mlp),
            )

        # Everything is checked before anything is replaced: after an InputError the old weights still serve.
        embedding_weight = take(embedding, rows, spec.hidden)
        layers = [layer(number) for number in range(spec.layers)]
        final_norm = take("decoder.final_layernorm.weight", spec.hidden)
        output = embedding_weight if spec.tied_embeddings else take("output_layer.weight", rows, spec.hidden)
        self.weights = ModelWeights(embedding_weight, tuple(layers), final_norm, output)
        self._forward.bind(self.weights)

    @torch.inference_mode()
    def launch(self, batch: ForwardBatch, draws: DrawBatch, cache: KVCache) -> StepInFlight | DrawnStep:
        """Run one step, filling the cache, and draw at the rows that draw.

        Where the runner runs ahead a token may be ~i: what the step launched before draws at place i.
        """
        if isinstance(self._forward, DeviceForward):
            return self._forward.launch(batch, draws, cache)
        return DrawnStep(batch.draw_rows, draw_tokens(self._forward.forward(batch, cache), draws))


def _draw_kernels(device: torch.device) -> DrawKernels:
    if device.type != "cuda":
        return DrawKernels(feed, draw_into)
    from rlhfuse.gen.gpu import sampling  # Triton is there where CUDA is

    return DrawKernels(sampling.feed, sampling.draw)
