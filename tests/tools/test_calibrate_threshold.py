"""tools/calibrate_threshold.py: the file it writes, the same for the same seed, and what it refuses."""

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
    assert sum(line.endswith(" <") for line in told.splitlines()) == 1, "the chosen one is marked"
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob("*.tmp"))
    assert calibrated(run_yaml, lengths_csv, tmp_path / "again.json", *cpu)[0] == raw


def test_options(run_yaml, lengths_csv, tmp_path):
    words = ("--prompt-column", "output_tokens", "rollout.max_response_tokens=20")
    (tmp_path / "t.json").write_text("mine")
    raw, _ = calibrated(run_yaml, f"{lengths_csv}:prompt_tokens", tmp_path / "t.json", "--force", *words)
    assert raw["lengths"]["max"] == 20 and raw["lengths"]["clipped"] > 0


def test_the_instances_are_those_of_the_plan(run_yaml, lengths_csv, tmp_path):
    """With models that come early to score, on a GPU; and with the cache that memory leaves."""

    def planned(*words: str) -> dict:
        done = call_tool("plan", "--config", run_yaml, "--lengths", lengths_csv, "--json", *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    gpu = ("trainer.hardware=h100",)
    small = ("trainer.recompute=full", "algorithm.minibatches=1", "fusion.actor_microbatches=32", "fusion.bs_max=16")
    ample = planned(*small)
    memory = ample["memory"]
    generation = next(phase for phase in memory["phases"] if phase["phase"] == "generation")
    needed = sum(generation[part] for part in ("weights", "kv", "host", "activations")) + memory["process_bytes"]
    short = (*small, f"trainer.memory_limit_gb={(needed - generation['kv'] / 4) / 1e9}")
    assert planned(*gpu)["generation"]["limits"]["early_models"]
    assert planned(*short)["threshold"]["curve"]["sweep"] != ample["threshold"]["curve"]["sweep"]
    for number, words in enumerate((gpu, short)):
        plan, (raw, _) = planned(*words), calibrated(run_yaml, lengths_csv, tmp_path / f"{number}.json", *words)
        chosen = plan["threshold"]
        assert raw["sweep"] == chosen["curve"]["sweep"] and raw["threshold"] == chosen["samples"]


@pytest.mark.parametrize(
    "words, message",
    [
        ("--draws 0", "--draws 0"),
        *((f"--draws {bad}", f"--draws {bad} must be at most 1000") for bad in ("1001", "100000000")),
        ("--hardware abacus", "hardware 'abacus' is not known"),
        ("--cost none.json", "none.json does not exist; check the path"),
        ("--prompt-column x", "no column 'x'; found: prompt_tokens, output_tokens"),
        ("--plot curve.bmp", "--plot curve.bmp"),
        ("--plot /none/curve.png", "does not exist"),
        ("fusion.threshold=65", "fusion.threshold=65 > 64 samples of one iteration"),
        ("--world-size 0", "--world-size 0"),
        ("--out THERE", "exists"),
        ("--lengths THERE:output_tokens", ":2: output_tokens is 'nan'"),
        ("--lengths .", "metrics.jsonl does not exist"),  # a folder that holds no run
    ],
)
def test_bad_input_exits_2_and_leaves_no_file(run_yaml, lengths_csv, tmp_path, words, message):
    there, out = tmp_path / "there.csv", tmp_path / "threshold.json"
    there.write_text("output_tokens\nnan\n")
    done = calibrate(run_yaml, lengths_csv, out, *words.replace("THERE", str(there)).split())
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not out.exists() and not list(tmp_path.glob("*.tmp")) and there.read_text() == "output_tokens\nnan\n"


def test_layouts_that_are_auto_are_those_that_the_run_would_choose(run_yaml, lengths_csv, tmp_path):
    found, told = calibrated(run_yaml, lengths_csv, tmp_path / "found.json", "parallel=auto", "--world-size", "4")
    chosen = next(line for line in told.splitlines() if line.startswith("layouts of the search: "))
    layouts = [f"parallel.{word}" for word in chosen.split(": ")[1].split() if not word.startswith("microbatch_")]
    assert calibrated(run_yaml, lengths_csv, tmp_path / "given.json", *layouts)[0] == found


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


def test_a_real_trace(run_yaml, tmp_path):
    trace = shared_data("traces") / "azure2023_conv.csv"
    assert "p99.9/p50" in calibrated(run_yaml, trace, tmp_path / "t.json")[1]
