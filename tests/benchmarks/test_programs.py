"""Every benchmark program: in small, as its users run it, its figures are in its file; its arguments; bad input."""

import importlib
import json
import os
import shlex

import pytest
import yaml
from harness import result_text
from testkit.paths import ROOT, shared_data
from testkit.programs import call_main

BENCHMARKS = ROOT / "benchmarks"
CLAIMS = yaml.safe_load((BENCHMARKS / "results" / "claims.yaml").read_text())
RESULTS = [f for f in sorted((BENCHMARKS / "results").glob("*.json")) if not CLAIMS[f.stem].get("retired")]
INNER = ("layer_host_side", "end_to_end_trl", "planner_speed_search")  # started by others
MAINS = [file.stem for file in sorted(BENCHMARKS.glob("*.py")) if "def main(" in file.read_text()]
TAIL = (2, 3, 2, 4, 2, 3, 40, 2, 5, 2, 3, 2) * 4  # output tokens of the trace's requests


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "trace.csv"
    rows = [f"{20 + 7 * i},{output}" for i, output in enumerate(TAIL)]
    file.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
    return file


@pytest.fixture
def measured(programs, tmp_path):
    """What a benchmark, run in small, writes."""

    def measured(program, *words):
        out = tmp_path / "out.json"
        finished = programs.python(BENCHMARKS / program, *words, "--quick", "--out", out, timeout=1800)
        assert finished.returncode == 0, finished.stderr
        return json.loads(out.read_text())

    return measured


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    "program, arguments, figures",
    [
        ("schedule_search.py", "table --ranks 1", "at_bound memory_below_published"),
        ("schedule_search.py", "seeds --ranks 1 --rows 4", "8/8.x8.as_published"),
        ("schedule_search.py", "curve --ranks 1 --rows 1", "8/4.x8.whole.memory 8/4.x8.split.makespan"),
        ("planner_speed.py", "", "8.cpu_seconds 8.best 8.tables 8.drafted 8.priced"),
        ("inter_stage.py", "--sizes 1:2 --lengths TRACE", "1to2.speedup 1to2.mean_error 1to2.chosen_over_best"),
        ("generation.py", "--threads 1 --trace TRACE", "a.over_transformers a.greedy.rlhfuse b.rlhfuse"),
        ("intra_stage.py", "--sizes 2.5:1 --microbatches 2", "2_5to1_m2.speedup 2_5to1_m2.instruction"),
        (
            "intra_stage.py",
            "--sizes 1:1 --microbatches samples,tokens --lengths TRACE",
            "1to1_samples.fusion_unsorted 1to1_samples.order_serial.of_predicted 1to1_tokens.fused_sorted.planned",
        ),
        ("planner_regret.py", "--lengths TRACE", "tail.profile.chosen_over_best balanced.analytic.mean_error"),
        ("learning.py", "--tasks sums,calculator --seeds 1", "sums.least_rise"),
        ("layer_host.py", "--rounds 1", "forward.here backward.here"),
        ("paced.py", "training", "2_2x4.gain 2_2x4_split.fused.over_predicted"),
        ("paced.py", "generation --traces azure", "azure.gain azure.chosen_over_best"),
        ("paced.py", "iterations", "13B_13B.p.both.iteration 13B_13B.p.inter.gen_infer 13B_13B.p.intra.training"),
    ],
)
def test_quick_run(measured, program, arguments, figures, trace):
    result = measured(program, *(str(trace) if word == "TRACE" else word for word in arguments.split()))
    assert result["quick"] and result["tables"] and set(figures.split()) <= set(result["figures"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("program", ["end_to_end.py", "speculation.py"])
def test_quick_run_on_the_story_model(measured, program):
    shared_data("stories260K-hf")
    pytest.importorskip("vaderSentiment", reason="the sentiment reward needs the vaderSentiment package")
    words = ["--threads", "1"]
    if program == "end_to_end.py":
        if not (python := os.environ.get("RLHFUSE_TRL_PYTHON")):
            pytest.skip("RLHFUSE_TRL_PYTHON names no Python of an environment with TRL")
        words = ["--trl-python", python]
    assert {"ratio", "grpo.it0.4.5m.arxiv.tail"} & set(measured(program, *words)["figures"])


@pytest.mark.slow
@pytest.mark.mpi
def test_a_search_on_two_ranks(measured):
    pytest.importorskip("mpi4py", reason="needs pip install rlhfuse[mpi]")
    (row,) = measured("schedule_search.py", "table", "--rows", 4)["facts"]["rows"]
    assert row["makespan"] == row["lower_bound"] == [225]


def call(program, arguments):
    return call_main(importlib.import_module(program.removesuffix(".py")), *shlex.split(arguments))


@pytest.mark.parametrize("name", [name for name in MAINS if name not in INNER])
def test_every_program_says_what_it_takes(name):
    told = call(name, "--help")
    assert told.returncode == 0 and "usage:" in told.stdout


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_results_are_of_a_whole_run_of_a_program_that_still_takes_its_arguments(file):
    result = json.loads(file.read_text())
    assert file.read_text() == result_text(result)
    program, *words = shlex.split(result["command"])
    own = " ".join(words[:1]) if words and not words[0].startswith("--") else ""  # a command of the program
    told = call(program, f"{own} --help")
    assert told.returncode == 0 and all(word in told.stdout for word in words if word.startswith("--"))
    assert not result["quick"] and not result["dirty"] and result["tables"]
    assert {"benchmark", "commit", "date", "seconds", "machine", "load_before", "other_cores", "facts"} <= set(result)
    for table in result["tables"].values():
        assert table["title"] and {len(row) for row in table["rows"]} == {len(table["columns"])}
    for name, figure in result["figures"].items():
        assert isinstance(figure["value"], int | float) and ("goal" in figure) == ("reached" in figure), name
        assert "least" not in figure or figure["least"] <= figure["value"] <= figure["most"], name


@pytest.mark.parametrize(
    "program, arguments, message",
    [
        ("schedule_search.py", "table --rows 13", "'13' is not a row; give numbers from 1 to 12, or all"),
        ("generation.py", "--cases A,X", "'X' is unknown; give some of A, B"),
        ("generation.py", "--vllm-python nowhere", "--vllm-python nowhere is not there; run benchmarks/setup_peers.sh"),
        ("inter_stage.py", "--lengths nowhere.csv", "nowhere.csv does not exist"),
        ("inter_stage.py", "--rounds 0", "0 is not at least 1"),
        ("planner_speed.py", "--sizes 8,9", "'9' is unknown; give some of 8, 64, 256, 1024"),
        ("planner_regret.py", "--rounds 6 --settings balanced", "--rounds 6: rounds share 5 batches; give at most as"),
        ("planner_regret.py", "--lengths nowhere.csv", "nowhere.csv does not exist"),
        ("intra_stage.py", "--microbatches 2,1", "'1' is not a number of at least 2, samples or tokens"),
        ("intra_stage.py", "--microbatches tokens --lengths nowhere.csv", "nowhere.csv does not exist"),
        ("speculation.py", "--model nowhere", "holds no model; give --model"),
        ("paced.py", "training --only 9/9x9", "'9/9x9' is unknown; give some of 8/8x8, 8/8x8 short, 8/4x16"),
        ("paced.py", "iterations --cells 7B/7B:P", "'7B/7B:P' is unknown; give some of 13B/33B:P"),
    ],
)
def test_bad_input_exits_2(program, arguments, message):
    finished = call(program, arguments)
    assert finished.returncode == 2 and message in finished.stderr
