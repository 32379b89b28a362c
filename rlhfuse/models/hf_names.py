"""Names and shapes of the tensors of a Hugging Face checkpoint, and which of them hold several weights in a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class LayerWeight:
    """A weight of a layer by Megatron-core's name, and the checkpoint's tensors that it is made of, along dimension 0.

    `grouped`: of each KV group the rows of every part lie side by side; else one part follows another.
    """

    name: str
    parts: Mapping[str, tuple[int, ...]]  # name in the checkpoint's layer -> shape
    cut: int | None = None  # dimension that tensor ranks cut; None: each has all of it
    grouped: bool = False


def layer_weights(spec: ModelSpec) -> list[LayerWeight]:
    """All of a layer."""
    hidden, q, kv = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    qkv = {f"self_attn.{n}_proj": rows for n, rows in (("q", q), ("k", kv), ("v", kv))}
    fused, fc1 = {f"{name}.weight": (rows, hidden) for name, rows in qkv.items()}, ("gate", "up")
    weights = [
        LayerWeight("input_layernorm.weight", {"input_layernorm.weight": (hidden,)}),
        LayerWeight("self_attention.linear_qkv.weight", fused, 0, grouped=True),
        LayerWeight("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": (hidden, q)}, 1),
        LayerWeight("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": (hidden,)}),
        LayerWeight("mlp.linear_fc1.weight", {f"mlp.{n}_proj.weight": (spec.mlp, hidden) for n in fc1}, 0),
        LayerWeight("mlp.linear_fc2.weight", {"mlp.down_proj.weight": (hidden, spec.mlp)}, 1),
    ]
    if spec.qkv_bias:
        biases = {f"{name}.bias": (rows,) for name, rows in qkv.items()}
        weights.append(LayerWeight("self_attention.linear_qkv.bias", biases, 0, grouped=True))
    if spec.proj_bias:
        weights.append(LayerWeight("self_attention.linear_proj.bias", {"self_attn.o_proj.bias": (hidden,)}))
    for n in "qk" if spec.qk_norm else "":
        norm = {f"self_attn.{n}_norm.weight": (spec.head_dim,)}
        weights.append(LayerWeight(f"self_attention.{n}_layernorm.weight", norm))
    return weights


def layer_shapes(spec: ModelSpec, prefix: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's weights, each by itself, under names that begin with `prefix`."""
    return {prefix + name: shape for weight in layer_weights(spec) for name, shape in weight.parts.items()}


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
        shapes[LM_HEAD] = (spec.vocab, spec.hidden)
    return shapes


def joined(spec: ModelSpec, prefix: str, layer: dict[str, T], join: Callable[[list[T]], T]) -> dict[str, T]:
    """A layer's tensors as the architecture stores them: `join` makes one of several."""
    for name, parts in JOINED.get(spec.architecture, {}).items():
        layer[prefix + name] = join([layer.pop(prefix + part) for part in parts])
    return layer
