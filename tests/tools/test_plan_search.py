"""tools/plan.py --search as a program: what it prints, the files it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfuse.config.load import load_config
from rlhfuse.planning.price import CAPTURE, OFFLOAD
from rlhfuse.planning.search.table import Table
from tools.try_plans import by_phase, read_search

ROOT = Path(__file__).resolve().parents[2]


def program(*args: str, **env: str) -> subprocess.CompletedProcess:
    base = {key: value for key, value in os.environ.items() if key not in ("WORLD_SIZE", "RANK")}
    command = [sys.executable, str(ROOT / "tools/plan.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, env={**base, **env}, timeout=540)


def test_the_best_tables_are_shown_with_the_proof_and_the_same_bytes_every_time(run_yaml):
    first, again = (program("--config", run_yaml, "--search", "--top", "3", PYTHONHASHSEED=seed) for seed in "12")
    assert first.returncode == 0, first.stderr
    *lines, elapsed = first.stdout.splitlines()
    assert lines == again.stdout.splitlines()[:-1] and elapsed.startswith("CPU time: ")
    assert lines[0].startswith("searched ") and " on 4 cpu" in lines[0]
    assert "lengths are assumed" in lines[1]
    assert "no table of this space is predicted to be faster" in lines[3]
    head = next(number for number, line in enumerate(lines) if line.split()[:2] == ["seconds", "gen+inf"])
    rows = [line.split() for line in lines[head + 1 : head + 4]]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert sorted(float(row[1]) for row in rows) == [float(row[1]) for row in rows]


def test_wishes_memory_and_doubts_are_told_and_drawn(run_yaml, tmp_path):
    small = ("rollout.prompts_per_iteration=4", "rollout.samples_per_prompt=1", "--world-size", "2", "--thorough")
    done = program("--config", run_yaml, "--search", *small, "--draw", str(tmp_path / "curve.png"))
    assert done.returncode == 0, done.stderr
    for words in (
        "if you insist on",
        "serial (no fusion)",
        "trainer.memory_limit_gb=",
        "memory against time, ",
        "sure of",
    ):
        assert words in done.stdout, words
    assert "each constant of the machine 20% down or up" in done.stdout and "tools/try_plans.py" in done.stdout
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    raw = json.loads(program("--config", run_yaml, "--search", *small, "--json").stdout)
    assert {wish["wanted"].split("=")[0] for wish in raw["wishes"]} > {"serial (no fusion)", "trainer.memory_limit_gb"}
    assert raw["sensitivity"] and raw["memory"][0]["seconds"] == raw["tables"][0]["seconds"]


def test_what_is_printed_as_json_can_be_tried(run_yaml, tmp_path):
    file = tmp_path / "search.json"
    file.write_text(program("--config", run_yaml, "--search", "--json").stdout)
    raw = json.loads(file.read_text())
    world, tables = read_search(str(file))
    assert world == raw["world_size"] == 4 and len(tables) == 5
    predicted, _ = by_phase(tables[0]["parts"], [json.dumps({"timing_s/gen": 1.0})])
    rest = sum(tables[0]["parts"][name] for name in (OFFLOAD, CAPTURE))
    assert sum(predicted.values()) + rest == pytest.approx(tables[0]["seconds"])
    config = load_config(run_yaml, ["parallel.reward_inference=d1t4p1", *tables[0]["overrides"]])
    assert Table.parse(tables[0]["overrides"]).of(config) == config, "whatever layouts the file has"


def test_numbers_of_ranks_are_compared(run_yaml):
    done = program("--config", run_yaml, "--search", "--world-sizes", "2,4", "rollout.prompts_per_iteration=4")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["2", "4"]
    assert "cheapest of a sample: " in done.stdout and "fastest: " in done.stdout
    raw = program("--config", run_yaml, "--search", "--world-sizes", "2", "--json", "trainer.memory_limit_gb=0.01")
    assert raw.returncode == 2 and "lacks" in json.loads(raw.stdout)["sizes"][0]["why_not"]


def test_what_an_argument_gives_stays(run_yaml):
    done = program("--config", run_yaml, "--search", "--json", "parallel.generation=d2t2p1", "trainer.recompute=full")
    tables = [Table.parse(table["overrides"]) for table in json.loads(done.stdout)["tables"]]
    assert {(str(table.generation), table.recompute) for table in tables} == {("d2t2p1", "full")}
    assert len({table.text for table in tables}) == 5


def test_the_best_is_written_as_a_run_that_is_planned_with_that_table(run_yaml, tmp_path):
    file = tmp_path / "best.yaml"
    done = program("--config", run_yaml, "--search", "--json", "--best", str(file), "parallel.headroom=0.2")
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["tables"][0]
    config, table = load_config(file), Table.parse(best["overrides"])
    assert table.of(config) == config and config.parallel.headroom == 0.2
    assert config == load_config(run_yaml, ["parallel.headroom=0.2", *best["overrides"]])
    plan = json.loads(program("--config", str(file), "--json", "--world-size", "4").stdout)
    layouts = {task["name"]: task["layout"] for task in plan["tasks"]}
    assert layouts["generation"] == str(table.generation) and layouts["actor_train"].startswith(str(table.actor_train))
    assert plan["batch"]["actor_microbatches"] == table.microbatches


def test_the_command_that_is_named_prints_the_plan_of_the_best(run_yaml):
    done = program("--config", run_yaml, "--search")
    line = next(line for line in done.stdout.splitlines() if line.startswith("plan of the best: "))
    plan = program(*line.split("tools/plan.py ")[1].split(), "fusion.search_seconds=0.2")
    assert plan.returncode == 0 and "plan for 4 ranks" in plan.stdout, plan.stderr


@pytest.mark.parametrize(
    "args, message",
    [
        (("--top", "3"), "--top is of a search; add --search"),
        (("--best", "best.yaml"), "--best is of a search; add --search"),
        (("--search", "--problem", "problem.json"), "--problem is of one plan, --search of many"),
        (("--thorough",), "--thorough is of a search; add --search"),
        (("--world-sizes", "2,4"), "--world-sizes is of a search; add --search"),
        (("--search", "--world-sizes", "2,4", "--best", "a.yaml"), "--best is of one number of ranks; leave"),
        (("--search", "--world-sizes", "2", "--world-size", "2"), "--world-size and --world-sizes are given"),
        (("--search", "--world-sizes", "2,0"), "--world-sizes: 0 ranks run nothing; give 1"),
        (("--search", "--top", "0"), "--top 0 shows nothing; give 1 or more"),
        (("--search", "--best", "/none/best.yaml"), "cannot write /none/best.yaml"),
        (("--search", "trainer.memory_limit_gb=0.01"), "lacks"),
        (("--search", "parallel.generation=d2t1p1"), "parallel.generation=d2t1p1: dp(2)"),
    ],
)
def test_what_does_not_go_together_ends_with_2_and_one_line(run_yaml, args, message):
    done = program("--config", run_yaml, *args)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1
