"""What the engine asks of whoever runs its steps: the kernels of gen/cpu, or what GPUs run, of gen/gpu.

x = embedding[token]
per layer:  x += proj(attention(rope(qkv(norm(x))), cache));  x += fc2(silu(gate) * up),  [gate, up] = fc1(norm(x))
logits = output(norm(x)), at the rows that draw
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from rlhfuse.base.errors import InputError
from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.core.draws import DrawBatch, Launched
from rlhfuse.gen.core.forward_batch import ForwardBatch
from rlhfuse.gen.core.kv_cache import KVCache
from rlhfuse.gen.core.model_shard import ModelWeights, TensorParallel
from rlhfuse.gen.cpu.forward import CpuForward
from rlhfuse.gen.gpu.decode_graphs import CudaRecorder
from rlhfuse.gen.gpu.forward import DeviceForward
from rlhfuse.gen.gpu.switch_sum import choose_parallel
from rlhfuse.gen.options import EngineOptions
from rlhfuse.gen.sampler import draw_kernels
from rlhfuse.models.attention.backends import choose_paged
from rlhfuse.models.attention.paged.cache import CacheShape
from rlhfuse.models.layers.decode_layer import torch_layer, triton_layer


class Forward(Protocol):
    """Runs steps of this rank's share of a model, with the weights that were bound last."""

    parallel: TensorParallel
    cache_type: type[KVCache]
    spare_blocks: int  # of the cache, behind those that the engine gives out
    runs_ahead: bool  # a step may be launched before the draws of the one before are read

    @property
    def recording_seconds(self) -> float:
        """Seconds spent on capturing CUDA graphs since the beginning."""
        ...

    @property
    def recorded_shapes(self) -> int:
        """Decode steps captured since the beginning; what was dropped and captured anew counts again."""
        ...

    def bind(self, weights: ModelWeights) -> None:
        """Read from these tensors from now on."""
        ...

    def unbind(self) -> None:
        """Let go of the weights, so that their memory can be given back; `bind` comes before the next step."""
        ...

    def release(self) -> None:
        """Give back what was built over the cache, which the caller is about to drop, and working memory."""
        ...

    def launch(self, batch: ForwardBatch, draws: DrawBatch, cache: KVCache) -> Launched:
        """Run one step, filling the cache, and draw at the rows that draw.

        Where it runs ahead a token may be ~i: what the step launched before draws at its place i.
        """
        ...


def choose_forward(
    spec: ModelSpec,
    options: EngineOptions,
    device: torch.device,
    dtype: torch.dtype,
    tp_group: dist.ProcessGroup | None,
) -> tuple[Forward, tuple[str, ...]]:
    """Who runs the steps on this device, and lines on what was chosen by name, and why not another.

    Each tensor rank holds a share of heads, MLP columns and vocabulary rows; all see the same logits. Raises InputError
    where the group does not divide the model, or these kernels cannot verify guesses.
    """
    plain = TensorParallel(tp_group)
    for name, value in (("heads", spec.heads), ("kv_heads", spec.kv_heads), ("mlp", spec.mlp)):
        if value % plain.size:
            raise InputError(f"{name}({value}) % tp({plain.size}) = {value % plain.size}, must be 0")
    if device.type == "cpu" and options.kernels == "auto":
        return CpuForward(spec, plain), ()
    if options.draft_rows:
        raise InputError(f"draft_rows={options.draft_rows}: only CPU kernels verify guesses; use 0")
    on_cuda = device.type == "cuda"
    recorder = CudaRecorder(device) if options.cuda_graphs and on_cuda else None
    layer = triton_layer() if on_cuda or options.kernels == "triton" else torch_layer()
    heads, kv_heads = spec.heads // plain.size, spec.kv_heads // plain.size
    shape = CacheShape(dtype, device, heads, kv_heads, spec.head_dim, options.block_tokens, options.max_sequences)
    chosen = choose_paged(shape, options.attention)
    summed = tp_group, options.all_reduce, device, options.max_sequences, spec.hidden, dtype
    parallel, sums = choose_parallel(*summed)
    kernels = draw_kernels(device), chosen.kernels, layer
    forward = DeviceForward(spec, parallel, device, options.max_sequences, recorder, *kernels, options.entropies)
    return forward, tuple(line for line in (chosen.line("attention of generation"), sums) if line)
