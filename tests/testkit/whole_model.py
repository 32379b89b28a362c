"""The single-process reference: whole models of transformers, whole mini-batches, in float64.

It shares nothing with the package but its batches: the models by transformers, the two PPO losses from their
definition, clipping by the norm, torch's SGD and AdamW.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhfuse.ppo.rollout import RolloutBatch

CLIP_EPS = 0.2  # of ratios and of values; the package's default


@dataclass(frozen=True)
class Recipe:
    """How a model is updated, the same in the reference and in the distributed run."""

    optimizer: str = "sgd"  # or "adam"
    lr: float = 0.1
    clip_grad: float = 0.5
    weight_decay: float = 0.0
    by_sample: bool = False  # GSPO, and means over samples, every third of which does not count


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


def whole_model(folder: Path, scalar_head: bool) -> torch.nn.Module:
    """The model of `folder` in float64, norms too, which transformers computes in float32."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if scalar_head else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float64)
    for norm in model.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = lambda x, norm=norm: torch.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
    return model


def train_whole(
    folder: Path, batches: Sequence[RolloutBatch], recipe: Recipe, *, scalar_head: bool
) -> list[ReferenceStep]:
    """One step on each of `batches` with the model of `folder`."""
    model = whole_model(folder, scalar_head)
    weights = dict(model.named_parameters())
    optimizer = make_optimizer(list(weights.values()), recipe)
    steps = []
    for batch in batches:
        optimizer.zero_grad()
        losses = sample_losses(model, batch, scalar_head, recipe.by_sample)
        losses.sum().backward()
        norm = float(torch.nn.utils.clip_grad_norm_(weights.values(), recipe.clip_grad))
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


def sample_losses(model: torch.nn.Module, batch: RolloutBatch, scalar_head: bool, by_sample: bool = False) -> Tensor:
    """Each sample's loss divided by the response tokens of the whole batch: [samples].

    `by_sample`: its tokens' mean by all samples instead, and 0 of every third, the first among them.
    """
    borders, tokens = batch.cu_seqlens.tolist(), batch.tokens
    responses = [0, *batch.response_lengths.cumsum(0).tolist()]
    losses = []
    for i, (start, end) in enumerate(zip(borders, borders[1:])):
        row = tokens[start:end]
        prompt = int(batch.prompt_lengths[i])
        mine = slice(responses[i], responses[i + 1])
        x = model.model(row[None]).last_hidden_state[0, prompt - 1 : -1]  # what predicts the response tokens
        if scalar_head:
            values = model.score(x)[:, 0]
            losses.append(value_loss(values, batch.values[mine].double(), batch.returns[mine].double()))
        else:
            logprobs = model.lm_head(x).log_softmax(-1).gather(1, row[prompt:, None])[:, 0]
            old, advantages = batch.old_logprobs[mine].double(), batch.advantages[mine].double()
            losses.append((gspo_loss if by_sample else policy_loss)(logprobs, old, advantages))
        if by_sample:
            losses[-1] = losses[-1] / len(x) if i % 3 else 0 * losses[-1]
    return torch.stack(losses) / (len(batch) if by_sample else batch.response_tokens)


def policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS) * advantages).sum()


def gspo_loss(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """The token form (Zheng et al. 2025, eq. 13), for advantages that differ."""
    ratio = (logprobs - old).mean().exp().detach() * (logprobs - logprobs.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS) * advantages).sum()


def value_loss(values: Tensor, old: Tensor, returns: Tensor) -> Tensor:
    near = old + (values - old).clamp(-CLIP_EPS, CLIP_EPS)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum()
