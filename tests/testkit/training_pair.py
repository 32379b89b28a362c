"""Actor and critic on gloo ranks for the tests of training: a made-up mini-batch, the built pair, its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlhfuse.config.settings import AlgorithmConfig, OptimizerConfig, ParallelConfig, RunConfig
from rlhfuse.config.spec import ModelSpec, ParallelLayout
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.schedule.ir.problem import StageCosts, fused_problem
from rlhfuse.schedule.ir.ranks import FusedRanks, rank_map
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Programs
from rlhfuse.schedule.rules.builders import greedy, serial_1f1b
from rlhfuse.schedule.rules.interleaved import interleaved_1f1b
from testkit.schedule_cases import capped_greedy

BUILDERS = {
    "fused": greedy,
    "eager": lambda problem: capped_greedy(problem, 99),
    "serial": serial_1f1b,
    "interleaved": interleaved_1f1b,
}
LR = {"actor": 1e-3, "critic": 2e-3}


def make_batch(seed: int, samples: int = 20) -> RolloutBatch:
    """Prompts of 2-8 tokens, responses of 1-29, random advantages and returns."""
    generator = torch.Generator().manual_seed(seed)
    rollouts = []
    for i in range(samples):
        prompt = torch.randint(3, 200, (int(torch.randint(2, 9, (1,), generator=generator)),), generator=generator)
        length = int(torch.randint(1, 30, (1,), generator=generator))
        response = torch.randint(3, 200, (length,), generator=generator)
        noise = torch.randn(3, length, generator=generator)
        rollouts.append(
            Rollout(
                i,
                tuple(prompt.tolist()),
                tuple(response.tolist()),
                -5 + 0.1 * noise[0],
                "stop",
                -5 + 0.1 * noise[1],
                noise[2],
                0.5,
            )
        )
    batch = RolloutBatch.from_rollouts(rollouts)
    count = batch.response_tokens
    return batch.with_fields(
        advantages=torch.randn(count, generator=generator), returns=torch.randn(count, generator=generator)
    )


def make_schedule(
    layouts: dict[str, ParallelLayout], kind: str, microbatches: int = 4, split: tuple[str, ...] = ()
) -> Schedule:
    """A schedule of unit forwards and backwards twice as long, which are halved in the `split` models."""
    costs = {}
    for role, layout in layouts.items():
        one, two = ((number,) * layout.stages for number in (1, 2))
        costs[role] = StageCosts(one, one, one, one) if role in split else StageCosts(one, two, one)
    return BUILDERS[kind](fused_problem(layouts, microbatches, costs))


def weights(pair) -> list[bytes]:
    """The bits of each parameter on this rank."""
    return [
        parameter.detach().view(torch.uint8).numpy().tobytes()
        for model in pair.models.values()
        for module in model.optimizer.modules.values()
        for parameter in module.parameters()
    ]


def add_tensors(sha, tensors: dict) -> None:
    """Names and bits, by name; what is no tensor is left out."""
    for name, value in sorted(tensors.items()):
        if isinstance(value, torch.Tensor):
            sha.update(name.encode() + value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())


@dataclass
class Pair:
    """A built pair on one rank."""

    step: object  # TrainingStep
    roles: object  # Roles
    ranks: FusedRanks
    schedule: Schedule
    programs: Programs
    counts: dict[str, int]

    @property
    def models(self) -> dict:
        return self.roles.trained

    def train(self, seed: int, samples: int = 20):
        return self.step.run(make_batch(seed, samples), self.counts, LR, AlgorithmConfig())

    def digest(self) -> str:
        """Of all weights, main weights and optimizer state of this rank."""
        sha = hashlib.sha256()
        for _, model in sorted(self.models.items()):
            for _, module in sorted(model.optimizer.modules.items()):
                add_tensors(sha, dict(module.named_parameters()))
            for wrapper in model.optimizer.optimizer.chained_optimizers:
                inner = wrapper.optimizer
                for number, main in enumerate(one for group in inner.param_groups for one in group["params"]):
                    add_tensors(sha, {f"{number}": main, **inner.state[main]})
        return sha.hexdigest()

    def close(self) -> None:
        self.roles.groups.close()


def build_pair(
    rank: int,
    folders: dict,
    actor: str,
    critic: str,
    kind: str = "fused",
    *,
    microbatches: int = 4,
    optimizer: str = "adam",
    dtype: str = "float32",
    progress: Callable[[str], None] = lambda _: None,
    edit: Callable[[Programs], Programs] = lambda programs: programs,
    sequence_parallel: bool = False,
    recompute: str = "none",
    split: tuple[str, ...] = (),
) -> Pair:
    """Build models and TrainingStep on this rank; a collective."""
    from rlhfuse.fusion.intra.training_step import TrainingStep
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.run.rank_models import ModelFolders, build_models

    device = choose_device("cpu", 0, 1)
    tasks = ("generation", "inference", "reference_inference", "reward_inference", "critic_inference")
    layouts = {"actor_train": actor, "critic_train": critic} | dict.fromkeys(tasks, "d4t1p1")
    config = RunConfig(parallel=ParallelConfig(**layouts, sequence_parallel=sequence_parallel)).with_(
        trainer={"dtype": dtype, "recompute": recompute},
        actor={"optim": OptimizerConfig(name=optimizer, lr=LR["actor"], clip_grad=1.0)},
        critic={"optim": OptimizerConfig(name=optimizer, lr=LR["critic"], clip_grad=1.0)},
    )
    layouts = {"actor": ParallelLayout.parse(actor), "critic": ParallelLayout.parse(critic)}
    ranks = rank_map(layouts)
    specs = {role: ModelSpec.from_config(path) for role, path in folders.items()}
    roles = build_models(config, ModelFolders(folders, specs), ranks, rank, device)
    schedule = make_schedule(layouts, kind, microbatches, split)
    models = roles.trained
    tied = frozenset(role for role, model in models.items() if model.spec.tied_embeddings and not model.scalar_head)
    programs = edit(lower(schedule, ranks, tied=tied))
    step = TrainingStep(
        rank,
        ranks,
        schedule,
        programs,
        models,
        roles.channels,
        1.0,
        progress,
    )
    actor_share, critic_share = ranks.shape.shares
    counts = {"actor": microbatches, "critic": actor_share.pipelines * microbatches // critic_share.pipelines}
    return Pair(step, roles, ranks, schedule, programs, counts)
