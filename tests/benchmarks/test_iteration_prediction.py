"""The benchmark of predicted iterations: the training it starts, its figures, bad input."""

import argparse
import json

import pytest
from benchmark_run import check_refused, run
from iteration_prediction import goal, settings  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

from rlhfuse.config.load import load_config  # noqa: E402
from rlhfuse.monitor.report.forecast import PHASES, predicted_spans  # noqa: E402
from rlhfuse.monitor.report.forecast_table import ForecastTable, PhaseRow  # noqa: E402
from rlhfuse.monitor.report.run_files import RunFiles  # noqa: E402


@pytest.mark.slow  # a training of 20 s
def test_quick_run_predicts_a_training(tmp_path):
    out, run_dir = tmp_path / "out.json", tmp_path / "run"
    files = ("--run-dir", run_dir, "--out", out, "--markdown", tmp_path / "table.md")
    finished = run("iteration_prediction.py", "--quick", "--iterations", 4, *files)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)
    assert json.loads(out.read_text()) == result and result["goals"] == []
    assert result["iterations"] == [2, 3]
    assert [row["phase"] for row in result["phases"]] == list(PHASES)
    assert all(row["measured"] > 0 and row["predicted"] > 0 for row in result["phases"] if row["phase"] != "infer")
    assert "mean over the phases" in (tmp_path / "table.md").read_text()
    files = RunFiles.read(run_dir)
    predicted, _ = predicted_spans(files, 3)
    for spans in (predicted, files.spans):
        assert {"reshard", "generate", "score", "adv", "actor F", "critic B"} <= {span.kind for span in spans}


@pytest.mark.parametrize("quick", [True, False])
def test_settings_are_a_run(tmp_path, quick):
    arguments = argparse.Namespace(quick=quick, iterations=3)
    file = tmp_path / "run.yaml"
    OmegaConf.save(OmegaConf.create(settings(arguments, tmp_path / "run")), file)
    config = load_config(file)
    assert config.trainer.iterations == 3 and config.fusion.inter_stage and config.fusion.intra_stage


def test_goal():
    rows = tuple(PhaseRow(phase, 10.0, 9.0, 1.2, 8.0, 2.0) for phase in PHASES)
    found = goal(ForecastTable((1,), rows))
    assert found["measured"] == pytest.approx(0.12) and not found["reached"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--iterations", "2"], "the first 2 are left out"),
        (["--iterations", "0"], "0 is not at least 1"),
        (["--run-dir", "."], "--run-dir . exists"),
    ],
)
def test_bad_input_exits_2(arguments, message):
    check_refused(message, "iteration_prediction.py", *arguments)
