"""A pair of models whose training step a test may disturb: with other channels, stages, programs or progress.

`plan` is what runs, as plain values and without any process; `disturbed` builds it on one rank of four.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfuse.config.spec import ParallelLayout
from rlhfuse.schedule.ir.ranks import FusedRanks, rank_map
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Programs
from testkit.tiny import write_checkpoint
from testkit.training_pair import Pair, build_pair, make_schedule


@dataclass(frozen=True)
class Plan:
    """Layouts (of actor and critic), kind of schedule, micro-batches of the actor, models whose backwards are split,
    and what follows from them."""

    actor: str
    critic: str
    kind: str
    microbatches: int
    split: tuple[str, ...]
    ranks: FusedRanks
    schedule: Schedule
    programs: Programs


def plan(
    actor: str = "d1t1p4",
    critic: str = "d2t1p2",
    kind: str = "fused",
    microbatches: int = 4,
    *,
    tied: bool = False,
    split: tuple[str, ...] = (),
) -> Plan:
    layouts = {"actor": ParallelLayout.parse(actor), "critic": ParallelLayout.parse(critic)}
    ranks = rank_map(layouts)
    schedule = make_schedule(layouts, kind, microbatches, split)
    programs = lower(schedule, ranks, tied=frozenset({"actor"} if tied else ()))
    return Plan(actor, critic, kind, microbatches, split, ranks, schedule, programs)


def write_models(base: Path, *, tied: bool = False) -> dict[str, Path]:
    actor = write_checkpoint(base / "actor", seed=1, tie_word_embeddings=tied)
    critic = write_checkpoint(base / "critic", scalar_head=True, seed=2)
    return {"actor": actor, "reference": actor, "critic": critic, "reward": critic}


def same(value: Any) -> Any:
    return value


def disturbed(
    rank: int,
    folders: Mapping[str, Path],
    plan: Plan,
    *,
    channels: Callable = same,
    stage: Callable = same,
    progress: Callable[[str], None] = same,
) -> Pair:
    """The pair of `plan` on `rank`; a collective. `channels` and `stage` may wrap what they are given."""
    options = dict(microbatches=plan.microbatches, split=plan.split)
    pair = build_pair(rank, dict(folders), plan.actor, plan.critic, plan.kind, **options)
    pair.step = new_step(rank, pair, plan.programs, channels=channels, stage=stage, progress=progress)
    return pair


def new_step(
    rank: int,
    pair: Pair,
    programs: Programs,
    *,
    channels: Callable = same,
    stage: Callable = same,
    progress: Callable[[str], None] = same,
) -> Any:
    """A TrainingStep over the models of `pair` that runs `programs`."""
    from rlhfuse.fusion.intra.training_step import TrainingStep

    models = {
        role: dataclasses.replace(model, stages={n: stage(part) for n, part in model.stages.items()})
        for role, model in pair.models.items()
    }
    return TrainingStep(
        rank,
        pair.ranks,
        pair.schedule,
        programs,
        models,
        channels(pair.roles.channels),
        1.0,
        progress,
    )
