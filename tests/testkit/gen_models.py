"""Small random models for the tests of gen/."""

from __future__ import annotations

import torch

from rlhfuse.config.spec import ModelSpec


def tiny_spec(**changes) -> ModelSpec:
    facts = dict(
        architecture="llama",
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mlp=172,
        vocab=301,
        context=256,
        eos_token_ids=(7,),
    )
    return ModelSpec(**(facts | changes))


def random_weights(spec: ModelSpec, seed: int = 0, tp_rank: int = 0, tp_size: int = 1) -> dict[str, torch.Tensor]:
    """Weights of rank `tp_rank`; the shares of all ranks are cuts of the same whole."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def part(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x.chunk(tp_size, dim)[tp_rank].clone()

    rows = -(-spec.vocab // 8) * 8
    weights = {"embedding.word_embeddings.weight": part(draw(rows, spec.hidden, scale=1.0))}
    qkv = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    for layer in range(spec.layers):
        p = f"decoder.layers.{layer}."
        gate, up = draw(spec.mlp, spec.hidden), draw(spec.mlp, spec.hidden)
        weights |= {
            p + "input_layernorm.weight": 1 + draw(spec.hidden),
            p + "self_attention.linear_qkv.weight": part(draw(qkv, spec.hidden)),
            p + "self_attention.linear_proj.weight": part(draw(spec.hidden, spec.heads * spec.head_dim), 1),
            p + "pre_mlp_layernorm.weight": 1 + draw(spec.hidden),
            p + "mlp.linear_fc1.weight": torch.cat((part(gate), part(up))),
            p + "mlp.linear_fc2.weight": part(draw(spec.hidden, spec.mlp), 1),
        }
        if spec.qkv_bias:
            weights[p + "self_attention.linear_qkv.bias"] = part(draw(qkv))
        if spec.proj_bias:
            weights[p + "self_attention.linear_proj.bias"] = draw(spec.hidden)
        if spec.qk_norm:
            weights[p + "self_attention.q_layernorm.weight"] = 1 + draw(spec.head_dim)
            weights[p + "self_attention.k_layernorm.weight"] = 1 + draw(spec.head_dim)
    weights["decoder.final_layernorm.weight"] = 1 + draw(spec.hidden)
    if not spec.tied_embeddings:
        weights["output_layer.weight"] = part(draw(rows, spec.hidden))
    return weights
