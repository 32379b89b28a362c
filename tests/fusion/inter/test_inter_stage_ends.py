"""A rank that dies while samples move, one that is stuck while another idles, a sample without a reward, or a tool.

The job ends and says why. Two real processes under the watchdog; the fault is set off by the test's own progress
function.
"""

import os
import signal
import time
from dataclasses import replace

import pytest
from testkit.inter_stage_case import Case, MeanTokenReward, inter_stage, write_models
from testkit.own_ranks import OwnRanks, StoodClock
from testkit.scripted_tools import ScriptedTools, ToolCase

from rlhfuse.fusion.inter.tools import Answer
from rlhfuse.monitor.heartbeat import Limits

pytestmark = pytest.mark.usefixtures("programs")
WORLD = 2
CASE = Case((3, 40, 30, 5, 50, 2, 60, 45), layout="d2t1p1", inference="d2t1p1")
FAULTS = {  # R_t, which ranks meet the fault, and at which words
    "killed": (6, (1,), "inter-stage: migration"),
    "no reward": (6, (1,), "inference: waiting for the reward"),
    "stuck in generation": (0, (1,), "generation: step 5,"),
    "stuck in the tail": (6, (0, 1), "generation of the long tail"),
    "stuck in scoring": (0, (1,), "inference: 0 of"),
    "stuck in fused scoring": (6, (0, 1), "inference: pack"),
    "a tool's fault": (6, (1,), "generation: step"),
    "no answer": (0, (0, 1), "7 of 8 samples finished: 1 samples wait for tools, the first for tool f of sample 1002"),
    "no answer in the tail": (1, (0, 1), "long tail: 1 samples wait for tools, the first for tool f of sample 1002"),
}


class FaultyTools(ScriptedTools):
    def answers(self) -> list[Answer]:
        raise ConnectionError("a made-up fault of a tool")


def work(rank: int, own_store, folder, models: dict, fault: str) -> None:
    import torch.distributed as dist

    from rlhfuse.monitor import watchdog as module
    from rlhfuse.monitor.guard import Guard

    threshold, ranks, words = FAULTS[fault]
    struck, stuck, waits = folder / "struck", fault.startswith("stuck"), fault.startswith("no answer")

    def progress(text: str) -> None:
        watchdog.progress(text)
        if rank in ranks and words in text:
            with open(struck, "a") as file:
                file.write(f"{rank} {os.getpid()}\n")
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            while stuck:
                time.sleep(1)

    store = dist.PrefixStore("job", dist.distributed_c10d._get_default_store())
    case, rewarder = replace(CASE, threshold=threshold), None
    if fault == "no reward":
        case, rewarder = replace(case, scorers=("reference",)), MeanTokenReward(fails_on=1006)
    stage, *_ = inter_stage(rank, models, case, 0, progress, rewarder, store=store)
    if waits or fault == "a tool's fault":
        case = ToolCase((60,) * 8, layout="d2t1p1", inference="d2t1p1", threshold=threshold, silent=1002)
        tools = FaultyTools if not waits and rank == 1 else ScriptedTools
        object.__setattr__(stage, "tools", tools(case, store))
    module.time = StoodClock(struck.exists)  # silence before the fault is a busy machine's
    limits = Limits(hang_seconds=1.5 if stuck or waits else 3600, interval_seconds=0.2)
    with Guard(rank, 540) as guard, module.Watchdog(own_store, rank, WORLD, limits, guard) as watchdog:
        stage.run(0, case.requests(), threshold, case.limits())
        dist.barrier()


@pytest.fixture
def outcome(tmp_path):
    """Exit codes, and what each rank wrote."""

    def ended(fault: str) -> tuple[list[int | None], list[str]]:
        with OwnRanks(WORLD, tmp_path, work, write_models(tmp_path / "models"), fault) as running:
            codes = running.exit_codes()
            assert (tmp_path / "struck").exists(), running.texts
            return codes, running.texts

    return ended


def test_a_rank_killed_in_the_migration_is_named_at_once(outcome):
    codes, texts = outcome("killed")
    assert codes == [1, -signal.SIGKILL]
    line = next(line for line in texts[0].splitlines() if line.startswith("watchdog: "))
    assert line.startswith("watchdog: rank 1 (pid ") and " died; last seen in: " in line, texts[0]
    assert "inter-stage: migration" in line.partition("this is rank 0, which was in: ")[2]


def test_a_sample_without_a_reward_ends_the_job_naming_it(outcome):
    codes, texts = outcome("no reward")
    assert codes == [1, 1]
    assert "RewardError: sample 1006: a made-up failure" in "".join(texts)


def test_a_leader_whose_tools_fail_ends_the_job(outcome):
    codes, texts = outcome("a tool's fault")
    assert codes == [1, 1]
    assert "ConnectionError: a made-up fault of a tool" in texts[1] and "watchdog: rank 1" in texts[0], texts


@pytest.mark.parametrize("fault", ["no answer", "no answer in the tail"])
def test_a_tool_that_never_answers_is_named(outcome, fault):
    codes, texts = outcome(fault)
    assert codes == [1, 1], texts
    for text in texts:
        line = next(line for line in text.splitlines() if line.startswith("watchdog: no rank made progress"))
        assert " is in: generation" in line and FAULTS[fault][2] in line.partition("; this is rank")[0], texts


@pytest.mark.parametrize("fault", [name for name in FAULTS if name.startswith("stuck")])
def test_a_stuck_rank_beside_an_idle_one_is_named(outcome, tmp_path, fault):
    codes, texts = outcome(fault)
    assert codes == [1, 1], texts
    said = [line for text in texts for line in text.splitlines() if line.startswith("watchdog: no rank made progress")]
    assert len(said) == WORLD, texts
    for line in (tmp_path / "struck").read_text().splitlines():
        rank, pid = line.split()
        assert all(f"rank {rank} (pid {pid} on " in text.partition("; this is rank")[0] for text in said), texts
