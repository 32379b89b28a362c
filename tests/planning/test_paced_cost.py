"""Costs of a paced run: a file of them, and a plan that is made of nothing else."""

import json

import pytest
from testkit.four_ranks import drafted, planned, run
from testkit.paced import paced

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_json
from rlhfuse.costs.paced import load_paced_cost
from rlhfuse.costs.speculation import StepObservation, fit_steps
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.rules.builders import serial_makespan

STAGES = {"actor": 4, "critic": 2}


@pytest.fixture
def file(tmp_path):
    write_json(tmp_path / "pace.json", paced(STAGES, token=1e-4).to_dict())
    return tmp_path / "pace.json"


def of(file, **keys):
    return run(trainer__pace=str(file), trainer__device="cpu", rollout__draft_rows=0, **keys)


def test_a_file_of_them_says_what_is_wrong_with_it(file):
    assert load_paced_cost(file) == paced(STAGES, token=1e-4)
    raw = json.loads(file.read_text())
    raw["training"]["actor"]["step"] = -1.0
    write_json(file, raw)
    with pytest.raises(InputError, match=r"pace.json: training.actor: step and move of a paced model must be in"):
        load_paced_cost(file)


def test_all_seconds_are_stretched_and_bytes_are_the_runs_own():
    whole = paced(STAGES, token=1e-4)
    there = whole.of_run(3.0, 2)
    moves = [one.prices(3)["migration"] for one in (whole, there)]
    assert moves[1](100) == pytest.approx(3 * moves[0](100)) and there.token_bytes == 2
    assert moves[1](0) == 0, "what moves as tokens moves no keys and values"
    for role, action, tokens in (("actor", "actor:3F1", 5), ("critic", "critic.1:0B0", 7), ("actor", "actor:0ST", 0)):
        priced = [one.action_seconds(role, Action.parse(action), tokens) for one in (whole, there)]
        assert priced[1] == pytest.approx(3 * priced[0]) and priced[0] > 0
    assert there.action_seconds("actor", Action("actor", 0, Kind.RG), 0) == 0, "reductions are part of the step"
    for seconds in ("swap_in", "meeting"):
        assert getattr(there, seconds) == 3 * getattr(whole, seconds)
    assert there.table.moves["critic"] == pytest.approx(0.15)
    assert there.table.steps["critic"] == pytest.approx(0.3)


def test_steps_that_last_as_priced_give_the_prices_back():
    costs = paced(STAGES, token=1e-4)
    counts = [(b, 50 * b, p) for b in (1, 2, 4, 8) for p in (0, 30, 90)]
    steps = [StepObservation(b, c, p, costs.engine_step_seconds(b, c, p)) for b, c, p in counts]
    assert fit_steps(steps).decode(4, 200) == pytest.approx(costs.decode(4, 200))
    assert fit_steps(steps).prefill(90, 1) == pytest.approx(costs.prefill(90, 1))


def test_a_plan_is_made_of_them_alone(file):
    """Shared cores slow nothing down; layouts of equal stages take what the file says, times the stretch."""
    report = PlanReport.of(planned(of(file)))
    assert (
        "PACED, no measurement of hardware: round numbers, x1" in report.title and "x 1, which work" in report.render()
    )
    assert PlanReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert {move.model: move.seconds for move in report.weight_moves} == {"actor": 0.05, "critic": 0.05}
    draft = drafted(of(file))
    assert draft.step_seconds == 0.2 and draft.inputs.cores.waiting == 1
    schedule = report.schedule
    assert report.seconds.training_fused == pytest.approx(4 * (schedule.makespan_seconds + 0.2))
    forwards = [set(pipeline.forward) for pipeline in draft.training.problem.pipelines]
    micro = (min(forwards[0]) * 1e-6 - 0.01) / 1e-4  # tokens of a micro-batch
    assert micro > 1 and all(len(ticks) == 1 for ticks in forwards)
    assert float(serial_makespan(draft.training.split.whole)) * 1e-6 > 7 * 3 * 0.01
    slower = PlanReport.of(planned(of(file, trainer__pace_stretch=2.0)))
    assert slower.seconds.fused == pytest.approx(2 * report.seconds.fused, rel=0.05), "but for the search"
    assert slower.seconds.gen_infer_serial == pytest.approx(2 * report.seconds.gen_infer_serial, rel=1e-6)


def test_what_it_has_no_price_of_is_refused_or_left_out(file):
    with pytest.raises(InputError, match="prices 2 stages of the critic, parallel.critic_train=d1t1p4 has 4"):
        drafted(of(file, parallel__critic_train="d1t1p4"))
    assert "all backwards are whole: trainer.pace has no times" in drafted(of(file)).training.split.why
