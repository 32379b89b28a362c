"""A rank that dies while samples move, and a sample without a reward: the job ends and says why.

Two real processes under the watchdog. The fault is set off by the test's own progress function.
"""

from __future__ import annotations

import os
import signal

from testkit.inter_stage_case import Case, MeanTokenReward, inter_stage, run_ranks
from testkit.workers import join

from rlhfuse.monitor.heartbeat import Limits

WORLD = 2
CASE = Case((3, 40, 30, 5, 50, 2, 60, 45), 6, layout="d2t1p1", inference="d2t1p1", step_seconds=())


def work(rank: int, port: int, models: dict, folder, fault: str) -> None:
    import torch
    import torch.distributed as dist

    from rlhfuse.monitor.watchdog import Watchdog

    torch.set_num_threads(1)
    join(port, rank, WORLD)
    store = dist.TCPStore("127.0.0.1", port)
    with Watchdog(store, rank, WORLD, Limits(hang_seconds=3600)) as watchdog:

        def progress(text: str) -> None:
            watchdog.progress(text)
            if fault == "migration" and rank == 1 and text.startswith("inter-stage: migration"):
                (folder / "struck").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "reward" and rank == 1 and text.startswith("inference: waiting for the reward"):
                (folder / "struck").touch()

        rewarder = MeanTokenReward(fails_on=1006 if fault == "reward" else None)
        case = (
            CASE
            if fault == "migration"
            else Case(
                CASE.lengths, CASE.threshold, layout=CASE.layout, inference=CASE.inference, scorers=("reference",)
            )
        )
        stage, *_ = inter_stage(
            rank,
            models,
            case,
            0,
            progress,
            rewarder if fault == "reward" else None,
            store=dist.PrefixStore("job", dist.distributed_c10d._get_default_store()),
        )
        stage.run(0, case.requests(), case.threshold, case.limits())
        dist.barrier()


def outcome(folder, fault: str) -> tuple[list[int | None], list[str]]:
    """Exit codes, and what each rank wrote."""
    codes, texts = run_ranks(work, WORLD, folder, folder, fault)
    assert (folder / "struck").exists(), texts
    return codes, texts


def test_a_rank_killed_in_the_migration_is_named_at_once(tmp_path):
    codes, texts = outcome(tmp_path, "migration")
    assert codes == [1, -signal.SIGKILL]
    line = next(line for line in texts[0].splitlines() if line.startswith("watchdog: "))
    assert line.startswith("watchdog: rank 1 (pid ") and " died; last seen in: " in line, texts[0]
    assert "inter-stage: migration" in line.partition("this is rank 0, which was in: ")[2]


def test_a_sample_without_a_reward_ends_the_job_naming_it(tmp_path):
    codes, texts = outcome(tmp_path, "reward")
    assert codes == [1, 1]
    assert "RewardError: sample 1006: a made-up failure" in "".join(texts)
