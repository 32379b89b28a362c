"""Bradley-Terry training of a reward model on preference pairs.

    P(chosen is preferred) = sigmoid(r(chosen) - r(rejected)),      loss = -log of it

A small penalty on (r_chosen + r_rejected)^2 puts the zero of r at the middle of the pairs; after training the head is
rescaled to scores with a standard deviation of one. A text is scored at its end-of-text token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from pretraining import FitSettings, fit, say
from torch import Tensor
from torch.nn.functional import logsigmoid

EPOCHS, LR, BATCH_PAIRS = 2, 5e-4, 32  # BATCH_PAIRS pairs make one optimizer step
EVAL_FRACTION = 0.1  # of the pairs, held out
CENTER_COEF = 0.01


class TokenPair(NamedTuple):
    """Prompt and response as one list of token ids, end of text included, of both responses."""

    chosen: list[int]
    rejected: list[int]


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


def encode_pairs(
    pairs: Sequence[dict[str, str]], encode: Callable[[str], list[int]], eos_token_id: int
) -> list[TokenPair]:
    """Token ids of prompt + response + end of text."""
    return [
        TokenPair(*(encode(pair["prompt"] + pair[side]) + [eos_token_id] for side in ("chosen", "rejected")))
        for pair in pairs
    ]


def score_texts(model: torch.nn.Module, texts: Sequence[list[int]], pad_token_id: int) -> Tensor:
    """Scores [len(texts)] of texts padded to one batch."""
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [pad_token_id] * (longest - len(text)) for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    mask = (torch.arange(longest)[None, :] < lengths[:, None]).long()
    return model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, 0]


def preference_loss(chosen: Tensor, rejected: Tensor, center_coef: float = CENTER_COEF) -> Tensor:
    """Bradley-Terry loss plus the centring penalty, means over the pairs. Both inputs are scores [pairs]."""
    centring = center_coef * (chosen + rejected).square().mean()
    return -logsigmoid(chosen - rejected).mean() + centring


def train_reward(
    model: torch.nn.Module, pairs: Sequence[TokenPair], pad_token_id: int, seed: int, epochs: int = EPOCHS
) -> RewardResult:
    """Train a scalar-headed model in place, hold pairs out of it and measure on those."""
    rng = random.Random(seed)
    shuffled = rng.sample(list(pairs), len(pairs))
    held = max(1, round(EVAL_FRACTION * len(pairs)))
    held_out, training = shuffled[:held], shuffled[held:]

    def loss_of(batch: list[TokenPair]) -> Tensor:
        return preference_loss(*_score_batch(model, batch, pad_token_id))

    steps = epochs * -(-len(training) // BATCH_PAIRS)
    fit(model, pair_batches(training, BATCH_PAIRS, rng), loss_of, FitSettings(steps, LR, min(20, steps)), say)
    deviation = float(torch.cat(score_pairs(model, held_out, pad_token_id)).std())
    with torch.no_grad():  # scores are linear in the head's weight, which has no bias
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
