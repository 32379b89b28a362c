"""Predictions made from a run's directory: exact where every phase follows its rule, and honest about what lacks."""

import json

import pytest
from run_report.forecast import PARTS, PHASES, Forecaster
from run_report.report import render_report
from run_report.run_files import RunFiles
from testkit.finished_run import GATHER, START, write_run

from rlhfuse.base.errors import InputError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return RunFiles.read(write_run(tmp_path_factory.mktemp("finished") / "run"))


def test_phases_that_follow_their_rules_are_predicted(run):
    for number in (3, 4):
        found, measured = Forecaster(run).forecast(number).seconds, run.rows[number]
        assert found == pytest.approx({phase: measured[f"timing_s/{phase}"] for phase in PHASES}, abs=1e-6)


def test_training_is_predicted_by_the_tokens_that_it_does_not_leave_out(run):
    found = Forecaster(run).forecast(4)
    shares = [0.0, 0.5, 0.25, 0.5, 0.75]
    for row, share in zip(run.rows, shares):
        row["training/zero_gradient/tokens"], row["timing_s/train"] = share, row["timing_s/train"] * (1 - share)
    try:
        made = Forecaster(run).forecast(4).seconds
        assert made["train"] == pytest.approx(found.seconds["train"] / 4) and made["adv"] == found.seconds["adv"]
    finally:
        for row, share in zip(run.rows, shares):
            row["timing_s/train"] /= 1 - row.pop("training/zero_gradient/tokens")


def test_waiting_for_the_reward_function_is_predicted(run, tmp_path):
    """Its workers are busy for longer than all else; the edges around generation with inference stay what they were."""
    slow = RunFiles.read(write_run(tmp_path / "run", reward=0.2))
    found, fast = Forecaster(slow).forecast(4), Forecaster(run).forecast(4)
    assert found.timeline.reward_seconds > 0.1 and fast.timeline.reward_seconds == 0
    assert found.seconds["infer"] == pytest.approx(slow.rows[4]["timing_s/infer"])
    assert found.seconds["infer"] == pytest.approx(fast.seconds["infer"] + found.timeline.reward_seconds)
    kinds = {span.kind for span in Forecaster(slow).spans(4)}
    assert "reward" in kinds and {span.kind for span in slow.traced_iterations()[4]} == kinds


def test_the_parts_add_up_and_the_first_iteration_counts_while_there_is_no_other(run):
    forecaster = Forecaster(run)
    assert forecaster.iterations == (1, 2, 3, 4)
    for number in forecaster.iterations:
        found = forecaster.forecast(number)
        assert found.seconds["step"] == pytest.approx(sum(found.seconds[part] for part in PARTS) + 0.05)
        assert found.seconds["reshard"] == pytest.approx(1.0 if number == 1 else 0.1)
        edges = found.seconds["gen"] + found.seconds["infer"] - found.timeline.total_seconds
        assert edges == pytest.approx(START + GATHER)
    with pytest.raises(InputError, match="iteration 0 is the run's first"):
        forecaster.forecast(0)


@pytest.mark.parametrize("name", ["costs.json", "plan.json", "schedule.json"])
def test_what_a_prediction_needs_is_named(tmp_path, name):
    folder = write_run(tmp_path / "run", iterations=3)
    assert "predicted above measured" in render_report(RunFiles.read(folder))
    (folder / name).unlink()
    run = RunFiles.read(folder)
    with pytest.raises(InputError, match=f"no {name}"):
        Forecaster(run)
    page = render_report(run)
    assert f"no {name}: nothing can be predicted without it" in page and "predicted above measured" not in page


def test_a_run_of_one_iteration_is_measured_only_and_a_trace_without_their_numbers_is_shown_as_none(tmp_path):
    folder = write_run(tmp_path / "run", iterations=1)
    run = RunFiles.read(folder)
    assert "one iteration, and each is predicted from those before" in render_report(run)
    raw = json.loads((folder / "trace.json").read_text())
    for event in raw["traceEvents"]:
        event["args"] = {}
    (folder / "trace.json").write_text(json.dumps(raw))
    assert run.traced_iterations() and RunFiles.read(folder).traced_iterations() == {}
