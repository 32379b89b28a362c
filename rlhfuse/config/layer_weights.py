"""Weights of a layer: Megatron-core's names, what of a checkpoint each is made of, how tensor ranks cut it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhfuse.config.spec import ModelSpec


@dataclass(frozen=True)
class LayerWeight:
    """A weight of a layer by Megatron-core's name, and the checkpoint's tensors that it is made of, along dimension 0.

    `grouped`: of each KV group the rows of every part lie side by side; else one part follows another.
    """

    name: str
    parts: Mapping[str, tuple[int, ...]]  # name in the checkpoint's layer -> shape
    cut: int | None = None  # dimension that tensor ranks cut; None: each has all of it
    grouped: bool = False

    def shape(self, tp: int) -> tuple[int, ...]:
        """What each of `tp` tensor ranks holds."""
        shapes = list(self.parts.values())
        whole = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
        if self.cut is not None:
            whole[self.cut] //= tp
        return tuple(whole)


def layer_weights(spec: ModelSpec) -> list[LayerWeight]:
    """All of a layer."""
    hidden, q, kv = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    qkv = {f"self_attn.{n}_proj": rows for n, rows in (("q", q), ("k", kv), ("v", kv))}
    fused, fc1 = {f"{name}.weight": (rows, hidden) for name, rows in qkv.items()}, ("gate", "up")
    weights = [
        LayerWeight("input_layernorm.weight", {"input_layernorm.weight": (hidden,)}),
        LayerWeight("self_attention.linear_qkv.weight", fused, 0, grouped=True),
    ]
    if spec.qkv_bias:
        biases = {f"{name}.bias": (rows,) for name, rows in qkv.items()}
        weights.append(LayerWeight("self_attention.linear_qkv.bias", biases, 0, grouped=True))
    for n in "qk" if spec.qk_norm else "":
        norm = {f"self_attn.{n}_norm.weight": (spec.head_dim,)}
        weights.append(LayerWeight(f"self_attention.{n}_layernorm.weight", norm))
    weights.append(LayerWeight("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": (hidden, q)}, 1))
    if spec.proj_bias:
        weights.append(LayerWeight("self_attention.linear_proj.bias", {"self_attn.o_proj.bias": (hidden,)}))
    return [
        *weights,
        LayerWeight("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": (hidden,)}),
        LayerWeight("mlp.linear_fc1.weight", {f"mlp.{n}_proj.weight": (spec.mlp, hidden) for n in fc1}, 0),
        LayerWeight("mlp.linear_fc2.weight", {"mlp.down_proj.weight": (hidden, spec.mlp)}, 1),
    ]
