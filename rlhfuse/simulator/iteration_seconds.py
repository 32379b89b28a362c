"""Predicted seconds of one iteration by part, serial and fused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IterationSeconds:
    """Predicted seconds of one iteration's parts; `generation_*` within `gen_infer_*`, None where not known apart."""

    weight_moves: float  # into the layouts of generation and inference, one model after the other, fused or not
    gen_infer_serial: float
    gen_infer_fused: float
    training_serial: float
    training_fused: float
    generation_serial: float | None = None
    generation_fused: float | None = None
    capture: float = 0.0  # beside these, of CUDA graphs in every iteration

    @property
    def serial(self) -> float:
        return self.weight_moves + self.capture + self.gen_infer_serial + self.training_serial

    @property
    def fused(self) -> float:
        return self.weight_moves + self.capture + self.gen_infer_fused + self.training_fused

    @property
    def speedup(self) -> float:
        return self.serial / self.fused
