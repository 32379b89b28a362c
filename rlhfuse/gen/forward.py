"""Who runs the engine's steps: the kernels of gen/cpu, or what GPUs run, of gen/gpu.

x = embedding[token]
per layer:  x += proj(attention(rope(qkv(norm(x))), cache));  x += fc2(silu(gate) * up),  [gate, up] = fc1(norm(x))
logits = output(norm(x)), at the rows that draw
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from rlhfuse.base.errors import InputError
from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.core.model_shard import TensorParallel
from rlhfuse.gen.cpu.forward import CpuForward
from rlhfuse.gen.gpu.decode_graphs import CudaRecorder
from rlhfuse.gen.gpu.forward import DeviceForward
from rlhfuse.gen.gpu.switch_sum import choose_parallel
from rlhfuse.gen.options import EngineOptions
from rlhfuse.gen.sampler import draw_kernels
from rlhfuse.models.attention.backends import choose_paged
from rlhfuse.models.attention.paged.cache import CacheShape
from rlhfuse.models.layers.decode_layer import layer_kernels

Forward = CpuForward | DeviceForward


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
    layer = layer_kernels(on_cuda or options.kernels == "triton")
    heads, kv_heads = spec.heads // plain.size, spec.kv_heads // plain.size
    shape = CacheShape(dtype, device, heads, kv_heads, spec.head_dim, options.block_tokens, options.max_sequences)
    chosen = choose_paged(shape, options.attention)
    parallel, sums = choose_parallel(tp_group, options.all_reduce, device, options.max_sequences, spec.hidden, dtype)
    kernels = draw_kernels(device), chosen.kernels, layer
    forward = DeviceForward(spec, parallel, device, options.max_sequences, recorder, *kernels, options.entropies)
    return forward, tuple(line for line in (chosen.line("attention of generation"), sums) if line)
