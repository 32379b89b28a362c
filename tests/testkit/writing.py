"""Checkpoints that ranks of a test write without a run: a parameter of which each owns a part, made-up gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlhfuse.parallel.fragments import Fragment, Place
from rlhfuse.run.checkpoint import writer as checkpoint_writer
from rlhfuse.run.checkpoint.checkpoint import RunState
from rlhfuse.run.checkpoint.compatibility import RunCompatibility
from rlhfuse.run.checkpoint.writer import CheckpointWriter

STATE = RunState({"current": 3}, {"kl_coef": 0.05}, {"metrics_bytes": 7})


def writer_of(rank: int, out: Path, world: int = 4, seconds: float = 60.0, **more: Any) -> CheckpointWriter:
    """Keeps two checkpoints; rank 0 waits so many `seconds` for the files of the others."""
    return CheckpointWriter(out, rank, world, RunCompatibility(world, {}, {}, "", {}), 2, seconds, **more)


def part_of(rank: int, world: int = 4, size: int = 100) -> dict[str, list[Fragment]]:
    """What a rank owns: `size` elements of one parameter."""
    place = Place((world * size,), 0, ((0, world * size),), size * rank, size * (rank + 1))
    return {"actor": [Fragment("w", place, 1, {"main": torch.arange(float(size))})]}


@contextmanager
def writing_by(write: Callable[..., Any]) -> Iterator[None]:
    """Files of ranks are written by `write(real, folder, rank, state)`."""
    real = checkpoint_writer.write_rank_file
    checkpoint_writer.write_rank_file = lambda *given: write(real, *given)
    try:
        yield
    finally:
        checkpoint_writer.write_rank_file = real


def fill_gradients(rank: int, model: Any, seed: int, scale: float = 1.0) -> None:
    """Made-up gradients; tensor ranks have the same one of what each of them holds whole."""
    for number, parameter in enumerate(model.module.parameters()):
        own = rank if getattr(parameter, "tensor_model_parallel", False) else 0
        generator = torch.Generator().manual_seed(10_000 * seed + 100 * own + number)
        parameter.main_grad.copy_(scale * torch.randn(parameter.shape, generator=generator))
