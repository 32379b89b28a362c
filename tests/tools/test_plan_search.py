"""tools/plan.py --search: what it prints, and the files it writes; what it refuses is in test_plan.py."""

from __future__ import annotations

import json

import pytest
from test_plan import plan

from rlhfuse.config.load import load_config
from rlhfuse.planning.price import CAPTURE, OFFLOAD
from rlhfuse.planning.search.table import Table
from tools.try_plans import by_phase, read_search


def test_the_best_tables_are_shown_with_the_proof_and_the_same_bytes_every_time(programs, run_yaml):
    words = ("plan", "--config", run_yaml, "--search", "--top", 3)
    first, again = (programs.tool(*words, PYTHONHASHSEED=seed) for seed in "12")
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
    done = plan(run_yaml, "--search", *small, "--draw", tmp_path / "curve.png")
    told = ("if you insist on", "serial (no fusion)", "trainer.memory_limit_gb=", "memory against time, ", "sure of")
    assert [words for words in told if words not in done.stdout] == []
    assert "each constant of the machine 20% down or up" in done.stdout and "tools/try_plans.py" in done.stdout
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    raw = json.loads(plan(run_yaml, "--search", *small, "--json").stdout)
    assert {wish["wanted"].split("=")[0] for wish in raw["wishes"]} > {"serial (no fusion)", "trainer.memory_limit_gb"}
    assert raw["sensitivity"] and raw["memory"][0]["seconds"] == raw["tables"][0]["seconds"]


def test_what_is_printed_as_json_can_be_tried(run_yaml, tmp_path):
    file = tmp_path / "search.json"
    file.write_text(plan(run_yaml, "--search", "--json").stdout)
    raw = json.loads(file.read_text())
    world, tables = read_search(str(file))
    assert world == raw["world_size"] == 4 and len(tables) == 5
    predicted, _ = by_phase(tables[0]["parts"], [json.dumps({"timing_s/gen": 1.0})])
    rest = sum(tables[0]["parts"][name] for name in (OFFLOAD, CAPTURE))
    assert sum(predicted.values()) + rest == pytest.approx(tables[0]["seconds"])
    config = load_config(run_yaml, ["parallel.reward_inference=d1t4p1", *tables[0]["overrides"]])
    assert Table.parse(tables[0]["overrides"]).of(config) == config, "whatever layouts the file has"


def test_numbers_of_ranks_are_compared(run_yaml):
    done = plan(run_yaml, "--search", "--world-sizes", "2,4", "rollout.prompts_per_iteration=4")
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["2", "4"], done.stderr
    assert "cheapest of a sample: " in done.stdout and "fastest: " in done.stdout
    raw = plan(run_yaml, "--search", "--world-sizes", "2", "--json", "trainer.memory_limit_gb=0.01")
    assert raw.returncode == 2 and "lacks" in json.loads(raw.stdout)["sizes"][0]["why_not"]


def test_what_an_argument_gives_stays(run_yaml):
    done = plan(run_yaml, "--search", "--json", "parallel.generation=d2t2p1", "trainer.recompute=full")
    tables = [Table.parse(table["overrides"]) for table in json.loads(done.stdout)["tables"]]
    assert {(str(table.generation), table.recompute) for table in tables} == {("d2t2p1", "full")}
    assert len({table.text for table in tables}) == 5


def test_the_best_is_written_as_a_run_that_is_planned_with_that_table(run_yaml, tmp_path):
    file = tmp_path / "best.yaml"
    best = json.loads(plan(run_yaml, "--search", "--json", "--best", file, "parallel.headroom=0.2").stdout)["tables"][0]
    config, table = load_config(file), Table.parse(best["overrides"])
    assert table.of(config) == config and config.parallel.headroom == 0.2
    assert config == load_config(run_yaml, ["parallel.headroom=0.2", *best["overrides"]])
    found = json.loads(plan(file, "--json", "--world-size", "4").stdout)
    layouts = {task["name"]: task["layout"] for task in found["tasks"]}
    assert layouts["generation"] == str(table.generation) and layouts["actor_train"].startswith(str(table.actor_train))
    assert found["batch"]["actor_microbatches"] == table.microbatches


def test_the_command_that_is_named_prints_the_plan_of_the_best(run_yaml):
    told = plan(run_yaml, "--search").stdout.splitlines()
    line = next(line for line in told if line.startswith("plan of the best: "))
    option, file, *words = line.split("tools/plan.py ")[1].split()
    assert option == "--config" and "plan for 4 ranks" in plan(file, *words, "fusion.search_seconds=0.2").stdout
