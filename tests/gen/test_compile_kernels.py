"""After compile_kernels a step compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
import torch
from numba.core import event
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
from rlhfuse.gen.compile_kernels import compile_kernels
from rlhfuse.models.attention import SequenceBorders, varlen_attention
from testkit.gen_models import random_weights, tiny_spec

compile_kernels(torch.{dtype})
with event.install_recorder("numba:compile") as compiled:
    for spec in (tiny_spec(), tiny_spec(qkv_bias=True, qk_norm=True, tied_embeddings=True)):
        weights = {{name: w.to(torch.{dtype}) for name, w in random_weights(spec).items()}}
        engine = Engine(spec, weights, EngineOptions(num_blocks=50), dtype=torch.{dtype})
        engine.generate([[9, 10], list(range(40))], SamplingParams(max_tokens=4, top_k=5))
        engine.generate([[9, 10]], SamplingParams(max_tokens=4, temperature=0))
    q, k, v = (torch.ones(9, 1, 8, dtype=torch.{dtype}, requires_grad=True) for _ in range(3))
    bounds = SequenceBorders.of([4, 5], torch.device("cpu"))
    varlen_attention(q, k, v, (torch.ones(5, 4), torch.ones(5, 4)), bounds).sum().backward()
assert not compiled.buffer, [data.data["dispatcher"] for _, data in compiled.buffer]
"""


def check(dtype: str) -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(dtype=dtype)],
        capture_output=True,
        text=True,
        timeout=540,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_nothing_is_left_to_compile():
    check("float32")
    check("bfloat16")
