"""The CostModel of a profiled machine: what tools/profile_costs.py measured, interpolated.

    decode      (batch, context of one sequence)          prefill    (tokens, sequences)
    score       (tokens, sequences), of each model        move       bytes between two instances
    swap-in     of all models at once                     training   tokens, a layer and the two ends of each model

Decoding, prefill and scoring were measured beside each neighbour that there was. A profile says what it was made
for, and refuses to price anything else. A stage of a training pipeline is as many layers as it has; embedding,
output layer and loss are measured together and count at the last stage.

Knows nothing of how it is measured (rlhfuse/profiler.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rlhfuse.config.role import Role
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec, ParallelLayout
from rlhfuse.costs.analytic import NEIGHBOURS, AnalyticCost, CostModel, check_neighbour
from rlhfuse.costs.grid import Grid
from rlhfuse.costs.lines import nearest
from rlhfuse.costs.measured import MeasuredCost, read_cost_file
from rlhfuse.errors import InputError
from rlhfuse.schedule.ir.problem import StageCosts

BesideGrids = Mapping[str, Grid]  # neighbour -> what was measured beside it


@dataclass(frozen=True)
class TrainingGrids:
    """Seconds by tokens of one micro-batch on one tensor-parallel group, of a layer and of the two ends together."""

    tp: int
    layer_forward: Grid
    layer_backward: Grid
    ends_forward: Grid
    ends_backward: Grid

    def stage_seconds(self, layers: int, last: bool, tokens: float) -> tuple[float, float]:
        """Forward and backward of a stage of so many layers."""
        forward, backward = layers * self.layer_forward(tokens), layers * self.layer_backward(tokens)
        if last:
            forward, backward = forward + self.ends_forward(tokens), backward + self.ends_backward(tokens)
        return forward, backward


@dataclass(frozen=True)
class ProfiledCost:
    """A CostModel of one generation instance, answering for `neighbour`; saves as JSON."""

    made_for: Mapping[str, object]  # device, dtype, tensor degrees, and each model's shape as text
    decode: BesideGrids
    prefill: BesideGrids
    score: Mapping[str, BesideGrids]  # by role
    swap_in: float  # seconds, all models at the same time
    move: Grid  # of bytes
    all_reduce: Grid | None  # of bytes, over the instance's tensor ranks; None with one
    training: Mapping[str, TrainingGrids]  # by role
    neighbour: str = "idle"

    def prefill_seconds(self, tokens: float, sequences: float) -> float:
        return self._at(self.prefill)(tokens, sequences) if tokens > 0 else 0.0

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        return self._at(self.decode)(batch, context_tokens / batch) if batch > 0 else 0.0

    def score_seconds(self, tokens: float, sequences: float) -> float:
        """One model after the other; replicas smaller than the instance share the batch."""
        if tokens <= 0:
            return 0.0
        total = 0.0
        for role, grids in self.score.items():
            part = int(self.made_for[f"{role}_inference_tp"]) / int(self.made_for["generation_tp"])
            share = max(part, min(1.0, 1 / max(sequences, 1)))
            total += self._at(grids)(tokens * share, sequences * share)
        return total

    def swap_in_seconds(self) -> float:
        return self.swap_in

    def migration_seconds(self, kv_bytes: float) -> float:
        return self.move(kv_bytes) if kv_bytes > 0 else 0.0

    def meeting_seconds(self) -> float:
        """0, as is `release_seconds`: a profile is of one instance's work; a job measures what lies between."""
        return 0.0

    def release_seconds(self) -> float:
        return 0.0

    def beside(self, neighbour: str) -> ProfiledCost:
        return replace(self, neighbour=check_neighbour(neighbour))

    def _at(self, grids: BesideGrids) -> Grid:
        return grids[nearest(self.neighbour, grids)]

    def stage_costs(
        self, role: str, analytic: AnalyticCost, tokens: float, sequences: float, tick_seconds: float
    ) -> StageCosts:
        """`analytic.stage_costs` with measured times. Raises InputError where the tensor degree is another one."""
        known, tp = self.training.get(role), analytic.layout.tp
        if known is None or known.tp != tp:
            raise InputError(f"the profile has no training of {role} with tp({tp}); profile this config again")
        stages = analytic.layout.stage_layers(analytic.spec.layers)
        seconds = [
            known.stage_seconds(len(layers), stage == len(stages) - 1, tokens) for stage, layers in enumerate(stages)
        ]
        return replace(
            analytic.stage_costs(tokens, sequences, tick_seconds),
            forward=tuple(max(1, round(forward / tick_seconds)) for forward, _ in seconds),
            backward=tuple(max(1, round(backward / tick_seconds)) for _, backward in seconds),
        )

    def check(self, made_for: Mapping[str, object], where: str) -> None:
        """Raise InputError naming `where` and the first fact that differs from `made_for`."""
        for key, value in made_for.items():
            if self.made_for.get(key) != value:
                raise InputError(
                    f"{where} was made for {key}={self.made_for.get(key)}, this run has {value}; run "
                    "tools/profile_costs.py with this config"
                )

    def __str__(self) -> str:
        rows = []
        for kind, grids in (("decode", self.decode), ("prefill", self.prefill), *sorted(self.score.items())):
            name = kind if kind in ("decode", "prefill") else f"score by {kind}"
            for neighbour in NEIGHBOURS:
                source = nearest(neighbour, grids)
                text = _text(grids[source]) if source == neighbour else f"as {source}: never measured"
                rows.append(f"{name:18s} {f'({neighbour} neighbour)':20s} {text}")
        rows.append(f"swap-in            {self.swap_in * 1e3:.3f} ms")
        rows.append(f"move               {_text(self.move)}")
        for role, grids in sorted(self.training.items()):
            rows.append(f"training {role:9s} layer forward {_text(grids.layer_forward)}")
        return "\n".join(rows)

    def to_dict(self) -> dict:
        def beside(grids: BesideGrids) -> dict:
            return {neighbour: grid.to_dict() for neighbour, grid in grids.items()}

        return {
            "version": 1,
            "kind": "profile",
            "made_for": dict(self.made_for),
            "decode": beside(self.decode),
            "prefill": beside(self.prefill),
            "score": {role: beside(grids) for role, grids in self.score.items()},
            "swap_in": self.swap_in,
            "move": self.move.to_dict(),
            "all_reduce": self.all_reduce.to_dict() if self.all_reduce else None,
            "training": {
                role: {"tp": grids.tp, **{name: getattr(grids, name).to_dict() for name in _TRAINING}}
                for role, grids in self.training.items()
            },
        }

    @staticmethod
    def from_dict(raw: dict, where: str = "profile") -> ProfiledCost:
        """Inverse of `to_dict`. Raises InputError naming `where` and the field."""

        def beside(grids: dict, name: str) -> BesideGrids:
            if not grids:
                raise InputError(f"{where}: {name} has no grid")
            place = f"{where}: {name}"
            return {check_neighbour(key, place): Grid.from_dict(grids[key], f"{place} beside {key}") for key in grids}

        try:
            if raw["version"] != 1:
                raise InputError(f"{where}: version is {raw['version']!r}; only 1 is known")
            return ProfiledCost(
                made_for=dict(raw["made_for"]),
                decode=beside(raw["decode"], "decode"),
                prefill=beside(raw["prefill"], "prefill"),
                score={role: beside(grids, f"score by {role}") for role, grids in raw["score"].items()},
                swap_in=float(raw["swap_in"]),
                move=Grid.from_dict(raw["move"], f"{where}: move"),
                all_reduce=Grid.from_dict(raw["all_reduce"], f"{where}: all_reduce") if raw["all_reduce"] else None,
                training={
                    role: TrainingGrids(
                        tp=int(one["tp"]),
                        **{name: Grid.from_dict(one[name], f"{where}: training {role}.{name}") for name in _TRAINING},
                    )
                    for role, one in raw["training"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{where} is no profile: {error}; write one with tools/profile_costs.py") from None


_TRAINING = ("layer_forward", "layer_backward", "ends_forward", "ends_backward")


def shape_text(spec: ModelSpec) -> str:
    """What the cost of a model depends on, as one line."""
    return (
        f"{spec.layers} layers, hidden {spec.hidden}, {spec.heads} heads of {spec.head_dim}, {spec.kv_heads} kv heads, "
        f"mlp {spec.mlp}, vocab {spec.vocab}"
    )


def made_for(config: RunConfig, specs: Mapping[Role, ModelSpec]) -> dict[str, object]:
    """The facts of a run that a profile of it depends on, as JSON values."""
    tasks = ("generation", *(f"{role}_inference" for role in config.scorers()))
    device = {} if config.trainer.device == "auto" else {"device": config.trainer.device}
    return {
        **device,
        "dtype": config.trainer.dtype,
        "threads_per_rank": config.trainer.threads_per_rank,
        **{f"{task}_tp": ParallelLayout.parse(getattr(config.parallel, task)).tp for task in tasks},
        **{role: shape_text(specs[role]) for role in config.roles()},
    }


def load_costs(path: str | Path) -> CostModel:
    """A profile of tools/profile_costs.py or the costs.json of a run. Raises InputError naming the file."""
    raw = read_cost_file(path)
    if raw.get("kind") == "profile":
        return ProfiledCost.from_dict(raw, str(path))
    return MeasuredCost.from_dict(raw, str(path))


def load_run_costs(config: RunConfig, specs: Mapping[Role, ModelSpec], path: str | Path = "") -> CostModel:
    """What `path`, default fusion.profile, holds.

    Raises InputError naming the file, also for a profile made for other models or settings.
    """
    file = path or config.fusion.profile
    costs = load_costs(file)
    if isinstance(costs, ProfiledCost):
        costs.check(made_for(config, specs), str(file))
    return costs


def save_profile(costs: ProfiledCost, path: str | Path) -> None:
    """Write beside and rename."""
    beside = Path(f"{path}.tmp")
    beside.write_text(json.dumps(costs.to_dict(), indent=1) + "\n")
    os.replace(beside, path)


def _text(grid: Grid) -> str:
    first = ", ".join(f"{axis[0]:g}" for axis in grid.axes)
    last = ", ".join(f"{axis[-1]:g}" for axis in grid.axes)
    return f"{grid.seconds[0] * 1e3:.3f} ms at ({first}) to {grid.seconds[-1] * 1e3:.3f} ms at ({last})"
