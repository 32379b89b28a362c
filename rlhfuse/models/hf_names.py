"""Names and shapes of the tensors of a Hugging Face checkpoint, and which of them hold several weights in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rlhfuse.config.layer_weights import layer_weights
from rlhfuse.config.spec import ModelSpec

SCALAR_HEAD, LM_HEAD, EMBEDDING = "score.weight", "lm_head.weight", "model.embed_tokens.weight"
JOINED = {  # by architecture: names in a layer of tensors that hold several, one after another
    "phi3": {
        "self_attn.qkv_proj.weight": [f"self_attn.{n}_proj.weight" for n in "qkv"],
        "mlp.gate_up_proj.weight": [f"mlp.{n}_proj.weight" for n in ("gate", "up")],
    }
}
T = TypeVar("T")  # of a tensor: its values or its shape


def layer_shapes(spec: ModelSpec, prefix: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's weights, each by itself, under names that begin with `prefix`."""
    return {prefix + name: shape for weight in layer_weights(spec) for name, shape in weight.parts.items()}


def expected_tensors(spec: ModelSpec, scalar_head: bool) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor that a model of this shape must have."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab, spec.hidden)}
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        shapes |= joined(
            spec, prefix, layer_shapes(spec, prefix), lambda parts: (sum(r for r, _ in parts), spec.hidden)
        )
    shapes["model.norm.weight"] = (spec.hidden,)
    if scalar_head:
        shapes[SCALAR_HEAD] = (1, spec.hidden)
    elif not spec.tied_embeddings:
        shapes[LM_HEAD] = (spec.vocab, spec.hidden)
    return shapes


def joined(spec: ModelSpec, prefix: str, layer: dict[str, T], join: Callable[[list[T]], T]) -> dict[str, T]:
    """A layer's tensors as the architecture stores them: `join` makes one of several."""
    for name, parts in JOINED.get(spec.architecture, {}).items():
        layer[prefix + name] = join([layer.pop(prefix + part) for part in parts])
    return layer
