"""What work costs in a paced run: what that of larger models takes, for which the run's own wait (monitor/pace.py).

A file of trainer.pace holds it, for layouts with as many stages as the run's. One rank may stand for the tensor ranks
of a replica, and a run for one of several replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import read_json
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.costs.fits import Line, check_seconds
from rlhfuse.costs.forms.training import MicrobatchTokens, StageSeconds
from rlhfuse.costs.measured import MeasuredCost
from rlhfuse.costs.table import CostTable
from rlhfuse.schedule.ir.action import Action, Kind


@dataclass(frozen=True)
class TrainingPrice:
    """Training of one model: seconds of F and of B on each stage, whatever layers it has here, by the tokens of the
    micro-batch; of a mini-batch's step, with reduced gradients and gathered weights; of the move of its weights in an
    iteration. Backwards in two parts have no price."""

    stages: tuple[tuple[Line, Line], ...]
    step: float
    move: float

    def __post_init__(self) -> None:
        check_seconds("step and move of a paced model", self.step, self.move)

    def times(self, stretch: float) -> TrainingPrice:
        stages = tuple((_times(forward, stretch), _times(backward, stretch)) for forward, backward in self.stages)
        return TrainingPrice(stages, stretch * self.step, stretch * self.move)

    def stage_seconds(self, role: str, layout: ParallelLayout, micro: MicrobatchTokens) -> StageSeconds:
        """Raises InputError for another number of stages."""
        if len(self.stages) != layout.stages:
            raise InputError(
                f"trainer.pace prices {len(self.stages)} stages of the {role}, parallel.{role}_train={layout} has "
                f"{layout.stages}; use a layout with as many"
            )
        ends = tuple((forward(micro.tokens), backward(micro.tokens)) for forward, backward in self.stages)
        return StageSeconds((0.0, 0.0), ends)


@dataclass(frozen=True, kw_only=True)
class PacedCost(MeasuredCost):
    """`migration` is of keys and values of which a token has `token_bytes`; `models`: whose costs these are."""

    measures_training = True
    version = 1

    models: str
    token_bytes: int
    training: Mapping[str, TrainingPrice]  # by role

    def of_run(self, stretch: float, token_bytes: int) -> PacedCost:
        """In a run that takes `stretch` times as long, where a token has so many bytes of keys and values."""
        lines = {name: _times(getattr(self, name), stretch) for name in ("decode", "prefill", "score", "migration")}
        constant, (slope,) = lines["migration"].constant, lines["migration"].slopes
        lines["migration"] = Line(constant, (slope * self.token_bytes / token_bytes,))
        medians = {name: stretch * getattr(self, name) for name in ("swap_in", "meeting", "release")}
        training = {role: price.times(stretch) for role, price in self.training.items()}
        return replace(self, **lines, **medians, training=training, token_bytes=token_bytes)

    def engine_step_seconds(self, batch: int, context_tokens: int, prefill_tokens: int) -> float:
        """A step with prompts beside what decodes: as `fit_steps` takes it apart."""
        seconds = self.decode(batch, context_tokens)
        if prefill_tokens:
            token = max(0.0, self.prefill.slopes[0] - self.decode.slopes[1])
            seconds += max(0.0, self.prefill.constant - self.decode.constant) + token * prefill_tokens
        return seconds

    def action_seconds(self, role: str, action: Action, tokens: int) -> float:
        """One instruction of training on a micro-batch of so many tokens."""
        if action.kind is Kind.ST:
            return self.training[role].step
        if action.kind not in (Kind.F, Kind.B):
            return 0.0
        return self.training[role].stages[action.stage][action.kind is Kind.B](tokens)

    def prices(self, scorers: int) -> dict[str, Callable[..., float]]:
        """Seconds of each kind of work, of what it is told; models that score share a pack and their loads evenly."""
        return {
            "action": self.action_seconds,
            "step": self.engine_step_seconds,
            "score": lambda tokens, samples: self.table.score_seconds(tokens, samples) / scorers,
            "load": lambda: self.swap_in / scorers,
            "migration": lambda tokens: self.table.migration_seconds(tokens * self.token_bytes),
            "move": lambda role: self.training[role].move,
        }

    @cached_property
    def table(self) -> CostTable:
        """The costs of a run with as many stages."""
        steps, moves = ({role: getattr(p, name) for role, p in self.training.items()} for name in ("step", "move"))
        return self._table(training=self.training, steps=steps, moves=moves)


def load_paced_cost(path: str | Path) -> PacedCost:
    """Inverse of `PacedCost.to_dict`. Raises InputError naming the file and the field."""
    return PacedCost.from_dict(read_json(path, fix="tools/plan.py --pace writes one"), str(path))


def _times(line: Line, factor: float) -> Line:
    return Line(factor * line.constant, tuple(factor * slope for slope in line.slopes))
