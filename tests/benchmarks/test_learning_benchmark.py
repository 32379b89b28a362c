"""The learning benchmark: its figures by hand, bad input, and one seed of each algorithm for real."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "../shared/data/stories260K-hf"

import learning  # noqa: E402


def run(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks/learning.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)


def learnt(*rewards):
    return learning.Learnt("grpo", 1, list(rewards), [None] * len(rewards), [1.0] * len(rewards), 20.0, 0.5, [])


def test_the_first_iteration_at_the_goal_counts():
    assert learnt(0.5, 0.89, 0.91, 0.7, 0.95).reached == 3 and learnt(0.9).reached == 1
    assert learnt(0.5, 0.899).reached is None
    rows = learning.markdown([learnt(*[0.1] * 9, 0.9), learnt(*[0.5] * 10)]).splitlines()
    assert rows[2].split("|")[-5].strip() == "10" and rows[3].split("|")[-5].strip() == "not reached"
    assert len({row.count("|") for row in rows}) == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--algorithms", "grpo,dpo"], "'dpo' has no example"),
        (["--seeds", "1,x"], "--seeds 1,x is no list of numbers"),
        (["--model", "nowhere"], "holds no model"),
    ],
)
def test_bad_input_is_one_line(monkeypatch, arguments, words):
    monkeypatch.setattr(sys, "argv", ["learning.py", *arguments])
    with pytest.raises(learning.InputError, match=words) as caught:
        learning.main()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not MODEL.is_dir(), reason=f"{MODEL} is not there")
def test_one_seed_of_each_learns(tmp_path):
    pytest.importorskip("vaderSentiment", reason="the sentiment reward needs the vaderSentiment package")
    finished = run("--seeds", 1, "--out", tmp_path / "learning.json", "--markdown", tmp_path / "learning.md")
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)
    assert json.loads((tmp_path / "learning.json").read_text()) == result and result["reached"]
    for one in result["runs"]:
        assert len(one["rewards"]) == 10 and one["rewards"][0] < 0.7 and one["reached"] <= 10
        assert [len(one["texts"]), len(one["kl"])] == [2, 10]
    assert [one["algorithm"] for one in result["runs"]] == ["grpo", "ppo"]
