"""Which models train with split backwards, what the plan says of it, and what is refused."""

import itertools
import json
from dataclasses import replace

import pytest
from testkit import four_ranks
from testkit.flat_profile import trained, training
from testkit.four_ranks import SPECS, full, on_slow_cores, planned, run

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_json
from rlhfuse.planning.plan import Plan
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.training import split_choice
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.io import save_schedule
from rlhfuse.schedule.ir.action import Kind
from rlhfuse.schedule.rules.builders import greedy, min_memory


@pytest.fixture(autouse=True)
def slow_cores(monkeypatch):
    on_slow_cores(monkeypatch)


def drafted(**keys):
    return four_ranks.drafted(run(**keys), SPECS, 4, full(run(**keys)))


def split_models(problem) -> set[str]:
    return {str(pipeline.model) for pipeline in problem.pipelines if pipeline.split}


def bounds_by_choice(**keys) -> dict[frozenset[str], float]:
    """Proved bound of every set of models that is split, in the order of the choice."""
    found, make = {}, split_choice.choose_split

    def looked_at(fusion, training, stated):
        for count in range(3):
            for some in itertools.combinations(("actor", "critic"), count):
                found[frozenset(some)] = float(latency_bound(stated(frozenset(some))))
        return make(fusion, training, stated)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhfuse.planning.candidate.choose_split", looked_at)
        drafted(**keys)
    return found


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({}, {"actor", "critic"}),
        ({"fusion__actor_microbatches": 8}, {"actor"}),  # a critic split too would reach no lower bound
        ({"trainer__hardware": "h100"}, {"actor"}),  # the host's launches are beside these seconds
    ],
)
def test_the_fewest_models_that_reach_the_least_bound_are_split(keys, expected):
    draft, bounds = drafted(**keys), bounds_by_choice(**keys)
    assert split_models(draft.training.problem) == expected == set(map(str, draft.training.split.models))
    assert not split_models(draft.training.split.whole)
    whole, least = bounds[frozenset()], min(bounds.values())
    assert (least < 0.99 * whole) == bool(expected)
    if expected:
        assert bounds[frozenset(expected)] <= 1.001 * least
        assert all(bounds[some] > 1.001 * least for some in bounds if len(some) < len(expected))
        change = f"{bounds[frozenset(expected)] / whole - 1:+.1%}"
        assert draft.training.split.why.startswith("fusion.split_backward=auto: backwards of actor")
        assert change in draft.training.split.why
    else:
        assert "all backwards are whole: split, their lower bound would be" in draft.training.split.why
    assert drafted(**keys).training.problem == draft.training.problem  # of every rank


def test_the_plan_says_what_splitting_gains_and_what_it_holds():
    plan = planned(run(), lengths=full(run()))
    assert plan.likeliest.problem.pipeline("actor").split
    whole = next(one for one in PlanReport.of(plan).schedule.others if one.setting == "fusion.split_backward=false")
    off = PlanReport.of(
        planned(run(fusion__split_backward="false", fusion__search_seconds=2.0), lengths=full(run()))
    ).schedule
    assert off.makespan_seconds <= whole.makespan_seconds * 1.0001
    assert PlanReport.of(plan).schedule.makespan_seconds < 0.95 * off.makespan_seconds
    assert PlanReport.of(plan).schedule.serial_makespan_seconds == off.serial_makespan_seconds  # of whole backwards
    text = PlanReport.of(plan).render()
    assert f"fusion.split_backward=false: at most {whole.makespan_seconds:.4g} s" in text
    assert "backwards of actor and critic are split: the lower bound is" in text
    kinds = {one.action.kind for program in plan.programs[4].by_rank.values() for one in program.instructions}
    assert Kind.W in kinds
    assert Plan.parse(plan.to_text()) == plan


def test_splitting_costs_what_it_costs():
    """B and W of a layer together take longer than its whole backward, and what W needs is held in bytes of its own."""
    draft = drafted(fusion__split_backward="true")
    for pipeline, whole in zip(draft.training.problem.pipelines, draft.training.split.whole.pipelines):
        for b, w, together in zip(pipeline.backward, pipeline.weight_gradient, whole.backward):
            assert together < b + w < 1.2 * together
        assert pipeline.activation == whole.activation
        assert all(0 < kept for kept in pipeline.weight_activation)


def test_false_and_rules_leave_backwards_whole():
    assert drafted(fusion__split_backward="false").training.split.why.endswith("all backwards are whole")
    serial = drafted(fusion__intra_stage="serial")
    assert not split_models(serial.training.problem)
    assert "fusion.intra_stage=serial is no search" in serial.training.split.why


@pytest.mark.parametrize("rule", ["serial", "time_sharing"])
def test_a_rule_trains_with_split_backwards_where_they_are_asked_for(rule):
    layouts = {f"parallel__{model}_train": "d1t1p4" for model in ("actor", "critic")}
    plan = planned(run(**layouts, fusion__intra_stage=rule, fusion__split_backward="true"))
    assert split_models(plan.likeliest.problem) == {"actor", "critic"}


def test_a_cap_without_room_for_what_w_keeps_leaves_backwards_whole():
    """With recomputation a forward keeps a layer's input alone, and B leaves more than that."""
    keys = {"trainer__recompute": "full", "rollout__max_batched_tokens": 64, "rollout__kv_blocks_per_instance": 24}
    draft = drafted(**keys)
    actor = draft.training.problem.pipeline("actor")
    assert draft.training.split.models and actor.weight_activation > draft.training.split.whole.pipelines[0].activation
    whole, split = (
        max(map(sum, zip(draft.memory.training_bytes, min_memory(one))))
        for one in (draft.training.split.whole, draft.training.problem)
    )
    assert whole < split
    for limit, expected in ((split + 1, 2), (split - 1, 1), (whole + 1, 0)):
        tight = drafted(**keys, trainer__memory_limit_gb=limit / 1e9)
        assert len(split_models(tight.training.problem)) == expected, tight.training.split.why


def test_a_schedule_file_says_what_is_split(tmp_path):
    file, free = tmp_path / "schedule.json", drafted()
    save_schedule(file, greedy(replace(free.training.problem, memory_cap=None)))
    plan = planned(run(fusion__schedule=str(file), fusion__actor_microbatches=4), lengths=full(run()))
    assert split_models(plan.likeliest.problem) == {"actor", "critic"} and str(file) in PlanReport.of(plan).render()
    save_schedule(file, greedy(replace(free.training.split.whole, memory_cap=None)))
    assert not split_models(drafted(fusion__schedule=str(file)).training.problem)
    with pytest.raises(InputError, match="has split False, this run has True"):
        drafted(fusion__schedule=str(file), fusion__split_backward="true")


def profile_file(folder, *split: float) -> str:
    """Layers that take a second forwards and two back; `split`: B and W, or nothing."""
    made, grids = run(), training(1.0, 1.0, *split, backward=2.0)
    write_json(folder / "profile.json", trained(made, SPECS, dict.fromkeys(made.trained(), grids)).to_dict())
    return str(folder / "profile.json")


def test_a_profile_prices_both_parts_or_none_is_split(tmp_path):
    old = profile_file(tmp_path)
    raw = json.loads((tmp_path / "profile.json").read_text())
    for grids in raw["training"].values():  # as a file that is older than split backwards
        del grids["layer_backward_input"], grids["layer_weight_gradient"]
    write_json(tmp_path / "profile.json", raw)
    draft = drafted(fusion__profile=old)
    split = draft.training.split
    assert not split.models and "has no times of split backwards; run tools/profile_costs.py" in split.why
    with pytest.raises(InputError, match="fusion.split_backward=true: .*profile.json has no times of split backwards"):
        drafted(fusion__profile=old, fusion__split_backward="true")
    measured = profile_file(tmp_path, 1.1, 1.0)
    draft = drafted(fusion__profile=measured)
    actor = draft.training.problem.pipeline("actor")
    assert (
        draft.training.split.models and actor.backward[0] == 2 * 1_100_000 and actor.weight_gradient == (2_000_000,) * 4
    )
    slow = profile_file(tmp_path, 2.5, 1.0)
    assert not drafted(fusion__profile=slow).training.split.models
