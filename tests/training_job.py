"""A training step over tiny models on four ranks, for tests that disturb it or let it fail.

`build` makes this rank's `TrainingStep` of actor and critic; the pieces that a test replaces (channels, stages,
progress, programs) are given as functions. `programs` is the same plan, without any process, for the test itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping

import torch
from tiny import write_checkpoint

from rlhfuse.config import AlgorithmConfig, OptimizerConfig, ParallelConfig, RunConfig
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.schedule.builders import greedy
from rlhfuse.schedule.lowering import lower
from rlhfuse.schedule.problem import StageCosts, fused_problem
from rlhfuse.schedule.program import Programs
from rlhfuse.schedule.ranks import FusedRanks, rank_map
from rlhfuse.schedule.schedule import Schedule
from rlhfuse.spec import ModelSpec, ParallelLayout

ACTOR, CRITIC = "d1t1p4", "d2t1p2"
LR = {"actor": 1e-3, "critic": 2e-3}


def write_models(base: Path, tied: bool = False) -> dict[str, Path]:
    actor = write_checkpoint(base / "actor", seed=1, tie_word_embeddings=tied)
    critic = write_checkpoint(base / "critic", scalar_head=True, seed=2)
    return {"actor": actor, "reference": actor, "critic": critic, "reward": critic}


def make_batch(seed: int, samples: int = 16) -> RolloutBatch:
    generator = torch.Generator().manual_seed(seed)
    rollouts = []
    for i in range(samples):
        prompt, length = (int(torch.randint(2, 12, (1,), generator=generator)) for _ in range(2))
        tokens = torch.randint(3, 200, (prompt + length,), generator=generator).tolist()
        noise = torch.randn(3, length, generator=generator)
        rollouts.append(
            Rollout(i, tuple(tokens[:prompt]), tuple(tokens[prompt:]), -5 + 0.1 * noise[0], "stop", -5 + 0.1 * noise[1],
                    noise[2], 0.5)  # fmt: skip
        )
    batch = RolloutBatch.from_rollouts(rollouts)
    advantages, returns = torch.randn(2, batch.response_tokens, generator=generator)
    return batch.with_fields(advantages=advantages, returns=returns)


@dataclass(frozen=True)
class Plan:
    """What is to run: the ranks of both models, a schedule and its programs, micro-batches per pipeline."""

    ranks: FusedRanks
    schedule: Schedule
    programs: Programs
    microbatches: Mapping[str, int]


def make_plan(
    actor: str = ACTOR, critic: str = CRITIC, count: int = 4, tied: bool = False, build: Callable = greedy,
    buffers: Mapping[str, int] | None = None,
) -> Plan:  # fmt: skip
    layouts = {"actor": ParallelLayout.parse(actor), "critic": ParallelLayout.parse(critic)}
    ranks = rank_map(layouts)
    costs = {role: StageCosts((1,) * layout.pp, (2,) * layout.pp, (1,) * layout.pp) for role, layout in layouts.items()}
    schedule = build(fused_problem(layouts, count, costs))
    programs = lower(schedule, ranks, tied=frozenset({"actor"} if tied else ()), buffers=buffers)
    first, second = ranks.shape.shares
    return Plan(ranks, schedule, programs, {"actor": count, "critic": first.pipelines * count // second.pipelines})


@dataclass
class Job:
    """One rank's training."""

    step: Any
    roles: Any
    plan: Plan

    def run(self, number: int, batch: RolloutBatch | None = None) -> Any:
        return self.step.run(batch or make_batch(number), self.plan.microbatches, LR)

    def digest(self) -> str:
        """Of all weights of this rank."""
        sha = hashlib.sha256()
        for role in ("actor", "critic"):
            optimizer = getattr(self.roles, role).optimizer
            for model in optimizer.modules.values():
                for parameter in model.parameters():
                    sha.update(parameter.detach().numpy().tobytes())
        return sha.hexdigest()


def build(
    rank: int, folders: Mapping[str, Path], plan: Plan, *,
    channels: Callable = lambda channels: channels,
    stage: Callable = lambda stage: stage,
    progress: Callable[[str], None] = lambda text: None,
    programs: Programs | None = None,
) -> Job:  # fmt: skip
    """Models and training step of `rank`; a collective. `channels` and `stage` may wrap what they are given."""
    from rlhfuse.fusion.training_step import TrainingStep
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.roles import Checkpoints, build_roles

    device = choose_device("cpu", 0, 1)
    actor, critic = (str(layout) for layout in plan.ranks.shape.layouts.values())
    config = RunConfig(parallel=ParallelConfig(actor, critic, "d4t1p1", "d4t1p1", "d4t1p1", "d4t1p1", "d4t1p1"))
    config.actor.optim = OptimizerConfig(lr=1e-3, clip_grad=1.0)
    config.critic.optim = OptimizerConfig(lr=2e-3, clip_grad=1.0)
    specs = {role: ModelSpec.from_config(path) for role, path in folders.items()}
    roles = build_roles(config, Checkpoints(folders, specs), plan.ranks, rank, device)
    models = {
        role: dataclasses.replace(model, stages={n: stage(part) for n, part in model.stages.items()})
        for role, model in (("actor", roles.actor), ("critic", roles.critic))
    }
    step = TrainingStep(
        rank, plan.ranks, plan.schedule, programs or plan.programs, models, channels(roles.channels), AlgorithmConfig(),
        1.0, device.torch_device, progress,
    )  # fmt: skip
    return Job(step, roles, plan)
