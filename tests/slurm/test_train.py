"""train.sbatch on two nodes of a real SLURM: the run of one machine, also after a notice, and how a job ends."""

import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from testkit.paths import ROOT
from testkit.programs import eventually
from testkit.runs_table import Runs, assert_same_bits

pytestmark = pytest.mark.slurm
QUICKSTART = ROOT / "examples/quickstart.yaml"
SETTINGS = ("trainer.iterations=6", "rollout.max_response_tokens=128")
SETUP = f"""
export PATH={Path(sys.executable).parent}:$PATH
echo "sourced on $(hostname)"
"""


@pytest.fixture
def submit(slurm, tmp_path):
    """Submit train.sbatch for two ranks on each of two nodes; returns the job's number."""
    (tmp_path / "setup.sh").write_text(SETUP)

    def submitted(run: Path, *settings: str, **variables: str) -> str:
        own = {"RANKS_PER_NODE": "2", "RLHFUSE_SETUP": f"{tmp_path}/setup.sh", "RLHFUSE_LOGS": f"{tmp_path}/logs"}
        size = ("--nodes=2", "--gpus-per-node=0", "--cpus-per-task=2", "--time=60", f"--output={tmp_path}/%j.out")
        words = (*SETTINGS, f"trainer.output_dir={run}", *settings)
        script = ROOT / "scripts/slurm/train.sbatch"
        # NUMBA_CACHE_DIR: kernels as the other tests have compiled them
        return slurm.submit(*size, script, QUICKSTART, *words, **{**own, "NUMBA_CACHE_DIR": "", **variables})

    return submitted


def iterations(run: Path) -> list[int]:
    """Those that are written down."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return [json.loads(line)["iteration"] for line in lines]


def told(slurm, tmp_path: Path, number: str):
    """For a failure: what the script and the nodes wrote."""
    files = [*tmp_path.glob("*.out"), *tmp_path.glob("logs/*.log")]
    return "\n".join([str(slurm.job(number)), *(f"== {file.name}\n{file.read_text()[-3000:]}" for file in files)])


def notice(slurm, number: str) -> None:
    slurm.told("scancel", "--batch", "--signal=USR1", number)


def test_it_is_the_run_of_one_machine_also_where_it_was_given_notice(slurm, submit, pools, tmp_path):
    """One job: it begins, is told to stop, saves what it does, is queued again by its script, and goes on."""
    run = tmp_path / "run"
    number = submit(run)
    eventually(lambda: iterations(run), lambda: told(slurm, tmp_path, number))
    notice(slurm, number)
    eventually(lambda: slurm.job(number)["Restarts"] == "1", lambda: told(slurm, tmp_path, number))
    done = len(iterations(run))
    assert 0 < done < 6 and (run / f"checkpoints/iteration-{done}").is_dir(), told(slurm, tmp_path, number)
    assert (run / "preempted").exists() and not (run / "finished.json").exists()
    # meanwhile: SLURM waits before it begins a job again
    Runs(pools, tmp_path).start("alone", *SETTINGS, config=QUICKSTART, ranks=4)
    assert slurm.ended(number)["ExitCode"] == "0:0", told(slurm, tmp_path, number)
    assert slurm.job(number)["JobState"] == "COMPLETED" and not (run / "preempted").exists()
    assert_same_bits(tmp_path / "alone", run)
    script = (tmp_path / f"{number}.out").read_text()
    assert script.count("sourced on n0") == 2 and script.count("predicted seconds per iteration") == 2
    first, second = ((tmp_path / f"logs/node-n{node}.log").read_text() for node in (0, 1))
    assert f"stopped: {done} of 6 iterations are done" in first and f"resuming from {run}" in first
    assert "run directory" not in second


@pytest.mark.slow
def test_a_second_notice_and_scancel_end_the_ranks_at_once(slurm, submit, tmp_path):
    run, first = tmp_path / "run", tmp_path / "logs/node-n0.log"
    number = submit(run, "trainer.iterations=1000")
    eventually(lambda: iterations(run), lambda: told(slurm, tmp_path, number))
    notice(slurm, number)
    eventually(lambda: "stopping: iteration" in first.read_text(), lambda: told(slurm, tmp_path, number))
    notice(slurm, number)
    eventually(lambda: slurm.job(number)["Restarts"] == "1", lambda: told(slurm, tmp_path, number))
    assert "was terminated in: " in first.read_text() and not (run / "checkpoints").exists()
    eventually(lambda: first.read_text().count("fresh start") == 2 and iterations(run) == [0])
    slurm.told("scancel", number)
    assert slurm.ended(number)["JobState"] == "CANCELLED" and slurm.job(number)["Restarts"] == "1"
    eventually(lambda: not any("train_ppo" in words for words in slurm.processes()))
    assert not (run / "preempted").exists()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_what_ends_it_at_random_moments_changes_nothing(slurm, submit, pools, tmp_path):
    """One notice or two, SLURM's own requeue, a rank that is killed: queued or submitted again, it goes on."""
    dice, run, number = random.Random(1), tmp_path / "run", ""
    settings, ended = ("trainer.iterations=30", "trainer.save_every=1"), dict[str, int]()
    for count in range(12):
        how = ("notice", "two notices", "requeue", "kill")[count % 4]
        if not number or slurm.job(number)["JobState"] != "RUNNING":
            number = submit(run, *settings)
        eventually(lambda: slurm.job(number)["JobState"] == "RUNNING", slurm.logs)
        before, until = len(iterations(run)), dice.choice((0, 0, 1))
        eventually(lambda: len(iterations(run)) >= before + until, lambda: told(slurm, tmp_path, number))
        time.sleep(dice.uniform(0, 8) if not until else dice.uniform(0, 1))
        job = slurm.job(number)
        if job["JobState"] == "COMPLETED":
            break
        end(slurm, number, how, dice)
        ended[how] = ended.get(how, 0) + 1

        def over(number: str = number, job: dict[str, str] = job) -> bool:
            now = slurm.job(number)
            return now["JobState"] not in ("RUNNING", "COMPLETING") or now["Restarts"] != job["Restarts"]

        eventually(over, lambda: told(slurm, tmp_path, number))
        eventually(lambda: not any("train_ppo" in words for words in slurm.processes()))
        if how != "kill" and slurm.job(number)["Restarts"] != job["Restarts"]:
            eventually(lambda: slurm.job(number)["JobState"] == "RUNNING", slurm.logs)
    if slurm.job(number)["JobState"] not in ("RUNNING", "COMPLETED"):
        number = submit(run, *settings)
    assert slurm.ended(number)["ExitCode"] == "0:0", told(slurm, tmp_path, number)
    print(f"ended: {ended}")
    Runs(pools, tmp_path).start("alone", *SETTINGS, *settings, config=QUICKSTART, ranks=4)
    assert sum(ended.values()) >= 8 and not (run / "preempted").exists()
    assert_same_bits(tmp_path / "alone", run)


def end(slurm, number: str, how: str, dice: random.Random) -> None:
    if how == "requeue":
        slurm.told("scontrol", "requeue", number)
    elif how == "kill":
        node = dice.choice((0, 1))
        pids = [pid for pid in slurm.nodes.pids(node) if "train_ppo" in Path(f"/proc/{pid}/cmdline").read_text()]
        if not pids:  # it has not begun yet
            return slurm.told("scancel", number)
        os.kill(dice.choice(pids), signal.SIGKILL)
    else:
        notice(slurm, number)
        if how == "two notices":
            time.sleep(dice.uniform(0.1, 3))
            slurm.run("scancel", "--batch", "--signal=USR1", number)  # it may have ended
    return None


def test_ranks_are_asked_for_where_slurm_gives_no_gpus(slurm, submit, tmp_path):
    number = submit(tmp_path / "run", RANKS_PER_NODE="")
    assert slurm.ended(number)["ExitCode"] == "2:0"
    said = (tmp_path / f"{number}.out").read_text()
    assert re.fullmatch(r"error: RANKS_PER_NODE='' is no number of ranks: .*\n", said), said
