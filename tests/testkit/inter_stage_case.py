"""Generation with inference on one rank of a test: models built once for each layout, then iteration after iteration.

`iterate` runs on a rank of `Workers` and returns the digest of all that came out, and what happened.
"""

import hashlib
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhfuse.base.errors import RewardError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.fusion.inter.request import Request
from rlhfuse.gen.core.sequence import SamplingParams
from rlhfuse.tasks.instance_limits import InstanceLimits, SampleMoveCost
from rlhfuse.tasks.placement import instances_per_worker
from rlhfuse.tasks.role import role_named
from rlhfuse.tasks.task import ModelTask
from testkit.programs import eventually
from testkit.tiny import write_checkpoint

BY_KV = SampleMoveCost(1, 0.0, 0.0, 1.0, 1.0)
BY_TOKENS = SampleMoveCost(1, 1.0, 1.0, 0.0, 0.0)
SCORERS = ("reference", "critic", "reward")
BLOCK_TOKENS = 8
TINY = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=32,
    vocab_size=64,
    max_position_embeddings=256,
)


@dataclass(frozen=True)
class Case:
    """One iteration: what is generated, when instances are freed, and what is odd about the ranks."""

    lengths: tuple[int, ...]
    threshold: int = 0
    by: str = "kv"
    layout: str = "d4t1p1"
    inference: str = "d4t1p1"
    reward: str = ""  # layout of the reward model; else as the others
    scorers: tuple[str, ...] = SCORERS
    function_reward: bool = False
    blocks: int = 80
    bucket_bytes: int = 64 << 20
    one_prompt: bool = False
    in_step: bool = False  # instances decode step by step together, and nobody misses the trigger
    bs_max: int = 8
    score_tokens: int = 64
    early_models: int = 0
    guesses: bool = True  # else a step is a token

    def requests(self) -> list[Request]:
        prompts = [tuple(range(3, 23 if self.one_prompt else 6 + i % 4)) for i in range(len(self.lengths))]
        return [
            Request(1000 + i, prompt, SamplingParams(max_tokens=n, seed=7, ignore_eos=True))
            for i, (n, prompt) in enumerate(zip(self.lengths, prompts))
        ]

    def limits(self) -> InstanceLimits:
        return InstanceLimits(
            max_sequences=self.bs_max,
            kv_capacity_bytes=1000.0,
            kv_bytes_per_token=0.1,
            block_tokens=BLOCK_TOKENS,
            bs_max=self.bs_max,
            max_prompt_tokens=20,
            max_output_tokens=80,
            move_cost=BY_KV if self.by == "kv" else BY_TOKENS,
            score_tokens=self.score_tokens,
            instances_per_worker=instances_per_worker(self.tasks),
        )

    @property
    def tasks(self) -> list[ModelTask]:
        rows = {"generation": self.layout, **{f"{role}_inference": self.inference for role in SCORERS}}
        rows["reward_inference"] = self.reward or self.inference
        return [ModelTask.of(name, ParallelLayout.parse(text), 4) for name, text in rows.items()]


def write_models(base: Path) -> dict[str, Path]:
    return {
        role: write_checkpoint(base / role, seed=seed, scalar_head=role in ("critic", "reward"), **TINY)
        for seed, role in enumerate(("actor", "reference", "critic", "reward"), 1)
    }


class MeanTokenReward:
    """A reward function: the mean token of the response."""

    def __init__(self, fails_on: int | None = None) -> None:
        self._scores: dict[int, float] = {}
        self._fails_on = fails_on
        self.calls = 0

    def submit(self, rollouts) -> None:
        self.calls += 1
        self._scores |= {r.sample_id: sum(r.response_tokens) / len(r.response_tokens) for r in rollouts}

    def meet(self, meeting) -> None:
        assert len(meeting.finished) + len(meeting.unfinished) == sum(map(len, meeting.began))

    def finish(self) -> dict[int, float]:
        if self._fails_on in self._scores:
            raise RewardError(f"sample {self._fails_on}: a made-up failure")
        scores, self._scores = self._scores, {}
        return scores

    def take_calls(self) -> tuple[int, int, float]:
        return self.calls, 1, 0.0


@dataclass
class Built:
    """One layout's groups and models on this rank."""

    rank: int
    placement: Any
    engine: Any
    frozen: dict[str, Any]
    tp_group: Any
    worker_group: Any
    maker: Any


_BUILT: dict[tuple, Built] = {}  # of this worker process


def built(rank: int, folders: dict[str, Path], case: Case) -> Built:
    key = case.layout, case.inference, case.reward, case.blocks
    if key not in _BUILT:
        _BUILT[key] = build(rank, folders, case)
    return _BUILT[key]


def clean_up(rank: int) -> None:
    """Give up all groups, in the same order on all ranks."""
    for made in _BUILT.values():
        made.maker.close()
    _BUILT.clear()


def build(rank: int, folders: dict[str, Path], case: Case) -> Built:
    from rlhfuse.fusion.inter.inference import FrozenModel
    from rlhfuse.gen.engine import Engine, EngineOptions
    from rlhfuse.models.build import build_model
    from rlhfuse.models.stage import PipelineStage
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.parallel.groups import GroupMaker, plain_grid
    from rlhfuse.parallel.offload import OffloadedWeights
    from rlhfuse.run.rank_models import load_part
    from rlhfuse.tasks.placement import Placement

    device = choose_device("cpu", 0, 1)
    maker = GroupMaker(600)
    grids = {task.role: plain_grid(task.layout) for task in case.tasks}
    placement = Placement.of(case.tasks)
    specs = {role: ModelSpec.from_config(path) for role, path in folders.items()}

    def model_of(role: str):
        head = role in ("critic", "reward")
        groups = maker.for_model(role, grids[role], rank)
        spec, grid = specs[role], grids[role]
        model = build_model(spec, grid, groups, rank, scalar_head=head, dtype=torch.float32, device=device)
        load_part(model, folders[role], spec, grid, rank, head)
        return model.requires_grad_(False), groups.tp

    def frozen(role: str) -> FrozenModel:
        model, group = model_of(role)
        offloaded = OffloadedWeights(model, device)
        offloaded.offload()
        stage = PipelineStage(model, first=True, last=True, scalar_head=role != "reference")
        return FrozenModel(stage, offloaded, group, grids[role].layout.tp)

    actor, tp_group = model_of("actor")
    engine = Engine(
        specs["actor"],
        dict(actor.named_parameters()),
        EngineOptions(num_blocks=case.blocks, block_tokens=BLOCK_TOKENS, draft_rows=16),  # no clock decides
        tp_group=tp_group if dist.get_world_size(tp_group) > 1 else None,
    )
    engine.pause()
    models = {role: frozen(role) for role in SCORERS}
    worker_group = maker.own("tp", placement.workers, rank)
    return Built(rank, placement, engine, models, tp_group, worker_group, maker)


def inter_stage(rank, folders, case, number, progress=lambda _: None, rewarder=None, store=None):
    """(what runs the iteration, its scorer, what was built)."""
    from rlhfuse.fusion.inter.inference import Scorer
    from rlhfuse.fusion.inter.inter_stage import InterStage
    from rlhfuse.fusion.inter.rank_place import RankPlace

    made = built(rank, folders, case)
    scorer = Scorer(
        {role_named(role): made.frozen[role] for role in SCORERS if role in case.scorers},
        vocab=64,
        temperature=1.0,
        device=torch.device("cpu"),
    )
    store = store or dist.PrefixStore(f"test{number}", dist.distributed_c10d._get_default_store())
    stage = InterStage(
        place=RankPlace(rank, made.placement, made.tp_group, made.worker_group),
        engine=made.engine,
        scorer=scorer,
        store=store,
        timeout_seconds=540,
        progress=progress,
        bucket_bytes=case.bucket_bytes,
        rewarder=rewarder,
        early_models=case.early_models,
    )
    made.engine.resume()
    return stage, scorer, made


class InStep:
    """The engine's steps, each begun when all ranks have come to it that decode so long, and know who has finished.

    So all see the trigger at the same step, or some at the next one, when the first have left for the barrier.
    """

    def __init__(self, rank: int, made: Built, case: Case, store: dist.Store) -> None:
        from rlhfuse.tasks.packing import split_samples

        instances = made.placement.instances
        parts = split_samples(len(case.lengths), len(instances))
        self._decoding = sum(len(ranks) for ranks, part in zip(instances, parts) if part)
        self._leads = rank == instances[made.placement.instance_of(rank)][0]
        self._engine, self._step, self._store, self._number = made.engine, made.engine.step, store, 0

    def step(self) -> list:
        here = f"step {self._number}"
        self._number += 1
        self._store.add(here, 1)
        eventually(lambda: self._count("left") or self._count(here) + self._count("idle") >= self._decoding)
        if self._leads:
            eventually(lambda: reporter().finished >= self._count("ended"))
        results = self._step()
        self._store.add("ended", len(results) if self._leads else 0)
        self._store.add("idle", int(not self._engine.has_unfinished()))
        return results

    def _count(self, key: str) -> int:
        return self._store.add(key, 0)


def reporter() -> Any:
    """The StoreReporter that is at work on this rank."""
    (running,) = (thread for thread in threading.enumerate() if thread.name == "store-reporter")
    return running._target.__self__


def iterate(rank: int, folders: dict[str, Path], case: Case, number: int, disturb: Callable | None = None) -> dict:
    """One iteration; `disturb(stage, scorer, built, case, store)` may get in the way before it begins."""
    from rlhfuse.fusion.inter import inter_stage as inter_stage_module
    from rlhfuse.fusion.inter.migration import execute_migration

    rewarder = MeanTokenReward() if case.function_reward else None
    store = dist.PrefixStore(f"test{number}", dist.distributed_c10d._get_default_store())

    def progress(text: str) -> None:
        if text.startswith("inter-stage: barrier"):
            store.add("left", 1)

    stage, scorer, made = inter_stage(rank, folders, case, number, progress, rewarder, store)
    engine, guesser = made.engine, made.engine.loop.guesser
    engine.loop.guesser = guesser if case.guesses else None
    if case.in_step:
        engine.step = InStep(rank, made, case, store).step
    try:
        if disturb:
            disturb(stage, scorer, made, case, store)
        dist.barrier()  # all begin together: who is kept waiting for a moment has not missed the trigger
        report = stage.run(0, case.requests(), case.threshold, case.limits())
    finally:
        engine.__dict__.pop("step", None)
        engine.loop.guesser, inter_stage_module.execute_migration = guesser, execute_migration
        for model in made.frozen.values():
            model.offloaded.__dict__.pop("load", None)
    assert engine._cache is None and not any(model.offloaded.loaded for model in made.frozen.values())
    assert not engine.has_unfinished()
    engine.scheduler.check_integrity()
    said = sorted(report.function_scores.items())
    sha = hashlib.sha256(
        b"".join(pickle.dumps(rollout) for rollout in report.rollouts) + repr(said).encode()
    ).hexdigest()
    return {
        "digest": sha,
        "report": replace(report, rollouts=[]),
        "rollouts": report.rollouts,
        "lengths": [len(r.response_tokens) for r in report.rollouts],
        "plan": str(report.plan),
        "block_bytes": engine.spec.kv_bytes_per_token(4) * BLOCK_TOKENS,
        "submitted": rewarder.calls if rewarder else 0,
    }
