"""After compile_kernels a step compiles nothing."""

from __future__ import annotations

import pytest

CODE = """
import sys
import torch
from numba.core import event
from rlhfuse.gen.engine import SamplingParams
from rlhfuse.gen.compile_kernels import compile_kernels
from rlhfuse.models.attention import SequenceBorders, varlen_attention
from testkit.gen_models import engine_of, tiny_spec

compile_kernels(torch.{dtype})
with event.install_recorder("numba:compile") as compiled:
    for spec in (tiny_spec(), tiny_spec(qkv_bias=True, qk_norm=True, tied_embeddings=True)):
        engine = engine_of(spec, dtype=torch.{dtype})
        engine.generate([[9, 10], list(range(40))], SamplingParams(max_tokens=4, top_k=5))
        engine.generate([[9, 10]], SamplingParams(max_tokens=4, temperature=0))
    q, k, v = (torch.ones(9, 1, 8, dtype=torch.{dtype}, requires_grad=True) for _ in range(3))
    bounds = SequenceBorders.of([4, 5], torch.device("cpu"))
    varlen_attention(q, k, v, (torch.ones(5, 4), torch.ones(5, 4)), bounds).sum().backward()
assert not compiled.buffer, [data.data["dispatcher"] for _, data in compiled.buffer]
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_left_to_compile(programs, dtype):
    """In a process of its own, which has compiled nothing before."""
    done = programs.python("-c", CODE.format(dtype=dtype))
    assert done.returncode == 0, done.stderr[-2000:]
