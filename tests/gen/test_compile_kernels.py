"""After compile_kernels a step compiles nothing, and no step compiles a Triton kernel for where its integers lie or how
many rows it has."""

from collections import defaultdict

import pytest
from testkit.triton_compile import compiled_variants

CODE = """
import sys
import torch
from numba.core import event
from rlhfuse.gen.engine import SamplingParams
from rlhfuse.gen.compile_kernels import compile_kernels
from rlhfuse.models.attention.packed.sequences import SequenceBorders
from testkit.flat import attention
from testkit.gen_models import engine_of, tiny_spec

compile_kernels(torch.{dtype})
with event.install_recorder("numba:compile") as compiled:
    for spec in (tiny_spec(), tiny_spec(qkv_bias=True, qk_norm=True, tied_embeddings=True)):
        engine = engine_of(spec, dtype=torch.{dtype})
        engine.generate([[9, 10], list(range(40))], SamplingParams(max_tokens=4, top_k=5))
        engine.generate([[9, 10]], SamplingParams(max_tokens=4, temperature=0))
    q, k, v = (torch.ones(9, 1, 8, dtype=torch.{dtype}, requires_grad=True) for _ in range(3))
    bounds = SequenceBorders.of([4, 5], torch.device("cpu"))
    attention(q, k, v, (torch.ones(5, 4), torch.ones(5, 4)), bounds).sum().backward()
assert not compiled.buffer, [data.data["dispatcher"] for _, data in compiled.buffer]
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_left_to_compile(programs, dtype):
    """In a process of its own, which has compiled nothing before."""
    done = programs.python("-c", CODE.format(dtype=dtype))
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_engine_of_a_folder_is_warm(programs):
    """Its first request finds every kernel loaded, and a cache and guesses that know nothing."""
    code = """
from rlhfuse.gen.cpu.sampling import draw_rows
from rlhfuse.gen.engine import Engine, SamplingParams
from rlhfuse.gen.speculation.ngrams import count, propose
from rlhfuse.models.layers.decode_layer_cpu import multiply_to_rows

engine = Engine.from_pretrained("examples/tiny/actor")
assert all(kernel.signatures for kernel in (multiply_to_rows, draw_rows, count, propose))
engine.add(0, [0] * 40, SamplingParams(max_tokens=1))
engine.step()
assert engine.last_step.reused_tokens == 0 and not engine.loop.guesser._used.any()
"""
    done = programs.python("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]


def launch_all() -> None:
    """Mixed steps and decode steps of 5, 4, 2 and 1 rows: nothing runs, so each sample is as long as it may be."""
    import torch
    from testkit.gen_models import engine_of, tiny_spec

    from rlhfuse.gen.engine import SamplingParams
    from rlhfuse.gen.gpu import sampling
    from rlhfuse.gen.gpu.draws import DrawKernels
    from rlhfuse.models.attention.paged.cache import CacheShape
    from rlhfuse.models.attention.paged.triton import TritonAttention

    spec = tiny_spec(qk_norm=True)
    engine = engine_of(spec, kernels="triton", attention="torch", max_sequences=5, max_batched_tokens=30)
    shape = CacheShape(torch.float32, engine.device, spec.heads, spec.kv_heads, spec.head_dim, 16, 5)
    forward = engine.forward  # whose kernels are those of CUDA
    forward._attention = TritonAttention(shape)

    def feed(tokens: torch.Tensor, newest: torch.Tensor) -> None:
        sampling.feed(tokens, newest)
        tokens.clamp_(min=0)  # nothing has been fed

    forward._kernels = DrawKernels(feed, sampling.draw)
    lengths = range(2, 9)
    params = [SamplingParams(max_tokens=3 * n, top_p=0.9, ignore_eos=True) for n in lengths]
    engine.generate([list(range(1, 4 * n)) for n in lengths], params)


def test_one_variant_of_a_kernel_serves_all_steps(programs):
    found = defaultdict(set)
    for kernel, constants, rest in compiled_variants(programs, __file__):
        found[kernel, constants].add(rest)
    names = {kernel for kernel, _ in found}
    assert names >= {"_decode_kernel", "_chunk_kernel", "place_heads_kernel", "_cutoffs", "_scores", "_merge", "_feed"}
    assert not {key: rests for key, rests in found.items() if len(rests) > 1}
