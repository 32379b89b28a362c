"""Predicted seconds of one iteration by part, serial and fused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IterationSeconds:
    """Predicted seconds of one iteration's parts; `generation_*` within `gen_infer_*`, None where not known apart."""

    weight_moves: float  # into the layouts of generation and inference, but for those hidden beneath generation
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

    def lines(self, optimizer_steps: int) -> tuple[str, ...]:
        """A table for people; training takes so many steps."""
        rows = [("weights moved", self.weight_moves, self.weight_moves)]
        if self.capture:
            rows.append(("CUDA graphs recorded", self.capture, self.capture))
        if self.generation_serial is None or self.generation_fused is None:
            rows.append(("generation and inference", self.gen_infer_serial, self.gen_infer_fused))
        else:
            beyond = self.gen_infer_serial - self.generation_serial, self.gen_infer_fused - self.generation_fused
            rows.append(("generation", self.generation_serial, self.generation_fused))
            rows.append(("inference beyond it", *beyond))
        rows.append((f"training, {optimizer_steps} mini-batches", self.training_serial, self.training_fused))
        rows.append(("iteration", self.serial, self.fused))
        lines = [f"{name:26s}{serial:12.4g}{fused:12.4g}" for name, serial, fused in rows]
        return (f"{'':26s}{'serial':>12s}{'fused':>12s}", *lines[:-1], f"{lines[-1]}  (x{self.speedup:.2f})")
