"""Orders of training by rule: what a plan makes of each, what the others promise beside it, and what is refused."""

import pytest
from testkit.four_ranks import SPECS, drafted, planned, run, shared_plan

from rlhfuse.base.errors import InputError
from rlhfuse.planning.plan import Plan
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.rules.builders import serial_1f1b
from rlhfuse.schedule.rules.interleaved import interleaved_1f1b
from rlhfuse.schedule.rules.time_sharing import time_sharing

FLAT = {"parallel__actor_train": "d1t1p4", "parallel__critic_train": "d1t1p4"}
VIRTUAL = {key: f"{layout}v2" for key, layout in FLAT.items()}
UNEQUAL = {**VIRTUAL, "parallel__critic_train": "d2t1p2v2"}
BUILDERS = {"serial": serial_1f1b, "interleaved": interleaved_1f1b, "time_sharing": time_sharing}


def promised(plan) -> dict:
    return {other.setting.split("=")[1]: other for other in PlanReport.of(plan).schedule.others}


@pytest.mark.parametrize(
    "rule, layouts",
    [
        ("serial", FLAT),
        ("time_sharing", FLAT),
        ("interleaved", VIRTUAL),
        ("serial", VIRTUAL),
        ("interleaved", UNEQUAL),
    ],
)
def test_a_rule_is_planned_and_compared(rule, layouts):
    settings, build = run(**layouts, fusion__intra_stage=rule), BUILDERS[rule if layouts is FLAT else "interleaved"]
    plan = shared_plan(**layouts, fusion__intra_stage=rule)
    assert plan.likeliest.orders == build(plan.likeliest.problem).orders
    assert f"fusion.intra_stage={rule}" in PlanReport.of(plan).schedule.source
    assert "search" in promised(plan) and rule not in promised(plan)
    assert Plan.parse(plan.to_text()) == plan
    assert PlanReport.of(planned(settings)).schedule == PlanReport.of(plan).schedule  # no clock decided it
    searched = PlanReport.of(shared_plan(**layouts, fusion__search_seconds=2.0)).schedule
    found = promised(plan)["search"].makespan_seconds
    assert searched.makespan_seconds <= found * 1.0001 < PlanReport.of(plan).schedule.makespan_seconds * 1.0001
    assert f"fusion.intra_stage=search: at most {found:.4g} s" in PlanReport.of(plan).render()


def test_what_is_promised_is_what_the_choice_takes():
    fused = shared_plan(**FLAT, fusion__split_backward="false")
    assert list(promised(fused)) == ["interleaved", "time_sharing", "serial"]
    for rule in ("time_sharing", "serial"):
        chosen, other = PlanReport.of(shared_plan(**FLAT, fusion__intra_stage=rule)).schedule, promised(fused)[rule]
        assert other.makespan_seconds == pytest.approx(chosen.makespan_seconds)
        assert other.peak_activation_bytes == chosen.peak_activation_bytes
        line = f"fusion.intra_stage={rule}: {other.makespan_seconds:.4g} s (x"
        assert line in fused.summary
    why = "parallel.actor_train=d1t1p4 has no virtual stages; give it some, as in d1t1p2v2"
    assert promised(fused)["interleaved"].why_not == why
    assert f"fusion.intra_stage=interleaved: not here: {why}" in fused.summary


def test_both_models_of_a_time_shared_run_stand_alike_on_the_ranks():
    plan = shared_plan(**FLAT, fusion__intra_stage="time_sharing")
    for rank in range(4):
        assert plan.ranks.locate("critic", rank) == plan.ranks.locate("actor", rank)
    assert not PlanReport.of(plan).schedule.alternates and PlanReport.of(shared_plan(**FLAT)).schedule.alternates
    assert sum(move.traffic.stays + move.traffic.within for move in PlanReport.of(plan).weight_moves) > 0


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"fusion__intra_stage": "interleaved"}, "intra_stage=interleaved: parallel.actor_train=d1t1p4 has no virtual"),
        ({"fusion__intra_stage": "interleaved", "parallel__actor_train": "d1t1p4v2"}, "critic_train=d2t1p2 has no"),
        ({"fusion__intra_stage": "interleaved", **VIRTUAL, "fusion__actor_microbatches": 6}, "6 % 4 = 2, must be 0"),
        ({"fusion__intra_stage": "time_sharing"}, "d1t1p4 and parallel.critic_train=d2t1p2 need equal pipelines"),
        ({"fusion__intra_stage": "time_sharing", **VIRTUAL}, "without virtual stages; give all models one layout"),
    ],
)
def test_what_a_rule_cannot_order_is_refused(keys, words):
    with pytest.raises(InputError, match=words) as caught:
        drafted(run(**keys), SPECS, 4)
    assert str(caught.value).endswith("; or set fusion.intra_stage=search") and "\n" not in str(caught.value)


def test_an_order_without_room_is_not_promised():
    """A cap below what serial training holds, above the least that a search can find."""
    keys = {**FLAT, "trainer__hardware": "a100", "rollout__kv_blocks_per_instance": 24, "fusion__actor_microbatches": 8}
    keys |= {"rollout__max_batched_tokens": 64, "algorithm__minibatches": 1}
    draft = drafted(run(**keys), SPECS, 4)
    held = draft.memory.training_bytes
    serial = max(map(sum, zip(held, evaluate(serial_1f1b(draft.training.problem)).node_peak_memory)))
    plan = planned(run(**keys, trainer__memory_limit_gb=(serial - 1) / 1e9))
    assert promised(plan)["serial"].why_not == "needs more memory than a rank has"
