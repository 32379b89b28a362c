"""A start that reads models longer than trainer.hang_seconds is no hang: every tensor that is read is progress."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from testkit.tiny import write_checkpoint
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlhfuse.config.settings import ParallelConfig, RunConfig
from rlhfuse.config.spec import ModelSpec, ParallelLayout
from rlhfuse.models import hf
from rlhfuse.monitor.heartbeat import Heartbeat, Limits, PeerTable, ProcessName
from rlhfuse.parallel.device import Device
from rlhfuse.run.rank_models import ModelFolders, build_models
from rlhfuse.schedule.ir.ranks import rank_map

HANG_SECONDS = 600.0
READ_SECONDS = 250.0  # of one tensor
TASKS = ("actor_train", "critic_train", "generation", "inference")
SCORING = ("reference_inference", "reward_inference", "critic_inference")


@pytest.fixture
def one_rank():
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_start_from_a_slow_disk_goes_on(tmp_path, monkeypatch, one_rank):
    """The clock is the test's; the verdict is the watchdog's, asked at the end of every read."""
    own, now = Heartbeat(0, ProcessName.own(), 0, 0, "start"), 0.0
    table, verdicts = PeerTable(own, Limits(hang_seconds=HANG_SECONDS), now), []

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
    config = RunConfig(parallel=ParallelConfig(**dict.fromkeys((*TASKS, *SCORING), "d1t1p1")))
    config = config.with_(trainer={"dtype": "float32"})
    ranks = rank_map(dict.fromkeys(("actor", "critic"), ParallelLayout(1, 1, 1)))
    folders = ModelFolders(paths, {role: ModelSpec.from_config(path) for role, path in paths.items()})
    build_models(config, folders, ranks, 0, Device(torch.device("cpu"), "fake"), progress)
    assert now > 4 * HANG_SECONDS and not any(verdicts), next(filter(None, verdicts))
    assert own.progress > len(verdicts)
