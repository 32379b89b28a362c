"""Bradley-Terry training of a reward model on preference pairs.

    P(chosen is preferred) = sigmoid(r(chosen) - r(rejected)),      loss = -log of it

A small penalty on (r_chosen + r_rejected)^2 puts the zero of r at the middle of the pairs; after training the head may
be rescaled to scores with a standard deviation of one. A text is scored at its end-of-text token.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import read_lines
from rlhfuse.base.json_values import json_value

NO_SCALE = "give no unit of scale: raise --eval-fraction, give other pairs, or use --keep-scale"
FIELDS = ("prompt", "chosen", "rejected")
Report = Callable[[str], None]


class TokenPair(NamedTuple):
    """Prompt and response as one list of token ids, end of text included, of both responses."""

    chosen: list[int]
    rejected: list[int]


@dataclass(frozen=True)
class RewardSettings:
    """`batch_pairs` pairs make one optimizer step; `eval_fraction` of the pairs is held out."""

    epochs: int = 2
    lr: float = 5e-4
    batch_pairs: int = 32
    eval_fraction: float = 0.1
    center_coef: float = 0.01
    unit_scale: bool = True  # rescale the head to a standard deviation of one over the held-out texts
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_pairs"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.lr > 0:
            raise InputError(f"lr={self.lr} must be above 0")
        if not 0 < self.eval_fraction < 1:
            raise InputError(f"eval_fraction={self.eval_fraction} must lie between 0 and 1, both excluded")
        if self.center_coef < 0:
            raise InputError(f"center_coef={self.center_coef} must not be negative")


@dataclass(frozen=True)
class RewardResult:
    """What training reached: accuracy is the share of held-out pairs in the right order."""

    train_pairs: int
    eval_pairs: int
    accuracy: float
    score_mean: float  # over the held-out texts, after rescaling
    score_std: float

    def __str__(self) -> str:
        return (
            f"held-out accuracy {self.accuracy:.4f} on {self.eval_pairs} pairs ({self.train_pairs} trained on), "
            f"score mean {self.score_mean:+.3f} std {self.score_std:.3f}"
        )


def read_pairs(path: str | Path) -> list[dict[str, str]]:
    """Read a jsonl file of objects with FIELDS, but for blank lines. Raises InputError naming file, line and field."""
    lines = read_lines(path, "give a jsonl file of prompt, chosen, rejected")
    pairs = [_parse_pair(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if len(pairs) < 2:
        raise InputError(f"pairs file {path} holds {len(pairs)} pairs; at least 2 are needed, one of them held out")
    return pairs


def _parse_pair(line: str, where: str) -> dict[str, str]:
    raw = json_value(line, where, own=False)
    if not isinstance(raw, dict):
        raise InputError(f"{where}: a JSON object with {', '.join(FIELDS)} is needed, not {raw!r:.60}")
    for name in FIELDS:
        if name not in raw:
            raise InputError(f"{where}: field {name!r} is missing; each line needs {', '.join(FIELDS)}")
        if not isinstance(raw[name], str):
            raise InputError(f"{where}: field {name!r} is {raw[name]!r:.60}; text is needed")
    return {name: raw[name] for name in FIELDS}


def encode_pairs(
    pairs: Sequence[dict[str, str]], encode: Callable[[str], list[int]], eos_token_id: int, context: int
) -> list[TokenPair]:
    """Token ids of prompt + response + end of text. Raises InputError for a pair longer than `context`."""
    encoded = []
    for number, pair in enumerate(pairs, 1):
        sides = TokenPair(*(encode(pair["prompt"] + pair[side]) + [eos_token_id] for side in ("chosen", "rejected")))
        longest = max(map(len, sides))
        if longest > context:
            raise InputError(f"pair {number} has {longest} tokens, the model's context is {context}; shorten it")
        encoded.append(sides)
    return encoded


def score_texts(model: torch.nn.Module, texts: Sequence[list[int]], pad_token_id: int) -> Tensor:
    """Scores [len(texts)] of texts padded to one batch."""
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [pad_token_id] * (longest - len(text)) for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    mask = (torch.arange(longest)[None, :] < lengths[:, None]).long()
    return model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, 0]


def preference_loss(chosen: Tensor, rejected: Tensor, center_coef: float) -> Tensor:
    """Bradley-Terry loss plus the centring penalty, means over the pairs. Both inputs are scores [pairs]."""
    centring = center_coef * (chosen + rejected).square().mean()
    return -logsigmoid(chosen - rejected).mean() + centring


def train_reward(
    model: torch.nn.Module, pairs: Sequence[TokenPair], pad_token_id: int, settings: RewardSettings, report: Report
) -> RewardResult:
    """Train a scalar-headed model in place, hold pairs out of it and measure on those.

    Raises InputError, for pairs before training, where the held-out texts score alike: then there is no scale.
    """
    rng = random.Random(settings.seed)
    shuffled = rng.sample(list(pairs), len(pairs))
    held = min(len(pairs) - 1, max(1, round(settings.eval_fraction * len(pairs))))
    held_out, training = shuffled[:held], shuffled[held:]
    if settings.unit_scale and len({tuple(side) for pair in held_out for side in pair}) == 1:
        raise InputError(f"the texts of the held-out pairs ({held}) are all the same, so their scores {NO_SCALE}")

    def loss_of(batch: list[TokenPair]) -> Tensor:
        return preference_loss(*_score_batch(model, batch, pad_token_id), settings.center_coef)

    steps = settings.epochs * -(-len(training) // settings.batch_pairs)
    batches = pair_batches(training, settings.batch_pairs, rng)
    fit(model, batches, loss_of, FitSettings(steps, settings.lr, min(20, steps)), report)
    if settings.unit_scale:  # scores are linear in the head's weight, which has no bias
        deviation = float(torch.cat(score_pairs(model, held_out, pad_token_id)).std())
        if not deviation:
            raise InputError(f"the scores of all {2 * held} held-out texts are equal after training and {NO_SCALE}")
        with torch.no_grad():
            model.get_parameter("score.weight").mul_(1.0 / deviation)
    chosen, rejected = score_pairs(model, held_out, pad_token_id)
    scores = torch.cat([chosen, rejected])
    accuracy = (chosen > rejected).float().mean()
    return RewardResult(len(training), len(held_out), float(accuracy), float(scores.mean()), float(scores.std()))


def pair_batches(pairs: Sequence[TokenPair], batch_pairs: int, rng: random.Random) -> Iterator[list[TokenPair]]:
    """Endless batches; within a run of eight batches pairs of like length meet, to save padding."""
    while True:
        order = rng.sample(list(pairs), len(pairs))
        batches = []
        for start in range(0, len(order), 8 * batch_pairs):
            near = sorted(order[start : start + 8 * batch_pairs], key=lambda pair: max(map(len, pair)))
            batches += [near[i : i + batch_pairs] for i in range(0, len(near), batch_pairs)]
        rng.shuffle(batches)
        yield from batches


def score_pairs(
    model: torch.nn.Module, pairs: Sequence[TokenPair], pad_token_id: int, batch_pairs: int = 32
) -> tuple[Tensor, Tensor]:
    """Scores of the chosen and the rejected texts, each [pairs], without gradients."""
    batches = [pairs[start : start + batch_pairs] for start in range(0, len(pairs), batch_pairs)]
    with torch.no_grad():
        scores = [_score_batch(model, batch, pad_token_id) for batch in batches]
    chosen, rejected = (torch.cat(side).float() for side in zip(*scores))
    return chosen, rejected


def _score_batch(model: torch.nn.Module, batch: Sequence[TokenPair], pad_token_id: int) -> tuple[Tensor, Tensor]:
    texts = [pair.chosen for pair in batch] + [pair.rejected for pair in batch]
    chosen, rejected = score_texts(model, texts, pad_token_id).chunk(2)
    return chosen, rejected


@dataclass(frozen=True)
class FitSettings:
    """How long and how fast: `steps` optimizer steps, `lr` the peak learning rate."""

    steps: int
    lr: float
    warmup_steps: int = 20
    report_every: int = 50

    def learning_rate(self, step: int) -> float:
        """Rate of step 0, 1, ...: rises linearly, then falls to 5% of the peak along a half cosine."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def fit(
    model: torch.nn.Module,
    batches: Iterable[Any],
    loss_of: Callable[[Any], Tensor],
    settings: FitSettings,
    report: Report,
) -> float:
    """Train a small model in place on the first `settings.steps` batches; returns the mean loss of the last tenth."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]  # norms: decay would pull them off their scale
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))
    losses: list[float] = []
    started = time.perf_counter()
    model.train()
    for step, batch in zip(range(settings.steps), batches):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate(step)
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % settings.report_every == 0 or step + 1 == settings.steps:
            recent = losses[-settings.report_every :]
            elapsed = time.perf_counter() - started
            report(f"  step {step + 1}/{settings.steps}  loss {sum(recent) / len(recent):.4f}  {elapsed:.0f} s")
    model.eval()
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)
