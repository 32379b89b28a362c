"""Actor and critic on gloo ranks for the tests of training: a made-up mini-batch, the built pair, its digest."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.config.settings import OptimizerConfig, RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.decisions.layouts import given_tasks
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.schedule.ir.problem import FusionProblem, StageCosts, fused_problem
from rlhfuse.schedule.ir.ranks import FusedRanks, rank_map
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Programs
from rlhfuse.schedule.rules.builders import greedy, serial_1f1b
from rlhfuse.schedule.rules.interleaved import interleaved_1f1b
from rlhfuse.schedule.rules.time_sharing import time_sharing
from rlhfuse.tasks.microbatch_cut import MicrobatchCut
from testkit.schedule_cases import capped_greedy
from testkit.tiny import write_checkpoint

BUILDERS = {
    "fused": greedy,
    "capped": capped_greedy,
    "eager": lambda problem: capped_greedy(problem, 99),  # forwards before all else
    "serial": serial_1f1b,
    "time-shared": time_sharing,
    "interleaved": interleaved_1f1b,
}
LR = {"actor": 1e-3, "critic": 2e-3}
VOCAB = 56


def write_pair(base: Path, actor: Mapping[str, Any] = {}, critic: Mapping[str, Any] = {}) -> dict[str, Path]:
    """The checkpoints of a run by role, as `write_checkpoint` makes them: two, of which each serves two roles."""
    one = write_checkpoint(base / "actor", **{"seed": 1, **actor})
    two = write_checkpoint(base / "critic", scalar_head=True, **{"seed": 2, **critic})
    return {"actor": one, "reference": one, "critic": two, "reward": two}


def make_batch(seed: int, samples: int = 20) -> RolloutBatch:
    """A mini-batch of random samples: prompts of 2-8 tokens, responses of 1-29, random advantages and returns."""
    generator = torch.Generator().manual_seed(seed)
    rollouts = []
    for i in range(samples):
        prompt, length = (int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((2, 9), (1, 30)))
        tokens = torch.randint(3, VOCAB, (prompt + length,), generator=generator).tolist()
        noise = 0.3 * torch.randn(2, length, generator=generator)
        rollouts.append(
            Rollout(i, tuple(tokens[:prompt]), tuple(tokens[prompt:]), -4 + noise[0], "stop", None, noise[1], 0.5)
        )
    batch = RolloutBatch.from_rollouts(rollouts)
    advantages, returns = torch.randn(2, batch.response_tokens, generator=generator)
    return batch.with_fields(advantages=advantages, returns=returns)


def unit_problem(
    layouts: Mapping[str, ParallelLayout], microbatches: int, split: tuple[str, ...] = (), alternate: bool = True
) -> FusionProblem:
    """Forwards of one unit and backwards twice as long, which are halved in the `split` models."""
    costs = {}
    for model, layout in layouts.items():
        one, two = ((number,) * layout.stages for number in (1, 2))
        costs[model] = StageCosts(one, one, one, one) if model in split else StageCosts(one, two, one)
    return fused_problem(layouts, microbatches, costs, alternate=alternate)


@dataclass(frozen=True)
class Plan:
    """Layouts (of actor and critic), kind of schedule, micro-batches of the actor, models whose backwards are split;
    what runs follows from them without any process. A `tied` actor has one weight for embedding and output."""

    actor: str = "d1t1p4"
    critic: str = "d2t1p2"
    kind: str = "fused"
    microbatches: int = 4
    split: tuple[str, ...] = ()
    tied: bool = False

    @property
    def layouts(self) -> dict[str, ParallelLayout]:
        return {"actor": ParallelLayout.parse(self.actor), "critic": ParallelLayout.parse(self.critic)}

    @property
    def ranks(self) -> FusedRanks:
        return rank_map(self.layouts)

    @property
    def problem(self) -> FusionProblem:
        return unit_problem(self.layouts, self.microbatches, self.split)

    @property
    def schedule(self) -> Schedule:
        return BUILDERS[self.kind](self.problem)

    @property
    def programs(self) -> Programs:
        return lower(self.schedule, self.ranks, tied=frozenset({"actor"} if self.tied else ()))


def add_tensors(sha, tensors: dict) -> None:
    """Names and bits, by name; what is no tensor is left out."""
    for name, value in sorted(tensors.items()):
        if isinstance(value, torch.Tensor):
            sha.update(name.encode() + value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())


@dataclass
class Pair:
    """A built pair on one rank."""

    rank: int
    roles: Any  # Roles
    plan: Plan
    ranks: FusedRanks
    schedule: Schedule
    programs: Programs
    step: Any = None  # TrainingStep

    @property
    def models(self) -> dict:
        return self.roles.trained

    def set_step(
        self,
        *,
        schedule: Schedule | None = None,
        programs: Programs | None = None,
        models: Mapping[str, Any] | None = None,
        channels: Any = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Train from now on by a TrainingStep with these, or the pair's own."""
        from rlhfuse.fusion.intra.training_step import TrainingStep

        self.step = TrainingStep(
            self.rank,
            self.ranks,
            MicrobatchCut(self.ranks.shape.layouts["actor"].dp, (self.plan.microbatches,), math.inf),
            {self.plan.microbatches: schedule or self.schedule},
            {self.plan.microbatches: programs or self.programs},
            self.models if models is None else models,
            channels or self.roles.channels,
            1.0,
            progress,
        )

    def train(self, seed: int, samples: int = 20):
        return self.step.run(make_batch(seed, samples), LR, AlgorithmConfig())

    def digest(self, *roles: str) -> str:
        """Digest of all weights, main weights and optimizer state of this rank; of all models, or of these."""
        sha = hashlib.sha256()
        for role in sorted(roles or self.models):
            optimizer = self.models[role].optimizer
            for _, module in sorted(optimizer.modules.items()):
                add_tensors(sha, dict(module.named_parameters()))
            for part in optimizer._parts():
                groups, state = part.optimizer.param_groups, part.optimizer.state
                for number, main in enumerate(one for group in groups for one in group["params"]):
                    add_tensors(sha, {f"{number}": main, **state.get(main, {})})
        return sha.hexdigest()

    def close(self) -> None:
        self.roles.groups.close()


def build_roles(rank: int, folders: Mapping[str, Path], plan: Plan, generation: str, **settings: Any) -> Any:
    """A run's models on this rank (Roles); a collective. `generation`: the layout of all tasks but training."""
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.run.rank_models import ModelFolders, build_models

    tasks = ("generation", "inference", "reference_inference", "reward_inference", "critic_inference")
    layouts = {"actor_train": plan.actor, "critic_train": plan.critic} | dict.fromkeys(tasks, generation)
    config = RunConfig().with_(**{**settings, "parallel": {**layouts, **settings.get("parallel", {})}})
    specs = {role: ModelSpec.from_config(path) for role, path in folders.items()}
    tasks = given_tasks(config.parallel, config.roles(), plan.ranks.size)
    found = ModelFolders(dict(folders), specs)
    return build_models(config, tasks, found, plan.ranks, rank, choose_device("cpu", 0, 1))


def build_pair(
    rank: int,
    folders: Mapping[str, Path],
    plan: Plan = Plan(),
    *,
    optim: Mapping[str, Any] = {},
    dtype: str = "float32",
    progress: Callable[[str], None] = lambda _: None,
    edit: Callable[[Programs], Programs] = lambda programs: programs,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> Pair:
    """Build models and TrainingStep on this rank; a collective. `optim`: settings of both optimizers."""
    optimizers = {role: {"optim": OptimizerConfig(**{"lr": lr, "clip_grad": 1.0, **optim})} for role, lr in LR.items()}
    settings = {"trainer": {"dtype": dtype, "recompute": recompute}, **optimizers}
    roles = build_roles(rank, folders, plan, "d4t1p1", parallel={"sequence_parallel": sequence_parallel}, **settings)
    ranks, schedule = plan.ranks, plan.schedule
    tied = frozenset(
        role for role, model in roles.trained.items() if model.spec.tied_embeddings and not model.role.scalar_head
    )
    pair = Pair(rank, roles, plan, ranks, schedule, edit(lower(schedule, ranks, tied=tied)))
    pair.set_step(progress=progress)
    return pair
