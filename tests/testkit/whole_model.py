"""The single-process reference: whole models in plain torch, whole mini-batches, in float64.

Written from the definition of the models and losses and sharing nothing with the package but its file reader's
shapes (`ModelSpec`) and its batches: a Llama-like forward over named tensors, the two PPO losses, clipping by the
norm, torch's SGD and AdamW. Angles of the rotary embedding are float32 numbers in every dtype, because that is how
models define them.

Letters: T tokens, H heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from rlhfuse.config.spec import ModelSpec
from rlhfuse.ppo.rollout import RolloutBatch

CLIP_EPS = 0.2  # of ratios and of values; the package's default


@dataclass(frozen=True)
class Recipe:
    """How a model is updated, the same in the reference and in the distributed run."""

    optimizer: str = "sgd"  # or "adam"
    lr: float = 0.1
    clip_grad: float = 0.5
    weight_decay: float = 0.0


ADAM = Recipe("adam", 1e-3, 0.5, 0.1)
SGD = Recipe()
BETAS, EPS = (0.9, 0.95), 1e-8


@dataclass(frozen=True)
class ReferenceStep:
    """One optimizer step. `losses[i]` is sample i's part of the mini-batch's loss; gradients are after clipping."""

    losses: Tensor  # [samples]
    norm: float  # before clipping
    gradients: dict[str, Tensor]  # Hugging Face names
    weights: dict[str, Tensor]  # after the step


def train_whole(
    folder: Path, batches: Sequence[RolloutBatch], recipe: Recipe, *, scalar_head: bool
) -> list[ReferenceStep]:
    """One step on each of `batches` with the model of `folder`."""
    spec = ModelSpec.from_config(folder)
    stored = load_file(folder / "model.safetensors")
    weights = {name: tensor.double().requires_grad_() for name, tensor in stored.items()}
    optimizer = make_optimizer(list(weights.values()), recipe)
    steps = []
    for batch in batches:
        optimizer.zero_grad()
        losses = sample_losses(weights, spec, batch, scalar_head)
        losses.sum().backward()
        norm = float(torch.stack([w.grad.double().pow(2).sum() for w in weights.values()]).sum().sqrt())
        scale = min(1.0, recipe.clip_grad / (norm + 1e-6))
        for weight in weights.values():
            weight.grad.mul_(scale)
        gradients = {name: weight.grad.clone() for name, weight in weights.items()}
        optimizer.step()
        after = {name: weight.detach().clone() for name, weight in weights.items()}
        steps.append(ReferenceStep(losses.detach(), norm, gradients, after))
    return steps


def make_optimizer(weights: list[Tensor], recipe: Recipe) -> torch.optim.Optimizer:
    """torch's own; vectors (norms, biases) do not decay."""
    decays = {True: recipe.weight_decay, False: 0.0}
    groups = [{"params": [w for w in weights if (w.ndim > 1) == wide], "weight_decay": decays[wide]} for wide in decays]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=BETAS, eps=EPS)


def sample_losses(weights: dict[str, Tensor], spec: ModelSpec, batch: RolloutBatch, scalar_head: bool) -> Tensor:
    """Each sample's loss divided by the response tokens of the whole batch: [samples]."""
    borders, tokens = batch.cu_seqlens.tolist(), batch.tokens
    responses = [0, *batch.response_lengths.cumsum(0).tolist()]
    losses = []
    for i, (start, end) in enumerate(zip(borders, borders[1:])):
        row = tokens[start:end]
        prompt = int(batch.prompt_lengths[i])
        mine = slice(responses[i], responses[i + 1])
        x = hidden_states(weights, spec, row)[prompt - 1 : -1]  # what predicts the response tokens
        if scalar_head:
            values = (x @ weights["score.weight"].T)[:, 0]
            losses.append(value_loss(values, batch.values[mine].double(), batch.returns[mine].double()))
        else:
            head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
            logprobs = (x @ head.T).log_softmax(-1).gather(1, row[prompt:, None])[:, 0]
            old, advantages = batch.old_logprobs[mine].double(), batch.advantages[mine].double()
            losses.append(policy_loss(logprobs, old, advantages))
    return torch.stack(losses) / batch.response_tokens


def policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS) * advantages).sum()


def value_loss(values: Tensor, old: Tensor, returns: Tensor) -> Tensor:
    near = old + (values - old).clamp(-CLIP_EPS, CLIP_EPS)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum()


def hidden_states(weights: dict[str, Tensor], spec: ModelSpec, tokens: Tensor) -> Tensor:
    """Final hidden states [T, hidden] of one sequence."""
    x = weights["model.embed_tokens.weight"][tokens]
    cos, sin = rotary_table(spec, len(tokens))
    for layer in range(spec.layers):
        w = {name: weights[f"model.layers.{layer}.{name}.weight"] for name in LAYER}
        y = rms_norm(x, w["input_layernorm"], spec.norm_eps)
        q, k, v = ((y @ w[f"self_attn.{n}_proj"].T).view(len(tokens), -1, spec.head_dim).transpose(0, 1) for n in "qkv")
        if spec.qk_norm:
            own = (weights[f"model.layers.{layer}.self_attn.{n}_norm.weight"] for n in "qk")
            q, k = (rms_norm(x, weight, spec.norm_eps) for x, weight in zip((q, k), own))
        out = attention(rotate(q, cos, sin), rotate(k, cos, sin), v).transpose(0, 1).flatten(1)
        x = x + out @ w["self_attn.o_proj"].T
        y = rms_norm(x, w["post_attention_layernorm"], spec.norm_eps)
        x = x + (F.silu(y @ w["mlp.gate_proj"].T) * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    return rms_norm(x, weights["model.norm.weight"], spec.norm_eps)


LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal; q [H, T, D], k and v [G, T, D]; every key/value head serves H / G heads."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotary_table(spec: ModelSpec, tokens: int) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D] of the float32 angles."""
    frequencies = 1.0 / spec.rope_theta ** (torch.arange(0, spec.head_dim, 2).float() / spec.head_dim)
    angles = torch.outer(torch.arange(tokens).float(), frequencies).repeat(1, 2).double()
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[heads, T, D]; the second half of the head dimension is the first one's partner."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
