"""Draws on the device against the CPU's of the same logits, and what a draw costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gpu_checks.bench import Bench, References
from gpu_checks.figures import Figure, timed, told
from gpu_checks.result import require

from rlhfuse.gen.core.draws import DrawBatch
from rlhfuse.gen.cpu.sampling import draw_tokens
from rlhfuse.gen.gpu.draws import DrawInputs, draw_array

ROWS, VOCAB = 96, 128256
NEAR = 1e-4  # of log-probabilities and entropies


def batch_of(rows: int, mixed: bool) -> DrawBatch:
    """Draws of every kind, or plain ones at temperature 1."""
    numbers = np.random.default_rng(11)
    temperatures = numbers.choice([0.0, 0.7, 1.0, 1.5], rows) if mixed else np.ones(rows)
    return DrawBatch(
        keys=numbers.integers(0, 2**32, (rows, 2), dtype=np.uint32),
        temperatures=temperatures.astype(np.float32),
        top_ks=numbers.choice([0, 0, 1, 50, 1000], rows).astype(np.int64) if mixed else np.zeros(rows, np.int64),
        top_ps=numbers.choice([1.0, 0.95, 0.5], rows) if mixed else np.ones(rows),
        banned=numbers.integers(-1, 40, (rows, 3)) if mixed else np.empty((rows, 0), np.int64),
    )


def logits_of(rows: int, vocab: int) -> torch.Tensor:
    """Flat, peaked and very peaked rows, float32 of bfloat16 values, so that there are ties."""
    drawn = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(12))
    return (drawn * torch.tensor([0.5, 3.0, 12.0]).repeat(-(-rows // 3))[:rows, None]).bfloat16().float()


def draws_reference(references: References, rows: int = ROWS, vocab: int = VOCAB) -> dict[str, Any]:
    """The CPU's draws, or its file's if that is of the same logits."""

    def draw() -> dict[str, Any]:
        draws = draw_tokens(logits, replace(batch_of(rows, True), measures=True))
        return {**draws._asdict(), "checksum": checksum}

    logits = logits_of(rows, vocab)
    checksum = float(logits.double().sum())
    found = references.get("draws", draw)
    return found if found["checksum"] == checksum and "entropies" in found else draw()


def device_draw(logits: torch.Tensor, batch: DrawBatch) -> Callable[[], torch.Tensor]:
    """Launches the draws of all rows by the Triton kernels; gives [2, rows] int32, as the engine reads it back, or [3,
    rows] of a batch that measures."""
    from rlhfuse.gen.gpu import sampling

    rows = len(logits)
    packed = torch.from_numpy(draw_array(batch, np.arange(rows), rows)).to(logits.device)
    inputs, shape = DrawInputs(rows, packed), (2 + batch.measures, rows)
    outputs = torch.zeros(shape, dtype=torch.int32, device=logits.device)

    def draw() -> torch.Tensor:
        sampling.draw(logits, inputs, outputs)
        return outputs

    return draw


def check_parity(bench: Bench) -> dict:
    """Temperatures, greedy rows, top-k, top-p and bans: the CPU's tokens, but for rows whose two best are a tie."""
    rows, vocab = (ROWS, VOCAB) if bench.on_gpu else (12, 3000)
    wanted = draws_reference(bench.references, rows, vocab)
    batch = replace(batch_of(rows, True), measures=True)
    found = device_draw(logits_of(rows, vocab).to(bench.where), batch)().cpu()
    tokens, numbers = found[0].tolist(), found[1:].view(torch.float32).tolist()
    other = [row for row in range(rows) if tokens[row] != wanted["tokens"][row]]
    same = [row for row in range(rows) if row not in other]
    apart = max((abs(numbers[0][row] - wanted["logprobs"][row]) for row in same), default=0.0)
    entropies = max(abs(ours - theirs) for ours, theirs in zip(numbers[1], wanted["entropies"]))
    banned = sum(tokens[row] in batch.banned[row] for row in range(rows))
    detail = {"rows": rows, "other_tokens": len(other), "max_logprob_difference": apart, "banned_drawn": banned}
    detail |= {"max_entropy_difference": entropies}
    return require(len(other) <= 1 and max(apart, entropies) < NEAR and not banned, detail)


def check_speed(bench: Bench) -> dict:
    """Draws at a vocabulary of 128k, beside the reading of their logits."""
    figures = []
    for rows in (1, 16, 64, 256) if bench.on_gpu else (2,):
        logits = torch.randn(rows, VOCAB if bench.on_gpu else 1000, device=bench.where).bfloat16()
        for name, mixed in (("plain", False), ("top-k, top-p", True)):
            found = timed(bench, device_draw(logits, batch_of(rows, mixed)))
            seconds, size = found.device_seconds or found.seconds, logits.nbytes
            figures.append(Figure(f"draw {name} {rows}", seconds, ("read", size), bytes=size))
    return told(*figures)
