"""Schedules of a run: one a rung, each valid and within the cap; the likeliest are searched, the others derived."""

import re
from dataclasses import replace

import pytest
from testkit.four_ranks import SPECS, drafted, run
from testkit.sim_helpers import long_tail

from rlhfuse.config.values import AUTO
from rlhfuse.planning.plan import Plan
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.training.schedule_family import schedule_family
from rlhfuse.planning.training.training_orders import derived
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.io import load_family, save_schedule
from rlhfuse.schedule.ir.evaluate import evaluate, over_cap

TAIL = long_tail(400, longest=256)
TOKENS = dict(fusion__actor_microbatches=AUTO, fusion__microbatch_tokens=384, algorithm__minibatches=1)


def by_tokens(**keys):
    return drafted(run(**{**TOKENS, **keys}), SPECS, 4, TAIL)


def family_of(draft):
    config, training = draft.run.config, draft.training
    return schedule_family(config.fusion, config.trainer.seed, draft.problems, training.shares, draft.ranks.shape)


def test_every_rung_has_a_schedule_and_those_that_are_drawn_are_searched():
    draft = by_tokens(fusion__search_seconds=2.0)
    schedules, source = family_of(draft)
    rungs = draft.batch.cut.rungs
    assert tuple(sorted(schedules)) == rungs and len(rungs) > 3
    drawn = draft.training.shares
    assert 1 < len(drawn) < len(rungs) and sum(drawn.values()) == pytest.approx(1)
    for rung, schedule in schedules.items():
        assert schedule.problem == draft.problems[rung]
        assert over_cap(schedule.problem, evaluate(schedule).node_peak_memory) is None
    assert set(map(int, re.findall(r"(\d+) micro-batches: annealed", source))) == set(drawn)
    best = schedules[draft.training.likeliest]
    assert float(evaluate(best).makespan) <= 1.01 * float(latency_bound(best.problem))
    left = {rung: schedule for rung, schedule in schedules.items() if rung in drawn or rung == rungs[-1]}
    assert derived(left, draft.problems) == schedules


def test_a_rule_orders_every_rung():
    draft = by_tokens(fusion__intra_stage="serial")
    schedules, source = family_of(draft)
    assert tuple(sorted(schedules)) == draft.batch.cut.rungs and source.startswith("serial 1F1B")
    assert draft.training.given and dict(draft.training.given[0]) == {m: schedules[m] for m in draft.training.shares}


def test_a_file_of_one_run_orders_the_next(tmp_path):
    """All of a family are read again; of a file of one schedule those that have fewer micro-batches are derived."""
    plan, file = make_plan(by_tokens()), tmp_path / "schedule.json"
    likeliest = PlanReport.of(plan).schedule.likeliest.microbatches
    save_schedule(file, plan.likeliest, {}, [one for m, one in plan.schedules.items() if m != likeliest])
    assert {m: one.orders for m, one in load_family(file).items()} == {m: s.orders for m, s in plan.schedules.items()}
    again = make_plan(by_tokens(fusion__schedule=str(file)))
    orders = ({m: one.orders for m, one in made.schedules.items()} for made in (again, plan))
    assert next(orders) == next(orders) and str(file) in PlanReport.of(again).schedule.source
    save_schedule(file, plan.likeliest)
    alone = make_plan(by_tokens(fusion__schedule=str(file)))
    for rung, schedule in alone.schedules.items():
        if rung <= likeliest:
            assert schedule.orders == plan.likeliest.of_fewer(schedule.problem).orders


def test_the_plan_says_what_will_occur_and_what_it_takes():
    draft = by_tokens()
    plan = make_plan(draft)
    summary, shares = PlanReport.of(plan).schedule, draft.training.shares
    assert {one.microbatches: one.share for one in summary.by_microbatches if one.share} == shares
    for one in summary.by_microbatches:
        seconds = float(evaluate(plan.schedules[one.microbatches]).makespan) * 1e-6
        assert one.makespan_seconds == pytest.approx(seconds) == summary.seconds_of(one.microbatches)
        assert one.lower_bound_seconds <= one.makespan_seconds * (1 + 1e-9)
        assert (
            f"{one.microbatches} micro-batches: {one.share:.0%} of mini-batches" in PlanReport.of(plan).render()
        ) == (one.share > 0)
    mean = sum(shares.get(one.microbatches, 0) * one.makespan_seconds for one in summary.by_microbatches)
    assert summary.makespan_seconds == pytest.approx(mean)
    received = Plan.parse(plan.to_text())
    assert received.schedules == plan.schedules and received.programs == plan.programs


def test_a_tenth_of_the_mini_batches_gets_a_tenth_of_the_search(monkeypatch):
    from rlhfuse.planning.training import schedule_family as module

    asked = {}
    real = module.search
    monkeypatch.setattr(module, "SearchSettings", lambda time_limit, **more: (time_limit, more))

    def search(problem, settings, start, comm):
        asked[problem.pipelines[0].microbatches] = settings[0]
        made, report = real(problem, module_settings(iterations=500))
        return made, replace(report, seconds=report.kernel_seconds)  # it takes no time

    from rlhfuse.schedule.search.search import SearchSettings as module_settings

    monkeypatch.setattr(module, "search", search)
    draft = by_tokens(fusion__search_seconds=10.0)
    family_of(draft)
    order = sorted(draft.training.shares, key=lambda m: (-draft.training.shares[m], -m))
    assert list(asked) == order
    assert asked[order[0]] == pytest.approx(10 * draft.training.shares[order[0]])
    assert asked[order[-1]] == pytest.approx(10.0), "what others leave"
