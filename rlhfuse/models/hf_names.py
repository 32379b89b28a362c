"""Names and shapes of the tensors of a Hugging Face checkpoint, and which of them hold several weights in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rlhfuse.config.spec import ModelSpec

SCALAR_HEAD, LM_HEAD = "score.weight", "lm_head.weight"
JOINED = {  # by architecture: names in a layer of tensors that hold several, one after another
    "phi3": {
        "self_attn.qkv_proj.weight": [f"self_attn.{n}_proj.weight" for n in "qkv"],
        "mlp.gate_up_proj.weight": [f"mlp.{n}_proj.weight" for n in ("gate", "up")],
    }
}
T = TypeVar("T")  # of a tensor: its values or its shape


def expected_tensors(spec: ModelSpec, scalar_head: bool) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor that a model of this shape must have."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab, spec.hidden)}
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}."
        shapes |= joined(
            spec, prefix, layer_shapes(spec, prefix), lambda parts: (sum(r for r, _ in parts), spec.hidden)
        )
    shapes["model.norm.weight"] = (spec.hidden,)
    if scalar_head:
        shapes[SCALAR_HEAD] = (1, spec.hidden)
    elif not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    return shapes


def layer_shapes(spec: ModelSpec, p: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's weights, each by itself, under names that begin with `p`."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        p + "input_layernorm.weight": (spec.hidden,),
        p + "self_attn.q_proj.weight": (q, spec.hidden),
        p + "self_attn.k_proj.weight": (kv, spec.hidden),
        p + "self_attn.v_proj.weight": (kv, spec.hidden),
        p + "self_attn.o_proj.weight": (spec.hidden, q),
        p + "post_attention_layernorm.weight": (spec.hidden,),
        p + "mlp.gate_proj.weight": (spec.mlp, spec.hidden),
        p + "mlp.up_proj.weight": (spec.mlp, spec.hidden),
        p + "mlp.down_proj.weight": (spec.hidden, spec.mlp),
    }
    if spec.qkv_bias:
        shapes |= {p + f"self_attn.{n}_proj.bias": (s,) for n, s in (("q", q), ("k", kv), ("v", kv))}
    if spec.proj_bias:
        shapes[p + "self_attn.o_proj.bias"] = (spec.hidden,)
    if spec.qk_norm:
        shapes |= {p + f"self_attn.{n}_norm.weight": (spec.head_dim,) for n in "qk"}
    return shapes


def joined(spec: ModelSpec, prefix: str, layer: dict[str, T], join: Callable[[list[T]], T]) -> dict[str, T]:
    """A layer's tensors as the architecture stores them: `join` makes one of several."""
    for name, parts in JOINED.get(spec.architecture, {}).items():
        layer[prefix + name] = join([layer.pop(prefix + part) for part in parts])
    return layer
