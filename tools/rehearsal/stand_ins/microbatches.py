"""Runs the first of micro-batches that are alike; the others hold what it held and take what it took."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from rehearsal.memory import rounded
from rehearsal.tensors import CUDA, DEVICE, FakeCuda
from torch import Tensor

from rlhfuse.models.stage import LossFunction, PackedTokens, PipelineStage, TrainingStage

REAL = 2  # of each program, beside the dry run's


@dataclass
class Passed:
    """One that ran: what it kept, by what made it, and how much more was held on the way; bytes."""

    kept: Counter[str]
    forward_top: int
    backward_top: int | None = None  # None: its backward has not run
    for_weights: Counter[str] = field(default_factory=Counter)  # from B to W, where the backward is split
    weights_top: int = 0


class SampledStage(TrainingStage):
    """In the place of a TrainingStage; gives out tensors of the same shapes."""

    def __init__(self, mode: FakeCuda, stage: PipelineStage) -> None:
        super().__init__(stage)
        self._mode = mode
        self._passed: dict[tuple[int, ...], Passed] = {}
        self._running: dict[int, tuple[int, ...]] = {}  # micro-batches that ran -> what they are like
        self._held: dict[int, tuple[Tensor | None, list[Tensor], Passed]] = {}  # of those that did not

    def forward(
        self, microbatch: int, batch: PackedTokens, hidden_T1H: Tensor | None, loss: LossFunction
    ) -> Tensor | None:
        alike = len(batch), len(batch.sequences.borders), batch.sequences.longest
        passed = self._passed.get(alike)
        if microbatch < REAL or passed is None or passed.backward_top is None:
            return self._forward(microbatch, alike, batch, hidden_T1H, loss)
        self._mode.meter.pass_through(passed.forward_top, "the forward of a micro-batch")
        kept = self._standing_for(passed.kept)
        self._held[microbatch] = hidden_T1H, kept, passed
        if self.stage.last:
            return None
        kept.append(torch.empty(self.stage.hidden_shape(len(batch)), dtype=self._dtype, device=CUDA))
        return kept[-1].detach()

    def backward(self, microbatch: int, gradient_T1H: Tensor | None) -> Tensor | None:
        if microbatch not in self._held:
            return self._backward(microbatch, gradient_T1H)
        hidden, kept, passed = self._held.pop(microbatch)
        self._mode.meter.pass_through(passed.backward_top or 0, "the backward of a micro-batch")
        kept.clear()
        if self.splits:
            self._held[microbatch] = None, self._standing_for(passed.for_weights), passed
        return None if hidden is None else torch.empty_like(hidden)

    def backward_weight(self, microbatch: int) -> None:
        if microbatch not in self._held:
            alike = self._running.pop(microbatch)
            _, top, _ = self._mode.meter.watched(lambda: super(SampledStage, self).backward_weight(microbatch))
            self._passed[alike].weights_top = top
            return
        _, kept, passed = self._held.pop(microbatch)
        self._mode.meter.pass_through(passed.weights_top, "the weight gradients of a micro-batch")
        kept.clear()

    def _backward(self, microbatch: int, gradient_T1H: Tensor | None) -> Tensor | None:
        meter = self._mode.meter
        alike = self._running[microbatch] if self.splits else self._running.pop(microbatch)
        passed, before = self._passed[alike], meter.holders()
        out, top, _ = meter.watched(lambda: super(SampledStage, self).backward(microbatch, gradient_T1H))
        passed.backward_top = top
        if self.splits:
            kept = meter.holders() + passed.kept
            kept.subtract(before)
            if out is not None:
                kept.subtract({meter.name_of(out): rounded(out.nbytes, DEVICE)})
            passed.for_weights = +kept
        return out

    def _standing_for(self, kept: Counter[str]) -> list[Tensor]:
        tensors = []
        for what, count in kept.items():
            tensors.append(torch.empty(count, dtype=torch.uint8, device=CUDA))
            self._mode.meter.rename(tensors[-1], what)
        return tensors

    def _forward(self, microbatch: int, alike: tuple[int, ...], *given: Any) -> Tensor | None:
        meter = self._mode.meter
        before = meter.holders()
        out, top, _ = meter.watched(lambda: super(SampledStage, self).forward(microbatch, *given))
        kept = meter.holders() - before
        if out is not None:
            kept.subtract({meter.name_of(out): rounded(out.nbytes, DEVICE)})
        self._running[microbatch] = alike
        self._passed.setdefault(alike, Passed(Counter(), 0))
        self._passed[alike].kept, self._passed[alike].forward_top = +kept, top
        return out

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.stage.model.parameters()).dtype
