"""Where the layers of each stage are from, and that everything in a plan has the same."""

from dataclasses import replace

import pytest
from testkit import flat_profile
from testkit.four_ranks import SPECS, TINY, drafted, full, planned, run

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_json
from rlhfuse.planning.plan import Plan
from rlhfuse.planning.report.report import PlanReport

WIDE = dict.fromkeys(SPECS, replace(TINY, hidden=1024, mlp=2816, head_dim=128, vocab=64_000))
H100 = {"trainer__hardware": "h200"}


def training(made, specs=WIDE) -> dict[str, tuple[int, ...]]:
    """Layers of each stage by the tasks, which the ranks and the fused shape must repeat."""
    draft = drafted(made, specs, 4, full(made))
    layouts = {task.role: task.layout for task in draft.tasks if task.training}
    assert draft.ranks.shape.layouts == layouts
    return {role: tuple(map(len, layout.stage_layers(8))) for role, layout in layouts.items()}


def test_the_stage_with_the_output_layer_has_fewer_layers():
    plan = planned(run(**H100), WIDE, full(run(**H100)))
    cut = {task.role: task.layout.cut for task in PlanReport.of(plan).tasks if task.training}
    assert cut["actor"][-1] == 1 and sum(cut["actor"]) == 8  # the vocabulary is 4.6 layers' worth
    assert cut["critic"] is None or cut["critic"][0] < 4  # its embedding makes the first rank the fullest
    received = Plan.parse(plan.to_text())
    assert received == plan and PlanReport.from_dict(PlanReport.of(plan).to_dict()) == PlanReport.of(plan)
    actor = next(balance for balance in PlanReport.of(plan).schedule.stages if balance.model == "actor")
    pipeline = plan.likeliest.problem.pipeline("actor")
    stages = [(f + b) * 1e-6 for f, b in zip(pipeline.forward, pipeline.backward)]
    assert actor.slowest_seconds == pytest.approx(max(stages), rel=1e-2)
    assert actor.mean_seconds == pytest.approx(sum(stages) / 4, rel=1e-2)
    text = PlanReport.of(plan).render()
    assert f"slowest stage {actor.slowest_seconds / actor.mean_seconds - 1:.1%} above the mean" in text
    assert f"d1t1p4:{','.join(map(str, cut['actor']))} ranks 0-3" in text


def test_a_cpu_run_has_the_even_cut_unless_another_is_faster():
    assert training(run(), SPECS) == {"actor": (2, 2, 2, 2), "critic": (4, 4)}
    five = dict.fromkeys(SPECS, replace(TINY, layers=8, vocab=2_000_000))
    assert training(run(trainer__memory_limit_gb=1e3), five)["actor"][-1] == 1


def test_even_and_a_cut_that_the_layout_lists():
    assert training(run(parallel__stage_layers="even", **H100)) == {"actor": (2, 2, 2, 2), "critic": (4, 4)}
    given = dict(parallel__actor_train="d1t1p4:1,3,3,1", parallel__critic_train="d2t1p2:4,4")
    assert training(run(**H100, **given)) == {"actor": (1, 3, 3, 1), "critic": (4, 4)}
    layouts = [str(task.layout) for task in drafted(run(**H100, **given), WIDE, 4).tasks if task.training]
    assert layouts == ["d1t1p4:1,3,3,1", "d2t1p2"]
    with pytest.raises(InputError, match=r"actor_train=d1t1p4:1,3,3,3: 10 layers in all stages != layers\(8\)"):
        drafted(run(parallel__actor_train="d1t1p4:1,3,3,3"), WIDE, 4)


def test_memory_is_that_of_the_cut():
    """The fullest rank of an explicit cut holds what the cut gives it."""
    layouts = dict(parallel__generation="d4t1p1", parallel__critic_train="d4t1p1")
    lopsided = drafted(run(parallel__actor_train="d1t1p4:5,1,1,1", **H100, **layouts), WIDE, 4).memory
    even = drafted(run(parallel__stage_layers="even", **H100, **layouts), WIDE, 4).memory
    most, evenly = (max(rank.static[-1].gradients for rank in memory.ranks) for memory in (lopsided, even))
    assert most - evenly == pytest.approx(3 * 4 * WIDE["actor"].layer_parameters, rel=0.01)


def test_a_profile_decides_the_cut(tmp_path):
    """Measured ends as long as three layers, where the roofline's are next to nothing."""
    made = run(fusion__profile=str(tmp_path / "profile.json"))
    grids = {"actor": flat_profile.training(0.01, 0.03), "critic": flat_profile.training(0.01, 0.0)}
    write_json(tmp_path / "profile.json", flat_profile.trained(made, SPECS, grids).to_dict())
    assert training(made, SPECS) == {"actor": (2, 3, 2, 1), "critic": (4, 4)}
    assert training(run(), SPECS)["actor"] == (2, 2, 2, 2)
