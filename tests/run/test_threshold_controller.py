"""What R_t does while a run goes on, without a run: what it starts from, steadiness and the words of the log."""

import statistics
from dataclasses import astuple, replace

import pytest
import torch
from testkit.flat_profile import facts_of
from testkit.four_ranks import SPECS, planned, run
from testkit.manual_clock import ManualClock
from testkit.sim_helpers import limits, linear_cost, linear_file, long_tail, with_turns

from rlhfuse.base.files import write_json
from rlhfuse.base.time_budget import TimeBudget
from rlhfuse.config.device_defaults import resolve_device
from rlhfuse.costs.table import RewardCost
from rlhfuse.fusion.inter.report import OBSERVED, GenInferReport
from rlhfuse.parallel.device import choose_device
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.run.threshold_controller import (
    LOOK_SHARE,
    WORTH_MOVING,
    ThresholdController,
    with_hysteresis,
)
from rlhfuse.simulator.threshold import sweep_threshold

PREFILL = [1, 10, 10, 1e-3]  # a step


def control(config):
    config = resolve_device(config)
    return ThresholdController(config, planned(config), choose_device("cpu", 0, 1))


def observe(controller, number, lengths=None, turns=None, **observed) -> str:
    """Show it an iteration in which every step of one sequence took a millisecond, or what is `observed` by kind."""
    rows = {"step": [1, 10, 0, 1e-3]}
    rows |= {"score": [10, 1, 1e-3], "load": [1e-3], "migration": [100, 1e-3]}
    rows |= {"meeting": [3e-3], "release": [2e-3], "reward": [4, 1, 0.2], "capture": [4, 0.1], "pause": [0.2, 9]}
    assert set(rows) == set(OBSERVED)
    lengths = lengths or long_tail(64, longest=256)
    batch = RolloutBatch.from_rollouts(
        [
            Rollout(number, (1,) * prompt, (1,) * output, torch.zeros(output), "stop")
            for number, (prompt, output) in enumerate(zip(lengths.prompt, lengths.output))
        ]
    )
    steps = {"step": [rows["step"], PREFILL]}
    report = GenInferReport(
        turns=turns or {}, observations={kind: [row] for kind, row in rows.items()} | steps | observed
    )
    return controller.observe(number, report, batch)


def test_it_starts_from_the_profile(alone, tmp_path):
    """R_t, limits and the choice how a sample moves; then its own observations take over."""
    profile = linear_file()
    write_json(tmp_path / "costs.json", profile.to_dict() | {"made_for": facts_of(resolve_device(run()), SPECS)})
    priced = control(run(fusion__profile=str(tmp_path / "costs.json")))
    assert priced.limits.move_cost == profile.table.move_cost(priced.limits)
    assert observe(priced, 0).startswith("R_t ")
    assert (priced._costs.meeting, priced._costs.release) == (3e-3, 2e-3)
    analytic = control(run())
    assert analytic.limits.move_cost != priced.limits.move_cost


def test_instances_are_the_plans_whatever_the_costs(alone):
    """On a GPU models come early to score; costs change BS_max and how a sample moves."""
    config = run(trainer__hardware="h100")
    controller, planned_limits = control(config), PlanReport.of(planned(resolve_device(config))).generation.limits
    assert planned_limits.early_models > 0 and controller._instance_limits() == planned_limits
    observe(controller, 0)
    fitted = controller._instance_limits()
    priced = {"bs_max": planned_limits.bs_max, "move_cost": planned_limits.move_cost}
    assert replace(fitted, **priced) == planned_limits and fitted.bs_max != planned_limits.bs_max


def restored(controller, unseen: str = "", unpriced: str = ""):
    """Another one, from its checkpoint as of before there was this kind of observation, or of cost."""
    state = controller.state()
    for observed in state["observations"]:
        observed.pop(unseen, None)
    if unpriced:
        del state["costs"][unpriced]
    later = control(run())
    later.restore(state, "a checkpoint")
    return later


def test_it_learns_what_the_reward_function_takes(alone):
    """The mean of all calls; a checkpoint of before, which knows of none, is gone on from."""
    learning = control(run())
    for number, row in enumerate(([9, 64, 9.0], [4, 64, 0.2], [0, 64, 0.0], [4, 64, 0.4])):  # the first compiles
        observe(learning, number, reward=[row])
    assert astuple(learning._costs.reward) == pytest.approx((0.075, 64))
    later = restored(learning, "reward", "reward")
    assert later._costs.reward is None
    observe(later, 4)
    assert later._costs.reward == RewardCost(0.05, 1)


def test_it_remembers_what_recording_a_graph_took(alone):
    """The mean of all shapes; where generation keeps them only the first iteration records any."""
    learning = control(run())
    for number, rows in enumerate(([[9, 9.0]], [], [], [[4, 0.2], [1, 0.3]], [])):
        observe(learning, number, capture=rows)
        assert learning._costs.capture == pytest.approx(1.0 if number < 3 else 0.1)
    assert restored(learning, "capture")._costs.capture == pytest.approx(0.1)


def test_pauses_of_its_samples_are_simulated_and_kept(alone):
    """Samples wait for two thirds of their time: fewer instances hold as many."""
    lengths = with_turns(long_tail(64, longest=256), 0, seconds=0.2)
    turns = {number: [list(turn) for turn in own] for number, own in enumerate(lengths.turns)}
    paused, plain = control(run()), control(run())
    observe(paused, 0, lengths, turns)
    observe(plain, 0, lengths)
    assert paused._lengths[0] == lengths and plain._lengths[0] == replace(lengths, turns=())
    assert paused.limits.active_share < 0.5 and plain.limits.active_share == 1
    assert restored(paused)._lengths[0] == lengths and restored(paused).limits == paused.limits


def test_it_looks_again_as_often_as_its_share_of_the_time_allows(alone, monkeypatch):
    """The first two iterations, and then when a hundred times what a look took has passed; costs follow each time."""
    followed = control(run())
    clock = ManualClock()
    followed._looks = TimeBudget(LOOK_SHARE, clock)
    choose, looked = followed._choose, []

    def choose_slowly():
        looked.append(number)
        clock.seconds += 1.0
        return choose()

    monkeypatch.setattr(followed, "_choose", choose_slowly)
    said = []
    for number in range(8):
        said.append(observe(followed, number, long_tail(64, longest=256, seed=number), meeting=[[1e-3 * number]]))
        recent = range(max(number - 3, min(number, 1)), number + 1)  # four, without the first once there is another
        assert followed._costs.meeting == pytest.approx(1e-3 * statistics.median(recent))
        clock.seconds += 48.0
    assert looked == [0, 1, 4, 7] and said[0].startswith("R_t ")
    assert not any(said[number] for number in (2, 3, 5, 6))


def test_small_gains_do_not_move_it():
    found = sweep_threshold(long_tail(64), 4, linear_cost(), limits())
    best = found.fused_seconds
    assert with_hysteresis(found, 7, best * (1 + WORTH_MOVING)) == 7
    assert with_hysteresis(found, 7, best * (1 + 2 * WORTH_MOVING)) == found.threshold
    assert with_hysteresis(found, 0, found.serial_seconds) == found.threshold != 0


def test_iterations_without_a_decode_step_keep_the_line_of_those_before(alone):
    """A policy that ends every sample with its first token: longer than what is remembered."""
    followed = control(run())
    observe(followed, 0)
    before = followed._costs
    for number in range(1, 8):
        assert "warning" not in observe(followed, number, replace(long_tail(64), output=(1,) * 64), step=[PREFILL])
        for work in ((1, 30), (4, 900)):
            assert followed._costs.decode_step_seconds(*work) == pytest.approx(before.decode_step_seconds(*work))
    restored(followed)


def test_nothing_that_was_ever_seen_keeps_the_costs_of_the_plan(alone):
    followed = control(run())
    before = followed._costs
    assert "warning" not in observe(followed, 0, step=[PREFILL], score=[], load=[])
    assert followed._costs.decode_step_seconds(1, 64) == pytest.approx(before.decode_step_seconds(1, 64), rel=0.5)
    assert followed._costs.score_seconds(512, 8) == pytest.approx(before.score_seconds(512, 8), rel=0.5)
    assert followed._costs.swap_in == before.swap_in


@pytest.mark.parametrize("part", ["_fit", "_choose", "_instance_limits"])
def test_an_error_of_a_prediction_is_one_warning_and_what_was_in_force_stays(alone, tmp_path, monkeypatch, part):
    followed = control(run())
    before = followed._costs, followed.limits, followed.threshold

    def fails(*_):
        raise ZeroDivisionError("made up")

    with monkeypatch.context() as patched:
        patched.setattr(followed, part, fails)
        said = [observe(followed, number) for number in range(2)]
    assert said == ["warning: costs and R_t stay as they were (ZeroDivisionError: made up)", ""]
    assert (followed._costs, followed.limits, followed.threshold) == before
    followed.save_costs(tmp_path / "costs.json", {})
    assert not (tmp_path / "costs.json").exists()  # nothing is measured yet
    other = restored(followed)
    assert other._costs == before[0] and other.threshold == before[2]
    observe(followed, 2)
    assert followed._costs != before[0]
