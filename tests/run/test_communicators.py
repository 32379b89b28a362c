"""Groups that a start connects, on every rank, beside those whose memory the plan counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from testkit.tiny import write_checkpoint
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlhfuse.config.settings import OptimizerConfig, ParallelConfig, RunConfig
from rlhfuse.config.spec import ModelSpec, ParallelLayout
from rlhfuse.parallel.device import Device
from rlhfuse.planning.machine import rank_groups
from rlhfuse.run import rank_models
from rlhfuse.schedule.ir.ranks import rank_map

ROLES = ("actor", "critic", "reference", "reward")
SCORING = ("reference_inference", "reward_inference", "critic_inference")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    shape = dict(num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=4)
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tied", tie_word_embeddings=True, **shape)


def connected(rank: int, config: RunConfig, folder: Path, ranks, monkeypatch) -> tuple[int, int, bool]:
    """Groups of several ranks that a rank's start connects, its ends of channels, and whether the copies share one."""
    uses: list = []
    monkeypatch.setattr(rank_models, "connect", lambda found, device: uses.extend(found))
    dist.init_process_group("fake", rank=rank, world_size=ranks.size, store=FakeStore())
    try:
        folders = rank_models.ModelFolders({}, dict.fromkeys(ROLES, ModelSpec.from_config(folder)))
        models = rank_models.build_models(config, folders, ranks, rank, Device(torch.device("cpu"), "fake"))
        groups = {use.group.group_name for use in uses if dist.get_world_size(use.group) > 1}
        groups.add(dist.group.WORLD.group_name)  # connected by the launcher
        copies = {model.tp_group.group_name for model in models.frozen.values()} | {models.worker_tp.group_name}
        channels = sum(rank in pair for pair in models.channels._groups)
        return len(groups), channels, models.generation_tp.group_name in copies and len(copies) == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "actor, critic, generation, inference, optimizer, most",
    [
        # of tensor ranks, of all, of the actor's replicas and its tied ends
        ("d2t2p2", "d1t2p4", "d4t2p1", "d4t2p1", "adam", 4),
        # of two degrees of tensor ranks, of all, of both models' replicas, and of their pipelines
        ("d2t2p2", "d2t2p2", "d2t4p1", "d4t2p1", "sgd", 8),
        ("d1t1p4", "d2t1p2", "d4t1p1", "d4t1p1", "adam", 3),
    ],
)
def test_a_start_connects_what_the_plan_counts(
    folder, monkeypatch, actor, critic, generation, inference, optimizer, most
):
    layouts = {"generation": generation, "actor_train": actor, "critic_train": critic} | dict.fromkeys(
        SCORING, inference
    )
    optim = {"optim": OptimizerConfig(name=optimizer)}
    config = RunConfig(parallel=ParallelConfig(**layouts, inference=inference)).with_(
        trainer={"dtype": "float32"}, actor=optim, critic=optim
    )
    parsed = {task: ParallelLayout.parse(text) for task, text in layouts.items()}
    ranks = rank_map({role: parsed[f"{role}_train"] for role in ("actor", "critic")})
    planned = rank_groups(config, parsed, ranks, {"actor"})
    assert max(groups for groups, _ in planned.values()) == most
    for rank, counted in planned.items():
        groups, channels, shared = connected(rank, config, folder, ranks, monkeypatch)
        assert (groups, channels) == counted, rank
        assert shared == (generation == inference)
