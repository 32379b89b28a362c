"""Shapes of the Llamas that papers train, where they print them, or of the model that they name."""

from __future__ import annotations

from rlhfuse.config.spec import ModelSpec

CONTEXT = 8192
SHAPES = {  # layers, hidden, heads, KV heads, MLP
    "350M": (16, 512, 8, 8, 11008),  # this and the deep 33B: PUZZLE, Table 1
    "7B": (32, 4096, 32, 32, 11008),
    "13B": (40, 5120, 40, 40, 13824),
    "33B": (60, 6656, 52, 52, 17920),
    "33B deep": (64, 6656, 52, 52, 17920),
    "34B": (48, 8192, 64, 8, 22016),
    "65B": (80, 8192, 64, 64, 22016),
    "70B": (80, 8192, 64, 8, 28672),
    "Llama 3 8B": (32, 4096, 32, 8, 14336),
}


def llama(name: str, vocab: int = 32000) -> ModelSpec:
    """The model of a row of SHAPES."""
    layers, hidden, heads, kv_heads, mlp = SHAPES[name]
    return ModelSpec("llama", layers, hidden, heads, kv_heads, hidden // heads, mlp, vocab, CONTEXT)
