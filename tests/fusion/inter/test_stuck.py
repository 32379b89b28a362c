"""A rank that is stuck while another idles: it is named within trainer.hang_seconds, wherever the two are.

Two real processes under the watchdog; the test's own progress function holds one of them for ever.
"""

from __future__ import annotations

import os
import time

import pytest
from testkit.inter_stage_case import Case, inter_stage, run_ranks
from testkit.workers import join

from rlhfuse.monitor.heartbeat import Limits

WORLD, HANG_SECONDS = 2, 6.0
CASE = Case((3, 40, 30, 5, 50, 2, 60, 45), layout="d2t1p1", inference="d2t1p1")
PLACES = {  # R_t, and at which words a rank is stuck
    "generation": (0, "generation: step 5,"),
    "tail": (6, "generation of the long tail"),
    "scoring": (0, "inference: 0 of"),
    "fused scoring": (6, "inference: pack"),
}


def work(rank: int, port: int, models: dict, folder, place: str) -> None:
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
    codes, texts = run_ranks(work, WORLD, tmp_path, tmp_path, place)
    assert codes == [1, 1], texts
    said = [line for text in texts for line in text.splitlines() if line.startswith("watchdog: no rank made progress")]
    assert len(said) == WORLD, texts
    for line in (tmp_path / "stuck").read_text().splitlines():
        rank, pid = line.split()
        assert all(f"rank {rank} (pid {pid} on " in text.partition("; this is rank")[0] for text in said), texts
