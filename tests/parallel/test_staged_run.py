"""Whole runs whose every tensor passes through the staging of ranks that share a GPU: bit for bit those over gloo."""

import datetime
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from run_comparison import compare_runs
from testkit.runs_table import job
from testkit.tiny import write_run

LAYOUTS = {"actor_train": "d1t1p4", "critic_train": "d2t1p2", "generation": "d4t1p1"}
CUT = {"actor_train": "d2t1p2", "critic_train": "d2t2p1", "generation": "d2t2p1"}


def staged_job(rank: int, config: Path, name: str, settings: list[str]) -> None:
    """The job in a world made anew, whose groups stage what passes through them."""
    from rlhfuse.parallel import shared_gpu
    from rlhfuse.parallel.device import Device

    device = Device(torch.device("cpu"), shared_gpu.SHARED_GPU)
    if device.backend not in dist.Backend.backend_list:
        shared_gpu.register(stages=lambda tensor: True)
    store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    dist.destroy_process_group()
    again, timeout = dist.PrefixStore(name, store), datetime.timedelta(seconds=540)
    dist.init_process_group(device.process_group, store=again, rank=rank, world_size=world, timeout=timeout)
    job(rank, config, name, settings, device=device)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("staged"), fusion__threshold=16, rollout__max_response_tokens=16)


@pytest.mark.parametrize("layouts, iterations", [(LAYOUTS, 2), (CUT, 1)], ids=["pipelines", "tensor-and-data-ranks"])
def test_a_run_through_the_staging_is_the_run_over_gloo(workers, config, layouts, iterations):
    """Four ranks, both fusions, migration and resharding; then sums of tensor ranks and a sharded optimizer."""
    overrides = [f"parallel.{task}={layout}" for task, layout in layouts.items()]
    overrides += [f"trainer.iterations={iterations}", "algorithm.minibatches=1"]
    folders = [config.parent / f"{name}_{layouts['generation']}" for name in ("plain", "staged")]
    for folder, of in zip(folders, (job, staged_job)):
        workers.run(of, config, folder.name, [*overrides, f"trainer.output_dir={folder}"])
    rows = [json.loads(line) for line in (folders[1] / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == iterations and any(row["fusion/migrated_samples"] > 0 for row in rows)
    compared = compare_runs(*folders)
    assert {one.what for one in compared} >= {"export/actor", "export/critic"}
    assert not [difference for one in compared for difference in one.differences]
