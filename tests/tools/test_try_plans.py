"""The best tables of a search run as users' jobs do; what cannot be tried is refused before anything is launched."""

import json
import sys
from pathlib import Path

import pytest
from testkit.paths import ROOT
from testkit.programs import call_tool

QUICKSTART = "examples/quickstart.yaml"
NAMES = ("generation and inference", "schedules of training", "optimizer steps", "weight moves")
PARTS = dict(zip(NAMES, (0.5, 0.25, 0.125, 0.0625)))
SMALL = ["rollout.prompts_per_iteration=8", "rollout.max_response_tokens=16", "fusion.search_seconds=0.2"]


def search_file(folder: Path, layouts: list[str]) -> Path:
    tables = []
    for train in layouts:
        rows = [f"parallel.{role}_train={train}" for role in ("actor", "critic")]
        rows += [f"parallel.{task}=d2t1p1" for task in ("generation", "inference")]
        tables.append({"overrides": rows, "parts": PARTS})
    file = folder / "search.json"
    file.write_text(json.dumps({"world_size": 2, "tables": tables}))
    return file


@pytest.mark.slow
def test_tables_run_and_are_measured_by_phase(programs, tmp_path):
    out, search = tmp_path / "tried", search_file(tmp_path, ["d1t1p2", "d2t1p1"])
    words = ("--config", QUICKSTART, "--search", search, "--out", out, "--iterations", 2)
    done = programs.tool("try_plans", *words, *SMALL)
    assert done.returncode == 0, done.stderr
    tables = json.loads((out / "tried.json").read_text())["tables"]
    assert len(tables) == 2
    for number, table in enumerate(tables, start=1):
        assert table["predicted"] == {"gen+infer": 0.5, "train": 0.375, "moves": 0.0625}
        assert all(seconds > 0 for seconds in table["measured"].values())
        assert table["seconds"][1] == pytest.approx(sum(table["measured"].values()))
        assert (out / str(number) / "costs.json").exists(), "prices later plans"
        assert not (out / str(number) / "checkpoints").exists()
    assert "fastest" in done.stdout and "off by" in done.stdout


@pytest.mark.parametrize(
    "words, message",
    [
        (["--iterations", "1"], "--top 3 --iterations 1 --skip 1 leave nothing to measure"),
        (["rollout.nothing=1"], "rollout.nothing"),
        (["--out", "."], "exists; give another name"),
        (["--search", "EMPTY"], "holds no tables; write it with tools/plan.py --search --json"),
    ],
)
def test_what_cannot_be_tried_ends_with_2(tmp_path, words, message):
    (tmp_path / "other.json").write_text("{}")
    words = [str(tmp_path / "other.json") if word == "EMPTY" else word for word in words]
    search, out = search_file(tmp_path, ["d1t1p2"]), tmp_path / "out"
    done = call_tool("try_plans", "--config", ROOT / QUICKSTART, "--search", search, "--out", out, *words)
    assert done.returncode == 2 and message in done.stderr and not out.exists(), done.stderr


def test_a_table_that_fails_ends_it_with_the_end_of_its_log(programs, tmp_path):
    search, launcher = search_file(tmp_path, ["d1t1p2"]), f"{sys.executable} -c 'exit(3)'"
    words = ("--config", QUICKSTART, "--search", search, "--out", tmp_path / "out")
    done = programs.tool("try_plans", *words, "--launcher", launcher)
    assert done.returncode not in (0, 2) and "ended with 3" in done.stderr
