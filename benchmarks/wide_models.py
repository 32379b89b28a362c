"""A small policy in a larger shape: the same function, at the larger model's cost.

Zeros stand around the small weights. A norm over more features, most of them zero, is made up for in its weight; a
rotary head of more dimensions turns the small ones where their frequencies are; layers that are added write nothing.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHAPES = {  # layers, hidden, mlp, head_dim
    "4.5M": (6, 256, 688, 32),
    "77M": (12, 768, 2048, 64),
}


def widen(small: Path, shape: str, out: Path) -> Path:
    """Write a Llama of a single file in the named shape into the new folder `out`; returns it."""
    layers, hidden, mlp, dim = SHAPES[shape]
    shutil.copytree(small, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((small / "config.json").read_text())
    old_hidden, old_dim = config["hidden_size"], config["head_dim"]
    old_heads, old_groups = config["num_attention_heads"], config["num_key_value_heads"]
    groups = hidden // dim // (old_heads // old_groups)
    heads = groups * (old_heads // old_groups)
    turn = dim // old_dim  # so many frequencies lie between two of the small head's
    rotary = [half * dim // 2 + turn * d for half in range(2) for d in range(old_dim // 2)]

    def head(weight: Tensor, count: int, places: list[int], scale: float = 1.0) -> Tensor:
        """[small heads * dim, hidden] -> [count * dim, hidden]"""
        new = torch.zeros(count, dim, hidden)
        new[: len(weight) // old_dim, places, :old_hidden] = scale * weight.view(-1, old_dim, old_hidden)
        return new.flatten(0, 1)

    def around(weight: Tensor, *sizes: int) -> Tensor:
        new = torch.zeros(sizes)
        new[tuple(slice(size) for size in weight.shape)] = weight
        return new

    def wide(name: str, weight: Tensor) -> Tensor:
        kind = name.split(".")[-2]
        if weight.dim() == 1:
            return around(weight * math.sqrt(old_hidden / hidden), hidden)
        if kind == "q_proj":
            return head(weight, heads, rotary, math.sqrt(dim / old_dim))
        if kind in ("k_proj", "v_proj"):
            return head(weight, groups, rotary if kind == "k_proj" else list(range(old_dim)))
        if kind == "o_proj":
            return head(weight.t(), heads, list(range(old_dim))).t().contiguous()
        sizes = {"gate_proj": (mlp, hidden), "up_proj": (mlp, hidden), "down_proj": (hidden, mlp)}
        return around(weight, *sizes.get(kind, (len(weight), hidden)))

    weights = {name: wide(name, weight.float()) for name, weight in load_file(small / "model.safetensors").items()}
    for layer in range(config["num_hidden_layers"], layers):
        for name in [name for name in weights if ".layers.0." in name]:
            weights[name.replace(".0.", f".{layer}.", 1)] = torch.zeros_like(weights[name])
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    config |= dict(hidden_size=hidden, num_hidden_layers=layers, intermediate_size=mlp, head_dim=dim)
    config |= dict(num_attention_heads=heads, num_key_value_heads=groups)
    config["rms_norm_eps"] *= old_hidden / hidden
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return out
