"""tools/calibrate_threshold.py as a program: the file it writes, the same for the same seed, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfuse.base.errors import run_program

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "../shared/data/traces/azure2023_conv.csv"


def program(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools/calibrate_threshold.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=540)


@pytest.fixture(scope="module")
def tool():
    """The program as a module: refusals are tried without starting a process each."""
    spec = importlib.util.spec_from_file_location("calibrate_threshold", ROOT / "tools/calibrate_threshold.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def lengths_csv(tmp_path: Path) -> str:
    rows = [f"{10 + i % 50},{5 + (i * i) % 37 + (220 if i % 20 == 0 else 0)}" for i in range(300)]
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return str(tmp_path / "lengths.csv")


def test_writes_threshold_json_and_a_plot(run_yaml, lengths_csv, tmp_path):  # noqa: F811
    out, plot = tmp_path / "threshold.json", tmp_path / "curve.png"
    args = ("--config", run_yaml, "--lengths", lengths_csv, "--hardware", "cpu")
    done = program(*args, "--out", str(out), "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    raw = json.loads(out.read_text())
    assert raw["instances"] == 4 and raw["samples"] == 64 and len(raw["sweep"]) == 20
    assert raw["fused_seconds"] <= 1.01 * min(point["fused_seconds"] for point in raw["sweep"])
    assert f"R_t = {raw['threshold']}" in done.stdout and "p99.9/p50" in done.stdout
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob("*.tmp"))
    again = program(*args, "--out", str(tmp_path / "again.json"))
    assert again.returncode == 0 and json.loads((tmp_path / "again.json").read_text()) == raw


def test_options(run_yaml, lengths_csv, tmp_path):  # noqa: F811
    out = tmp_path / "threshold.json"
    args = ("--config", run_yaml, "--lengths", f"{lengths_csv}:prompt_tokens", "--prompt-column", "output_tokens")
    done = program(*args, "--out", str(out), "--instances", "8", "rollout.max_response_tokens=20")
    assert done.returncode == 0, done.stderr
    raw = json.loads(out.read_text())
    assert raw["instances"] == 8 and raw["lengths"]["max"] == 20 and raw["lengths"]["clipped"] > 0


def refused(tool, capsys, *args: str) -> str:
    """The one line with which the program, run in this process, ends with exit code 2."""
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["calibrate_threshold.py", *args])
        run_program(tool.main)
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.count("\n") == 1
    return line


def test_bad_input_exits_2_and_leaves_no_file(run_yaml, lengths_csv, tmp_path, tool, capsys):  # noqa: F811
    out = tmp_path / "threshold.json"
    base = ("--config", run_yaml, "--lengths", lengths_csv, "--out", str(out))
    for args, message in (
        (("--instances", "0"), "--instances 0"),
        (("--instances", "65"), "65 instances for 64 samples"),
        (("--draws", "0"), "--draws 0"),
        *((("--draws", bad), f"--draws {bad} must be at most 1000") for bad in ("1001", "100000000")),
        (("--hardware", "abacus"), "hardware 'abacus' is not known"),
        (("--cost", "none.json"), "none.json does not exist; check the path"),
        (("--prompt-column", "x"), "no column 'x'; found: prompt_tokens, output_tokens"),
        (("--plot", "curve.bmp"), "--plot curve.bmp"),
        (("--plot", str(tmp_path / "none/curve.png")), "does not exist"),
        (("fusion.threshold=65",), "fusion.threshold=65 > 64 samples of one iteration"),
        (("--world-size", "0"), "--world-size 0"),
        (("parallel=auto",), "parallel.actor_train=auto: the number of ranks is not known; start under torchrun"),
    ):
        assert message in refused(tool, capsys, *base, *args)
        assert not out.exists() and not list(tmp_path.glob("*.tmp"))
    out.write_text("mine")
    assert "exists" in refused(tool, capsys, *base) and out.read_text() == "mine"
    assert program(*base, "--force").returncode == 0 and json.loads(out.read_text())
    assert program(*base, "--hardware", "abacus", "--force").returncode == 2


def test_layouts_that_are_auto_are_those_that_the_run_would_choose(run_yaml, lengths_csv, tmp_path, tool, capsys):
    found, given = tmp_path / "found.json", tmp_path / "given.json"

    def calibrated(*args: str) -> str:
        with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["calibrate", "--config", run_yaml, "--lengths", lengths_csv, *args])
            run_program(tool.main)
        assert ended.value.code == 0
        return capsys.readouterr().out

    out = calibrated("--out", str(found), "parallel=auto", "--world-size", "4")
    chosen = next(line for line in out.splitlines() if line.startswith("layouts of the search: "))
    layouts = [f"parallel.{word}" for word in chosen.split(": ")[1].split() if not word.startswith("actor_micro")]
    calibrated("--out", str(given), *layouts)
    assert json.loads(found.read_text()) == json.loads(given.read_text())


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.csv", "prompt_tokens,output_tokens\n5,7\n5,-3\n", ":3: output_tokens is -3; at least 1"),
        ("a.csv", "prompt_tokens,output_tokens\n-5,7\n", ":2: prompt_tokens is -5; at least 0"),
        ("a.csv", "prompt_tokens,output_tokens\n5,many\n", ":2: output_tokens is 'many'"),
        ("a.csv", "prompt_tokens,output_tokens\n5,nan\n", ":2: output_tokens is 'nan'"),
        ("a.csv", "a,b\n1,2\n", "no known column of output lengths; name it as FILE:COLUMN; found: a, b"),
        ("a.csv", "", "holds no row of lengths"),
        ("a.jsonl", '{"output_length": 3}\n{"output_length": 1.5}\n', ":2: output_length is 1.5"),
        ("a.jsonl", '{"output_length": 3}\n{"output_len\n', ":2: not valid JSON"),
        ("a.jsonl", "[" * 100_000, "a.jsonl:1: JSON nested more than"),
        ("a.jsonl", '{"output_length": ' + "9" * 5001 + "}", "a.jsonl:1: not valid JSON"),
        ("a.parquet", "PAR1", "is not a readable parquet file"),
        ("a.txt", "1 2 3", "of no known kind; use one of .jsonl"),
        ("a", None, "metrics.jsonl does not exist"),
    ],
)
def test_bad_lengths_are_named(run_yaml, tmp_path, tool, capsys, name, text, message):  # noqa: F811
    if text is None:
        (tmp_path / name).mkdir()  # a folder that holds no run
    else:
        (tmp_path / name).write_text(text)
    args = ("--config", run_yaml, "--lengths", str(tmp_path / name), "--out", str(tmp_path / "t.json"))
    assert message in refused(tool, capsys, *args)


def test_every_kind_of_file_gives_the_same(run_yaml, tmp_path, tool, monkeypatch):  # noqa: F811
    """csv, jsonl, parquet and a run's metrics (a list of lengths for each iteration)."""
    import pyarrow
    import pyarrow.parquet

    rows = [(10 + i % 7, 3 + (i * i) % 41) for i in range(60)]
    (tmp_path / "a.csv").write_text("input_length,output_length\n" + "".join(f"{p},{o}\n" for p, o in rows))
    (tmp_path / "a.jsonl").write_text("".join(f'{{"input_length": {p}, "output_length": {o}}}\n' for p, o in rows))
    columns = {"input_length": [p for p, _ in rows], "output_length": [o for _, o in rows]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run/metrics.jsonl", "w") as file:
        for part in (rows[:30], rows[30:]):
            line = {"lengths/prompt": [p for p, _ in part], "lengths/output": [o for _, o in part]}
            file.write(json.dumps(line) + "\n")
    found = []
    for name in ("a.csv", "a.jsonl", "a.parquet", "run"):
        out = tmp_path / f"{name}.json"
        args = ["--config", run_yaml, "--lengths", str(tmp_path / name), "--out", str(out), "--draws", "1"]
        monkeypatch.setattr(sys, "argv", ["calibrate_threshold.py", *args])
        assert tool.main() == 0
        found.append(json.loads(out.read_text()))
    assert all(one == found[0] for one in found)


def test_one_instance_says_once_that_fusion_is_off(run_yaml, lengths_csv, tmp_path):  # noqa: F811
    out = tmp_path / "t.json"
    done = program("--config", run_yaml, "--lengths", lengths_csv, "--out", str(out), "--instances", "1")
    assert done.returncode == 0 and done.stdout.count("inter-stage fusion is off") == 1
    raw = json.loads(out.read_text())
    assert raw["threshold"] == 0 and len(raw["sweep"]) == 1


@pytest.mark.slow
def test_a_generation_trial(tmp_path):
    """The tiny actor of this repository writes eight responses; their lengths and steps are used."""
    out = tmp_path / "t.json"
    done = program(
        "--config",
        str(ROOT / "examples/quickstart.yaml"),
        "--trial",
        "8",
        "--out",
        str(out),
        "rollout.max_response_tokens=24",
        f"actor.path={ROOT}/examples/tiny/actor",
        f"reward.path={ROOT}/examples/tiny/reward",
        f"data.train_files=[{ROOT}/examples/prompts/quickstart.jsonl]",
    )
    assert done.returncode == 0, done.stderr
    assert "8 prompts generated here" in done.stdout and "a decode step took" in done.stdout
    raw = json.loads(out.read_text())
    assert 1 <= raw["lengths"]["max"] <= 24 and raw["samples"] == 64
    both = program("--config", "x.yaml", "--trial", "8", "--lengths", "x.csv", "--out", str(out))
    assert both.returncode == 2 and "not allowed with" in both.stderr


def test_a_real_trace(run_yaml, tmp_path):  # noqa: F811
    if not TRACE.exists():
        pytest.skip("shared/data/traces is not beside this checkout")
    done = program("--config", run_yaml, "--lengths", str(TRACE), "--out", str(tmp_path / "t.json"))
    assert done.returncode == 0 and "p99.9/p50" in done.stdout
