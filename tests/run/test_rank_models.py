"""Models that a start builds on a rank: groups that it connects beside those that the plan counts, and its progress."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from testkit.tiny import write_checkpoint
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import OptimizerConfig, ParallelConfig, RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.machine import rank_groups
from rlhfuse.decisions.layouts import given_tasks
from rlhfuse.models import hf
from rlhfuse.monitor.heartbeat import Heartbeat, Limits, PeerTable, ProcessName
from rlhfuse.parallel.device import Device
from rlhfuse.run import rank_models
from rlhfuse.schedule.ir.ranks import rank_map

SCORING = ("reference_inference", "reward_inference", "critic_inference")


@contextmanager
def built(config: RunConfig, paths: dict, specs: dict, ranks, rank: int, *more):
    """The models of one rank among others that do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=ranks.size, store=FakeStore())
    try:
        folders = rank_models.ModelFolders(paths, specs)
        tasks = given_tasks(config.parallel, config.roles(), ranks.size)
        yield rank_models.build_models(config, tasks, folders, ranks, rank, Device(torch.device("cpu"), "fake"), *more)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "actor, critic, generation, inference, optimizer, most",
    [
        # of tensor ranks, of all twice, of the actor's replicas and its tied ends
        ("d2t2p2", "d1t2p4", "d4t2p1", "d4t2p1", "adam", 5),
        # of two degrees of tensor ranks, of all twice, of both models' replicas, and of their pipelines
        ("d2t2p2", "d2t2p2", "d2t4p1", "d4t2p1", "sgd", 9),
        ("d1t1p4", "d2t1p2", "d4t1p1", "d4t1p1", "adam", 4),
    ],
)
def test_a_start_connects_what_the_plan_counts(
    tmp_path, monkeypatch, actor, critic, generation, inference, optimizer, most
):
    layouts = {"generation": generation, "actor_train": actor, "critic_train": critic}
    layouts |= dict.fromkeys(SCORING, inference)
    optim = {"optim": OptimizerConfig(name=optimizer)}
    changes = {"trainer": {"dtype": "float32"}, "actor": optim, "critic": optim}
    config = RunConfig(parallel=ParallelConfig(**layouts, inference=inference)).with_(**changes)
    spec = ModelSpec.from_config(write_checkpoint(tmp_path, tie_word_embeddings=True, num_key_value_heads=4))
    specs = dict.fromkeys(("actor", "critic", "reference", "reward"), spec)
    parsed = {task: ParallelLayout.parse(text) for task, text in layouts.items()}
    ranks = rank_map({role: parsed[f"{role}_train"] for role in ("actor", "critic")})
    planned = rank_groups(parsed, ranks, {"actor"}, () if optimizer == "adam" else ("actor", "critic"))
    assert max(groups for groups, _ in planned.values()) == most
    uses: list = []
    monkeypatch.setattr(rank_models, "connect", lambda found, device: uses.extend(found))
    for rank, counted in planned.items():
        uses.clear()
        with built(config, {}, specs, ranks, rank) as models:
            groups = {use.group.group_name for use in uses if dist.get_world_size(use.group) > 1}
            groups.add(dist.group.WORLD.group_name)  # connected by the launcher
            copies = {model.tp_group.group_name for model in models.frozen.values()} | {
                models.place.worker_group.group_name
            }
            assert (len(groups), sum(rank in pair for pair in models.channels._groups)) == counted, rank
            shared = models.place.instance_group.group_name in copies and len(copies) == 1
        assert shared == (generation == inference)


HANG_SECONDS = 600.0
READ_SECONDS = 250.0  # of one tensor


def test_a_start_from_a_slow_disk_is_no_hang(tmp_path, monkeypatch):
    """Reading models takes longer than trainer.hang_seconds, and every tensor is progress. The clock is the test's; the
    verdict is the watchdog's, asked at the end of every read."""
    own, now = Heartbeat(0, ProcessName.own(), 0, 0, "start"), 0.0
    table, verdicts = PeerTable(own, Limits(hang_seconds=HANG_SECONDS), now, world_size=1), []

    def slow(part, self, name, *which, **more):
        nonlocal now
        found = part(self, name, *which, **more)
        now += READ_SECONDS
        table.note_own(own, now - READ_SECONDS)  # its last heartbeat was sent while this was read
        verdicts.append(table.verdict(now))
        return found

    def progress(doing: str) -> None:
        nonlocal own
        own = own.now_in(doing)

    for name in ("part", "rows"):
        read = getattr(hf._Reader, name)
        monkeypatch.setattr(hf._Reader, name, lambda *given, read=read, **more: slow(read, *given, **more))
    actor, critic = (write_checkpoint(tmp_path / name, scalar_head=name == "critic") for name in ("actor", "critic"))
    paths = {"actor": actor, "reference": actor, "critic": critic, "reward": critic}
    tasks = ("actor_train", "critic_train", "generation", "inference", *SCORING)
    config = RunConfig(parallel=ParallelConfig(**dict.fromkeys(tasks, "d1t1p1"))).with_(trainer={"dtype": "float32"})
    ranks = rank_map(dict.fromkeys(("actor", "critic"), ParallelLayout(1, 1, 1)))
    specs = {role: ModelSpec.from_config(path) for role, path in paths.items()}
    with built(config, paths, specs, ranks, 0, progress):
        assert now > 4 * HANG_SECONDS and not any(verdicts), next(filter(None, verdicts))
        assert own.progress > len(verdicts)
