"""What fusion brought: exact where every phase follows its rule, and in words where there is nothing to compare."""

from dataclasses import replace

import pytest
from run_report.forecast import Forecaster
from run_report.fusion_gain import gen_infer_gain, training_gain
from run_report.run_files import RunFiles
from run_report.timeline import simulate_gen_infer
from testkit.finished_run import GATHER, RANKS, START, costs_of, lengths_of, write_run

from rlhfuse.planning.report.report import PlanReport
from rlhfuse.schedule.rules.builders import greedy, one_at_a_time


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return RunFiles.read(write_run(tmp_path_factory.mktemp("finished") / "run"))


def searched(run, **more):
    """As if the order of training had been searched."""
    return replace(run, config=run.config.replace("intra_stage: false", "intra_stage: search"), **more)


def test_generation_with_inference_is_held_against_the_serial_run_of_its_lengths(run):
    forecaster = Forecaster(run)
    gain = gen_infer_gain(run, [forecaster.forecast(4)], "")
    limits, before = PlanReport.from_dict(run.plan).generation.limits, lengths_of(3)
    costs = costs_of().table
    limits = replace(limits, bs_max=costs.largest_flat_batch(before.median_context, limits.max_sequences))
    serial = simulate_gen_infer(lengths_of(4), RANKS, costs, limits, 0)
    assert gain.measured == pytest.approx(run.rows[4]["fusion/gen_infer_seconds"])
    assert gain.fused == pytest.approx(gain.measured) and gain.off == pytest.approx(0.0, abs=1e-6)
    assert gain.serial == pytest.approx(serial.total_seconds + START + GATHER) and gain.serial != gain.fused
    assert gain.iterations == (4,)


def test_training_is_held_against_one_model_after_the_other(run):
    gain = training_gain(searched(run), Forecaster(run), "")
    assert gain.iterations == (3, 4) and gain.measured == pytest.approx(
        sum(row["timing_s/train"] for row in run.rows[3:]) / 2
    )
    assert gain.fused == pytest.approx(gain.serial) == pytest.approx(gain.measured), "this run trained serially"
    for order, compare in ((greedy, float.__gt__), (one_at_a_time, float.__lt__)):
        other = searched(run, schedule=order(run.schedule.problem))
        found = training_gain(other, Forecaster(other), "")
        assert found.serial == pytest.approx(gain.serial) and compare(found.serial, found.fused), order


def test_why_there_is_nothing_to_compare(run):
    forecasts = [Forecaster(run).forecast(4)]

    def why(rows=run.rows, config=run.config, **facts):
        made = tuple(row | {f"fusion/{name}": value for name, value in facts.items()} for row in rows)
        return gen_infer_gain(replace(run, rows=made, config=config), forecasts, "").why_not

    assert why() == ""
    assert "inter_stage=false" in why(config=run.config.replace("fusion: {", "fusion: {inter_stage: false, "))
    assert "one instance" in why(instances=1)
    assert "R_t was 0" in why(destinations=0, threshold=0) and "no batch had a tail" in why(destinations=0)
    assert gen_infer_gain(run, [], "no costs.json").why_not == "no costs.json"
    assert "switched off" in training_gain(run, Forecaster(run), "").why_not
    alone = replace(run.schedule.problem, pipelines=run.schedule.problem.pipelines[:1])
    assert "only the actor trains" in training_gain(searched(run, schedule=greedy(alone)), None, "").why_not
    assert training_gain(searched(run), None, "no costs.json").why_not == "no costs.json"
