"""What work costs on a profiled machine: grids that tools/profile_costs.py measured, saved as profile.json.

A profile says what it was made for, and refuses to price anything else. A stage of a training pipeline is as many
layers as it has; embedding, output layer and loss are measured together and count at the last stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import TrainerConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.fits import Grid, check_seconds
from rlhfuse.costs.forms.form import Form
from rlhfuse.costs.forms.training import MicrobatchTokens, StageSeconds
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.table import CostFile, CostTable, RewardCost
from rlhfuse.tasks.role import ROLES, Role
from rlhfuse.tasks.task import ModelTask


@dataclass(frozen=True)
class TrainingGrids:
    """Seconds by tokens of one micro-batch on one tensor-parallel group, of a layer and of the two ends together."""

    tp: int
    layer_forward: Grid
    layer_backward: Grid
    ends_forward: Grid
    ends_backward: Grid
    layer_backward_input: Grid | None = None  # B and W of a split backward; None: they were not measured
    layer_weight_gradient: Grid | None = None

    def stage_seconds(self, role: str, layout: ParallelLayout, micro: MicrobatchTokens) -> StageSeconds:
        """Both ends count for the last stage, whose output layer is most of them. Raises InputError for another tp."""
        if self.tp != layout.tp:
            raise InputError(f"the profile has no training of {role} with tp({layout.tp}); profile this config again")
        inner = ((0.0, 0.0),) * (layout.stages - 1)
        layer = self.layer_forward(micro.tokens), self.layer_backward(micro.tokens)
        ends = self.ends_forward(micro.outputs), self.ends_backward(micro.outputs)
        backward, weights = self.layer_backward_input, self.layer_weight_gradient
        split = None if backward is None or weights is None else (backward(micro.tokens), weights(micro.tokens))
        return StageSeconds(layer, (*inner, ends), split)


@dataclass(frozen=True)
class ProfiledCost(CostFile):
    """Grids of one generation instance; saves as JSON."""

    version, kind = 2, "profile"

    made_for: Mapping[str, Any]  # device, dtype, tensor degrees, and each model's shape as text
    decode: Grid  # of batch, context of one sequence
    prefill: Grid  # of tokens, sequences
    score: Mapping[str, Grid]  # of tokens, sequences; by role
    swap_in: float  # seconds, all models at the same time
    move: Grid  # of bytes
    all_reduce: Grid | None  # of bytes, over the instance's tensor ranks; None with one
    training: Mapping[str, TrainingGrids]  # by role
    reward: RewardCost | None = None  # not measured by the program; a file may have it

    def __post_init__(self) -> None:
        check_seconds("swap_in", self.swap_in)

    @cached_property
    def table(self) -> CostTable:
        score = [(self._part(role), grid) for role, grid in self.score.items()]
        return CostTable(
            decode=Form.of_grids([(1.0, self.decode)]),
            prefill=Form.of_grids([(1.0, self.prefill)]),
            score=Form.of_grids(score),
            transfer=Form.of_grids([(1.0, self.move)]),
            swap_in=self.swap_in,
            reward=self.reward,
            training=self.training,
        )

    def check(self, asked: Mapping[str, Any], where: str) -> None:
        check_made_for(self.made_for, asked, where)

    def _part(self, role: str) -> float:
        """Part of a worker, or of the instance around it, that a replica of a model that scores has."""
        degrees = [int(value) for key, value in self.made_for.items() if key.endswith("_tp")]
        return int(self.made_for[f"{role}_inference_tp"]) / max(degrees)

    def beyond(self, sequences: float, context: float, pack: float, training: Mapping[str, float]) -> tuple[str, ...]:
        asked = {
            "sequences decoding": (sequences, self.decode.axes[0]),
            "tokens of a context": (context, self.decode.axes[1]),
            "tokens of a prefill": (pack, self.prefill.axes[0]),
        }
        asked |= {
            f"tokens of a pack for {role}": (pack * self._part(role), grid.axes[0]) for role, grid in self.score.items()
        }
        asked |= {
            f"tokens of a micro-batch of {role}": (tokens, self.training[role].layer_forward.axes[0])
            for role, tokens in training.items()
            if role in self.training
        }
        outside = ((what, count, axis[-1]) for what, (count, axis) in asked.items() if count > axis[-1])
        return tuple(f"{count:,.0f} {what} (measured: {most:,.0f})" for what, count, most in outside)

    def __str__(self) -> str:
        grids = {"decode": self.decode, "prefill": self.prefill}
        grids |= {f"score by {role}": grid for role, grid in sorted(self.score.items())} | {"move": self.move}
        grids |= {f"training {role}": grids.layer_forward for role, grids in sorted(self.training.items())}
        rows = [f"{name:18s} {grid.describe()}" for name, grid in grids.items()]
        return "\n".join((*rows, f"swap-in            {self.swap_in * 1e3:.3f} ms"))


def shape_text(spec: ModelSpec) -> str:
    """What the cost of a model depends on, as one line."""
    return (
        f"{spec.layers} layers, hidden {spec.hidden}, {spec.heads} heads of {spec.head_dim}, {spec.kv_heads} kv heads, "
        f"mlp {spec.mlp}, vocab {spec.vocab}"
    )


def made_for(trainer: TrainerConfig, tasks: Sequence[ModelTask], specs: Mapping[Role, ModelSpec]) -> dict[str, Any]:
    """The facts of a run that a profile of it depends on, as JSON values."""
    roles = {task.role for task in tasks}
    return {
        **({} if trainer.device == "auto" else {"device": trainer.device}),
        "hardware": hardware_by_name(trainer.hardware, trainer.device).name,
        "dtype": trainer.dtype,
        "threads_per_rank": trainer.threads_per_rank,
        **{f"{task.name}_tp": task.layout.tp for task in tasks if not task.training},
        **{role: shape_text(specs[role]) for role in ROLES if role in roles},
    }


def check_made_for(known: Mapping[str, Any], asked: Mapping[str, Any], where: str) -> None:
    """Raise InputError naming `where` and the first fact of the run that is `asked` for which costs were not made."""
    for key, value in asked.items():
        if known.get(key) != value:
            raise InputError(
                f"{where} was made for {key}={known.get(key)}, this run has {value}; run tools/profile_costs.py with "
                "this config, or leave fusion.profile empty"
            )
