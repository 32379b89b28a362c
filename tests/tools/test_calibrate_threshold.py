"""tools/calibrate_threshold.py: the file it writes, the same for the same seed, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from testkit.paths import ROOT, shared_data
from testkit.programs import call_tool


@pytest.fixture
def lengths_csv(tmp_path: Path) -> Path:
    rows = [f"{10 + i % 50},{5 + (i * i) % 37 + (220 if i % 20 == 0 else 0)}" for i in range(300)]
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return tmp_path / "lengths.csv"


def calibrate(run_yaml: str, lengths: object, out: Path, *words: object):
    return call_tool("calibrate_threshold", "--config", run_yaml, "--lengths", lengths, "--out", out, *words)


def calibrated(run_yaml: str, lengths: object, out: Path, *words: object) -> tuple[dict, str]:
    """The file that is written, and what is said."""
    done = calibrate(run_yaml, lengths, out, *words)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def test_writes_threshold_json_and_a_plot(run_yaml, lengths_csv, tmp_path):
    plot, cpu = tmp_path / "curve.png", ("--hardware", "cpu")
    raw, told = calibrated(run_yaml, lengths_csv, tmp_path / "threshold.json", *cpu, "--plot", plot)
    assert raw["instances"] == 4 and raw["samples"] == 64 and len(raw["sweep"]) == 20
    assert raw["fused_seconds"] <= 1.01 * min(point["fused_seconds"] for point in raw["sweep"])
    assert f"R_t = {raw['threshold']}" in told and "p99.9/p50" in told
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob("*.tmp"))
    assert calibrated(run_yaml, lengths_csv, tmp_path / "again.json", *cpu)[0] == raw


def test_options(run_yaml, lengths_csv, tmp_path):
    words = ("--prompt-column", "output_tokens", "--instances", "8", "rollout.max_response_tokens=20")
    raw, _ = calibrated(run_yaml, f"{lengths_csv}:prompt_tokens", tmp_path / "threshold.json", *words)
    assert raw["instances"] == 8 and raw["lengths"]["max"] == 20 and raw["lengths"]["clipped"] > 0


@pytest.mark.parametrize(
    "words, message",
    [
        ("--instances 0", "--instances 0"),
        ("--instances 65", "65 instances for 64 samples"),
        ("--draws 0", "--draws 0"),
        *((f"--draws {bad}", f"--draws {bad} must be at most 1000") for bad in ("1001", "100000000")),
        ("--hardware abacus", "hardware 'abacus' is not known"),
        ("--cost none.json", "none.json does not exist; check the path"),
        ("--prompt-column x", "no column 'x'; found: prompt_tokens, output_tokens"),
        ("--plot curve.bmp", "--plot curve.bmp"),
        ("--plot /none/curve.png", "does not exist"),
        ("fusion.threshold=65", "fusion.threshold=65 > 64 samples of one iteration"),
        ("--world-size 0", "--world-size 0"),
        ("parallel=auto", "parallel.actor_train=auto: the number of ranks is not known; start under torchrun"),
        ("--out FILE", "exists"),
    ],
)
def test_bad_input_exits_2_and_leaves_no_file(run_yaml, lengths_csv, tmp_path, words, message):
    there, out = tmp_path / "there.json", tmp_path / "threshold.json"
    there.write_text("mine")
    done = calibrate(run_yaml, lengths_csv, out, *words.replace("FILE", str(there)).split())
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not out.exists() and not list(tmp_path.glob("*.tmp")) and there.read_text() == "mine"


def test_a_file_is_replaced_by_force(run_yaml, lengths_csv, tmp_path):
    (tmp_path / "t.json").write_text("mine")
    assert calibrated(run_yaml, lengths_csv, tmp_path / "t.json", "--force")[0]


def test_layouts_that_are_auto_are_those_that_the_run_would_choose(run_yaml, lengths_csv, tmp_path):
    found, told = calibrated(run_yaml, lengths_csv, tmp_path / "found.json", "parallel=auto", "--world-size", "4")
    chosen = next(line for line in told.splitlines() if line.startswith("layouts of the search: "))
    layouts = [f"parallel.{word}" for word in chosen.split(": ")[1].split() if not word.startswith("actor_micro")]
    assert calibrated(run_yaml, lengths_csv, tmp_path / "given.json", *layouts)[0] == found


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
def test_bad_lengths_are_named(run_yaml, tmp_path, name, text, message):
    if text is None:
        (tmp_path / name).mkdir()  # a folder that holds no run
    else:
        (tmp_path / name).write_text(text)
    done = calibrate(run_yaml, tmp_path / name, tmp_path / "t.json")
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_every_kind_of_file_gives_the_same(run_yaml, tmp_path):
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
    names = ("a.csv", "a.jsonl", "a.parquet", "run")
    first, *others = (
        calibrated(run_yaml, tmp_path / name, tmp_path / f"{name}.json", "--draws", "1")[0] for name in names
    )
    assert all(one == first for one in others)


def test_one_instance_says_once_that_fusion_is_off(run_yaml, lengths_csv, tmp_path):
    raw, told = calibrated(run_yaml, lengths_csv, tmp_path / "t.json", "--instances", "1")
    assert told.count("inter-stage fusion is off") == 1 and raw["threshold"] == 0 and len(raw["sweep"]) == 1


@pytest.mark.slow
def test_a_generation_trial(programs, tmp_path):
    """The tiny actor of this repository writes eight responses; their lengths and steps are used."""
    config, out = ROOT / "examples/quickstart.yaml", tmp_path / "t.json"
    words = ("--config", config, "--trial", 8, "--out", out, "rollout.max_response_tokens=24")
    done = programs.tool("calibrate_threshold", *words)
    assert done.returncode == 0, done.stderr
    assert "8 prompts generated here" in done.stdout and "a decode step took" in done.stdout
    raw = json.loads(out.read_text())
    assert 1 <= raw["lengths"]["max"] <= 24 and raw["samples"] == 64


def test_lengths_come_from_one_place_and_the_program_says_so(programs, tmp_path):
    words = ("--config", "x.yaml", "--trial", 8, "--lengths", "x.csv", "--out", tmp_path / "t.json")
    both = programs.tool("calibrate_threshold", *words)
    assert both.returncode == 2 and "not allowed with" in both.stderr


def test_a_real_trace(run_yaml, tmp_path):
    trace = shared_data("traces") / "azure2023_conv.csv"
    assert "p99.9/p50" in calibrated(run_yaml, trace, tmp_path / "t.json")[1]
