"""The training program as a user starts it, torchrun with two ranks: exit codes, messages, and what failures leave."""

import os
import re
from pathlib import Path

import psutil
import pytest
from testkit.programs import KILLED, ended, eventually, ranks_of
from testkit.tiny import write_run

from rlhfuse.base.sample_ids import sample_origin
from rlhfuse.monitor.metrics import read_metrics
from rlhfuse.monitor.run_lock import RunLock

FUNCTIONS = """
import os, time

calls = 0

def fails_later(completions):
    global calls
    calls += 1
    if calls > 2:  # an instance has 2 prompts of an iteration
        print("about to fail")
        raise OverflowError("not today")
    return [0.5] * len(completions)

def never(completions):
    time.sleep(1e6)

def slow_on_one_rank(completions):
    if os.environ["RANK"] == "0":
        time.sleep(6 * len(completions))  # 8 samples: 48 s, more than HANG_SECONDS, while rank 1 waits in a collective
    return [float(len(text)) for text in completions]
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return write_run(tmp_path, rollout__max_response_tokens=8)


def by_function(config: Path, name: str) -> tuple[str, ...]:
    function = f"reward.function={config.parent}/mine.py:{name}"
    return function, "reward.signature=trl", "reward.path=''", "algorithm.name=rloo", "fusion.inter_stage=false"


def error_lines(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("error: ")]


def test_a_second_run_in_the_same_folder_leaves_with_2(programs, config, tmp_path):
    (tmp_path / "run").mkdir()
    with RunLock(tmp_path / "run"):
        process = programs.train(config, "fusion.intra_stage=false")
        out = ended(process)
    (line,) = error_lines(out)
    assert process.returncode == 1 and "exitcode  : 2" in out, out  # torchrun's own, and the program's
    assert re.search(rf"{tmp_path}/run belongs to a run that is alive, pid {os.getpid()}", line)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_rank_killed_in_training_is_named_beside_the_others_instructions(programs, config):
    """Rank 1 dies in the actor's second backward; rank 0 waits for something of it, by name; nobody is left."""
    moment = "1 one 1 training instruction .*actor:1B1$"
    process = programs.train(config, "fusion.threshold=16", programs=(KILLED,), KILL_AT=moment)
    ranks: dict[int, int] = {}
    eventually(lambda: ranks.update(ranks_of(process.pid)) or len(ranks) == 2 or process.poll() is not None)
    out = ended(process)
    assert process.returncode != 0
    line = next((line for line in out.splitlines() if line.startswith("watchdog: ")), out)
    instruction = r"training instruction \d+: (\S+)(?: waits for (.+))?"
    dead = rf"watchdog: rank 1 \(pid {ranks[1]} on \S+\) died; last seen in: .*"
    found = re.fullmatch(f"{dead}; this is rank 0, which was in: {instruction}", line)
    assert found, out
    computes = re.search(r":\d+[FBW]\d+$", found[1])  # it has not come to where it waits for its peer
    assert computes or found[1].endswith(">1") or "<1" in (found[2] or "") or found[1].endswith("ST"), out
    assert "  rank 1 (pid" in out and not any(map(psutil.pid_exists, ranks.values()))


NEVER_STEPPED = "iteration 0: .*micro-batch 0: the loss.*no model stepped"  # by a step of such a critic: values are NaN
FAILING = {
    "fails_later": ((), "raised OverflowError: not today", 1),
    "never": (("reward.timeout_seconds=3",), re.escape("no result after 3 s (reward.timeout_seconds)"), 0),
    "": (("critic.optim.lr=1e37", "trainer.save_every=1", "fusion.inter_stage=false"), NEVER_STEPPED, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("function, settings, said, iteration", [(name, *more) for name, more in FAILING.items()])
def test_a_failure_ends_the_job_with_one_line(programs, config, tmp_path, function, settings, said, iteration):
    """Losses that are not finite; a reward function that raises or takes too long, which both instances may meet."""
    process = programs.train(config, *(by_function(config, function) if function else ()), *settings)
    out = ended(process)
    assert process.returncode == 1, out
    (error,) = error_lines(out)
    if function:
        where = rf"{tmp_path}/mine.py:{function}, samples (\d+) to \d+ of {tmp_path}/prompts.jsonl:\d+: {said}"
        found = re.match(f"error: reward function {where}", error)
        assert found and sample_origin(int(found[1]))[0] == iteration, out
    assert re.fullmatch(rf"error: .*{said}.*; no checkpoint was saved: start again with trainer.resume=auto", error), (
        out
    )
    assert re.fullmatch(rf"  traceback : .*{said}.*", out.splitlines()[-2]), out
    assert 'train_ppo.py", line' not in out  # a traceback of ours; torchrun prints one of its own
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    assert [row["iteration"] for row in rows] == list(range(iteration))
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]


HANG_SECONDS = 40


@pytest.mark.slow
def test_rewards_slower_than_hang_seconds_are_no_hang(programs, config):
    limits = f"trainer.hang_seconds={HANG_SECONDS}", "trainer.watchdog_seconds=30", "reward.timeout_seconds=30"
    settings = (*limits, *by_function(config, "slow_on_one_rank"), "trainer.iterations=1", "fusion.search_seconds=1")
    programs.trained(config, *settings)
