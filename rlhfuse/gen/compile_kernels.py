"""Compiles the CPU kernels of engine and models, or loads them from numba's cache, before anything waits for a step.

The first start on a machine compiles for many seconds; of several ranks on a host one does it for all, in processes of
their own (`python -m rlhfuse.gen.compile_kernels float32 layers`), so that the compiler's memory is no rank's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from rlhfuse.base.kernel_cache import KernelGroup, tell_what_is_compiled
from rlhfuse.config.layer_weights import layer_weights
from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.cpu.sampling import draw_rows
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
from rlhfuse.gen.speculation.ngrams import propose
from rlhfuse.models.attention.packed.sequences import SequenceBorders
from rlhfuse.models.layers.decode_layer_cpu import multiply_to_rows
from rlhfuse.models.layers.norm import normalize_backward
from rlhfuse.models.layers.rotation import RotaryTables
from rlhfuse.models.stack.cpu_ops import CpuOps
from rlhfuse.models.stack.torch_ops import HeadShape

# The last kernels that each part compiles; about as many seconds each.
PARTS = {"training": (normalize_backward,), "layers": (multiply_to_rows,), "draws": (draw_rows, propose)}


def compile_kernels(dtype: torch.dtype = torch.float32, parts: Sequence[str] = tuple(PARTS)) -> None:
    """Run every kernel of these parts on a few numbers, so that it exists for this dtype afterwards."""
    if "training" in parts:  # what a layer consists of, forward and backward
        spec, cpu = _tiny_spec(), torch.device("cpu")
        ops = CpuOps(RotaryTables(spec, cpu), HeadShape.of(spec, 1), spec.norm_eps, cpu)
        batch, row, weight = ops.batch(SequenceBorders.of([1], cpu)), torch.ones(1, 8), torch.ones(8)
        ops.norm_backward(row, row, weight, ops.norm(row, None, None, weight)[2], row)
        q, k, v, _ = ops.split(torch.ones(1, 16), None, batch)
        ops.attend_backward(row, q, k, v, *ops.attend(q, k, v, batch), batch)
        ops.swiglu_backward(torch.ones(1, 2), torch.ones(1, 1), None)
    if "layers" in parts:  # the first part of a prompt, which draws nothing
        engine = _tiny_engine(dtype, max_batched_tokens=2, draft_rows=0)
        engine.add(0, [1, 2, 3], SamplingParams(max_tokens=2))
        engine.step()
    if "draws" in parts:  # of any logits, and guesses
        engine = _tiny_engine(dtype)
        forward: Any = engine.forward
        forward.forward = lambda batch, cache: torch.zeros(len(batch.draw_rows), engine.spec.vocab)
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, top_k=2, top_p=0.9, ignore_eos=True))


def _tiny_spec() -> ModelSpec:
    sizes: dict[str, Any] = dict(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, mlp=8, vocab=16, context=16)
    return ModelSpec(architecture="llama", **sizes, eos_token_ids=(), tied_embeddings=True)


def _tiny_engine(dtype: torch.dtype, **options: Any) -> Engine:
    spec = _tiny_spec()
    shapes = {"embedding.word_embeddings.weight": (16, 8), "decoder.final_layernorm.weight": (8,)}
    shapes |= {f"decoder.layers.0.{weight.name}": weight.shape(1) for weight in layer_weights(spec)}
    weights = {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}
    return Engine(spec, weights, EngineOptions(num_blocks=4, block_tokens=8, **options), dtype=dtype)


def kernel_groups(dtype: torch.dtype = torch.float32) -> list[KernelGroup]:
    """The parts, each for a process of its own."""
    name = str(dtype).removeprefix("torch.")
    return [KernelGroup(last, "rlhfuse.gen.compile_kernels", (name, part)) for part, last in PARTS.items()]


if __name__ == "__main__":
    tell_what_is_compiled()
    compile_kernels(getattr(torch, sys.argv[1]), sys.argv[2:])
