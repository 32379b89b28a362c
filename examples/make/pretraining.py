"""Next-token training of a causal language model on whole texts, packed without padding.

Texts are joined into windows; the position of each token counts from the start of its own text, by which attention
keeps neighbours apart:     tokens  <s> a b </s> <s> c </s>         positions  0 1 2 3 0 1 2
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
from stories import generator
from transformers import LlamaConfig, LlamaForCausalLM


class Window(NamedTuple):
    """One packed row: `tokens`, `positions` and `targets` are int64 [window_tokens]; target -100 is ignored."""

    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor


def pack(
    texts: Sequence[Sequence[int]], window_tokens: int, given: Sequence[Sequence[tuple[int, int]]] = ()
) -> list[Window]:
    """Join whole texts, in the order given, into windows; a text that is longer is cut at the end.

    Of each text the spans (start, end) of `given` (the first token if empty) are not learnt. The rest of a window is
    filled with a text of its own that nothing is learnt from.
    """
    windows: list[Window] = []
    tokens: list[int] = []
    positions: list[int] = []
    targets: list[int] = []

    def close() -> None:
        room = window_tokens - len(tokens)
        rows = (tokens + [0] * room, positions + list(range(room)), targets + [-100] * room)
        windows.append(Window(*(torch.tensor(row) for row in rows)))
        for row in (tokens, positions, targets):
            row.clear()

    for text, spans in zip(texts, given or [[(0, 1)]] * len(texts), strict=True):
        text = list(text[:window_tokens])
        if len(tokens) + len(text) > window_tokens:
            close()
        tokens += text
        positions += range(len(text))
        learnt = text.copy()
        for start, end in spans:
            learnt[start:end] = [-100] * len(learnt[start:end])
        targets += learnt[1:] + [-100]  # the last token of a text predicts nothing
    if tokens:
        close()
    return windows


def window_batches(windows: Sequence[Window], batch_windows: int, rng: random.Random) -> Iterator[Window]:
    """Endless batches [batch_windows, window_tokens], the windows in a new order each time round."""
    size = min(batch_windows, len(windows))
    while True:
        order = rng.sample(range(len(windows)), len(windows))
        for start in range(0, len(order) - size + 1, size):
            rows = [windows[i] for i in order[start : start + size]]
            yield Window(*(torch.stack(column) for column in zip(*rows)))


def next_token_loss(model: torch.nn.Module, batch: Window) -> torch.Tensor:
    """Mean negative log-likelihood (nats per predicted token) of a transformers causal model."""
    # use_cache=False: a cache would switch off the separation of texts by their positions.
    logits = model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)


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
    loss_of: Callable[[Any], torch.Tensor],
    settings: FitSettings,
    report: Callable[[str], None],
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
            recent, elapsed = losses[-settings.report_every :], time.perf_counter() - started
            report(f"  step {step + 1}/{settings.steps}  loss {sum(recent) / len(recent):.4f}  {elapsed:.0f} s")
    model.eval()
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


@dataclass(frozen=True)
class Pretraining:
    """A model trained from nothing: `steps` optimizer steps of `batch_windows` windows each."""

    seed: int
    steps: int
    batch_windows: int
    lr: float

    def run(self, config: LlamaConfig, windows: Sequence[Window], folder: Path) -> float:
        """Train a model of this shape and save it in `folder` in bfloat16; the last training loss."""
        torch.manual_seed(self.seed)
        model = LlamaForCausalLM(config)
        batches = window_batches(windows, self.batch_windows, generator(self.seed, "windows"))
        settings = FitSettings(self.steps, self.lr, warmup_steps=min(50, self.steps))
        loss = fit(model, batches, lambda batch: next_token_loss(model, batch), settings, say)
        model.generation_config.do_sample = True
        model.bfloat16().save_pretrained(folder)
        return loss


def say(line: str) -> None:
    print(line, flush=True)
