"""The best tables of a search run as users' jobs do; what cannot be tried is refused before anything is launched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "generation and inference": 0.5,
    "schedules of training": 0.25,
    "optimizer steps": 0.125,
    "weight moves": 0.0625,
}
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


def try_plans(search: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/try_plans.py", "--config", "examples/quickstart.yaml", "--search", str(search)]
    return subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=540)


@pytest.mark.slow
def test_tables_run_and_are_measured_by_phase(tmp_path):
    out = tmp_path / "tried"
    done = try_plans(search_file(tmp_path, ["d1t1p2", "d2t1p1"]), "--out", str(out), "--iterations", "2", *SMALL)
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
    ],
)
def test_what_cannot_be_tried_ends_with_2(tmp_path, words, message):
    done = try_plans(search_file(tmp_path, ["d1t1p2"]), "--out", str(tmp_path / "out"), *words)
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "out").exists(), done.stderr


def test_files_without_tables_and_folders_that_exist_are_refused(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    done = try_plans(tmp_path / "other.json", "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and "holds no tables; write it with tools/plan.py --search --json" in done.stderr
    done = try_plans(search_file(tmp_path, ["d1t1p2"]), "--out", str(tmp_path))
    assert done.returncode == 2 and "exists; give another name" in done.stderr


def test_a_table_that_fails_ends_it_with_the_end_of_its_log(tmp_path):
    search = search_file(tmp_path, ["d1t1p2"])
    done = try_plans(search, "--out", str(tmp_path / "out"), "--launcher", f"{sys.executable} -c 'exit(3)'")
    assert done.returncode not in (0, 2) and "ended with 3" in done.stderr
