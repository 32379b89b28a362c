"""The settings of the RLHFuse paper, and shapes of the Llamas that papers train, where they print them, or of the model
that they name."""

from __future__ import annotations

from rlhfuse.config.spec import ModelSpec

PAIRS = (("13B", "33B"), ("33B", "13B"), ("33B", "65B"), ("65B", "33B"))  # actor, critic
MAX_LENGTHS = (512, 1024, 2048)
RANGES = {"gen_infer": (1.2, 1.6), "training": (1.2, 1.3), "iteration": (1.2, 1.4)}  # 7.1, 7.2: over Base
MINIBATCHES, GPUS, MAX_PROMPT, ELEMENT_BYTES = 8, 256, 1024, 2
CONTEXT = 8192
SHAPES = {  # layers, hidden, heads, KV heads, MLP
    "7B": (32, 4096, 32, 32, 11008),
    "Llama 3 8B": (32, 4096, 32, 8, 14336),
    "13B": (40, 5120, 40, 40, 13824),
    "33B": (60, 6656, 52, 52, 17920),
    "34B": (48, 8192, 64, 8, 22016),
    "65B": (80, 8192, 64, 64, 22016),
    "70B": (80, 8192, 64, 8, 28672),
}


def llama(name: str, vocab: int = 32000) -> ModelSpec:
    """The model of a row of SHAPES."""
    layers, hidden, heads, kv_heads, mlp = SHAPES[name]
    return ModelSpec("llama", layers, hidden, heads, kv_heads, hidden // heads, mlp, vocab, CONTEXT)
