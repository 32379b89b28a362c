"""A reward function that fails in a run of two ranks ends all of it, with one line that names function and sample."""

from __future__ import annotations

import json
import re

import psutil
import pytest
from testkit.programs import ended
from testkit.tiny import write_run

from rlhfuse.data.sampler import sample_origin

FUNCTIONS = """
import time

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
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, said, iteration",
    [
        ("fails_later", "raised OverflowError: not today", 1),
        ("never", "no result after 3 s (reward.timeout_seconds)", 0),
    ],
)
def test_the_job_ends_with_one_line(programs, tmp_path, name, said, iteration):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    config = write_run(tmp_path, rollout__max_response_tokens=8, fusion__inter_stage=False)
    function = f"{tmp_path}/mine.py:{name}"
    process = programs.train(
        config,
        f"reward.function={function}",
        "reward.signature=trl",
        "reward.path=''",
        "algorithm.name=rloo",
        "reward.timeout_seconds=3",
    )
    out = ended(process)
    assert process.returncode == 1, out
    (error,) = [line for line in out.splitlines() if line.startswith("error: ")]  # though both instances may meet one
    where = rf"error: reward function {re.escape(function)}, samples (\d+) to \d+ of {tmp_path}/prompts.jsonl:\d+: "
    last = re.escape("; no checkpoint was saved: start again with trainer.resume=auto")
    match = re.fullmatch(rf"{where}{re.escape(said)}.*{last}", error)
    assert match and sample_origin(int(match[1]))[0] == iteration, out
    assert re.fullmatch(rf"  traceback : .*{re.escape(said)}.*", out.splitlines()[-2]), out
    assert 'train_ppo.py", line' not in out  # a traceback of ours; torchrun prints one of its own
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    assert [row["iteration"] for row in rows] == list(range(iteration))
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]
