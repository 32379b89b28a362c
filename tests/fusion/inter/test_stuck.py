"""A rank that is stuck while another idles: it is named within trainer.hang_seconds, wherever the two are.

Two real processes under the watchdog; the test's own progress function holds one of them for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

import pytest
from gloo import host_store, join
from inter_stage_case import Case, inter_stage, write_models

from rlhfuse.monitor.heartbeat import Limits

WORLD, HANG_SECONDS = 2, 6.0
CASE = Case((3, 40, 30, 5, 50, 2, 60, 45), layout="d2t1p1", inference="d2t1p1")
PLACES = {  # R_t, and at which words a rank is stuck
    "generation": (0, "generation: step 5,"),
    "tail": (6, "generation of the long tail"),
    "scoring": (0, "inference: 0 of"),
    "fused scoring": (6, "inference: pack"),
}


def work(rank: int, port: int, folder, models: dict, place: str) -> None:
    os.dup2(os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    import torch
    import torch.distributed as dist

    from rlhfuse.monitor.watchdog import Watchdog

    torch.set_num_threads(1)
    join(port, rank, WORLD)
    threshold, words = PLACES[place]
    case = Case(CASE.lengths, threshold, layout=CASE.layout, inference=CASE.inference)

    def progress(text: str) -> None:
        watchdog.progress(text)
        if text.startswith(words) and (rank == 1 or threshold):
            with open(folder / "stuck", "a") as stuck:
                stuck.write(f"{rank} {os.getpid()}\n")
            time.sleep(1e6)

    jobs = dist.PrefixStore("job", dist.distributed_c10d._get_default_store())
    stage, *_ = inter_stage(rank, models, case, 0, store=jobs)
    stage.run(0, case.requests(), case.threshold, case.limits())  # compiles, which may take longer
    stage, *_ = inter_stage(rank, models, case, 0, progress, store=jobs)
    dist.barrier()
    limits = Limits(hang_seconds=HANG_SECONDS, interval_seconds=0.2)
    with Watchdog(dist.TCPStore("127.0.0.1", port), rank, WORLD, limits) as watchdog:
        stage.run(1, case.requests(), case.threshold, case.limits())


@pytest.mark.parametrize("place", PLACES)
def test_a_stuck_rank_beside_an_idle_one_is_named(tmp_path, place):
    models = write_models(tmp_path / "models")
    store = host_store()
    context = multiprocessing.get_context("forkserver")  # loads torch and Megatron once, not once per rank
    context.set_forkserver_preload(["rlhfuse.fusion.inter.inter_stage", "rlhfuse.run.rank_models"])
    ranks = [context.Process(target=work, args=(rank, store.port, tmp_path, models, place)) for rank in range(WORLD)]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        texts = [(tmp_path / f"stderr{rank}").read_text() for rank in range(WORLD)]
        assert [process.exitcode for process in ranks] == [1, 1], texts
    finally:
        for process in ranks:
            process.kill()
            process.join()
    said = [line for text in texts for line in text.splitlines() if line.startswith("watchdog: no rank made progress")]
    assert len(said) == WORLD, texts
    for line in (tmp_path / "stuck").read_text().splitlines():
        rank, pid = line.split()
        assert all(f"rank {rank} (pid {pid} on " in text.partition("; this is rank")[0] for text in said), texts
