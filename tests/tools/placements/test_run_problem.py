"""What a run's calls take on meshes: as its plan says for the same layouts."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placements.exact_search import best_plan
from placements.mesh import Mesh
from placements.problem import Option
from placements.run_problem import RunProblem, leanest_fastest
from placements.training_options import training_options
from testkit.four_ranks import drafted, run
from testkit.mesh_cases import work_of
from testkit.profiles import examples
from testkit.sim_helpers import long_tail

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.machines import Machines
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO
from rlhfuse.costs.hardware import hardware_by_name, machines_by_name
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.rooflines import optimizer_step_seconds
from rlhfuse.planning.training.training_problem import TICK_SECONDS
from rlhfuse.schedule.bounds.bounds import latency_bound

SMALL = ModelSpec("llama", 16, 2048, 16, 8, 128, 5632, 32000, 2048)
SPECS = {role: SMALL for role in ("actor", "critic", "reference", "reward")}
CUT = {"fusion__actor_microbatches": AUTO, "fusion__microbatch_tokens": 768}  # of two samples at full length
H100 = hardware_by_name("h100")


def on_gpus(**keys):
    keys = {"trainer__hardware": "h100", "trainer__dtype": "bfloat16", **keys}
    return run(**{"fusion__intra_stage": "serial", "rollout__prompts_per_iteration": 64, **keys})


def option(run_problem, task, layout, note=""):
    whole = run_problem.problem.calls[task].options[run_problem.whole]
    return next(one for one in whole if str(one.layout) == layout and one.note.startswith(note))


def all_trainings(work, task, ranks=4, hardware=H100, memory=80e9):
    return {(str(one.layout), one.note): one for one in training_options(work, task, ranks, hardware, memory)}


def bound_of(problem, name):
    return latency_bound(replace(problem, pipelines=(problem.pipeline(name),), memory_cap=None)) * TICK_SECONDS


@pytest.mark.parametrize("lengths", [None, long_tail(300, longest=256)])
def test_the_same_layouts_take_what_the_plan_says(lengths):
    """Mini-batches at the bound, one model after the other; generation of its batches. No host launches slowly."""
    config = on_gpus(**CUT, trainer__hardware="h200", trainer__offload_optimizer="false", fusion__inter_stage=False)
    draft = drafted(config, SPECS, 4, lengths)
    seconds, work = PlanReport.of(make_plan(draft)).seconds, work_of(draft)
    actor = all_trainings(work, "actor_train", hardware=draft.inputs.hardware)["d1t1p4", "T768"]
    critic = all_trainings(work, "critic_train", hardware=draft.inputs.hardware)["d2t1p2", "T768"]
    step = sum(bound_of(draft.training.problem, name) for name in ("actor", "critic.0"))
    exact = 2e-3  # of ticks, and of micro-batches, which a model alone may cut in other numbers
    both = 4 * (step + optimizer_step_seconds(draft.analytic))
    assert actor.seconds + critic.seconds == pytest.approx(both, rel=exact)
    assert seconds.training_serial == pytest.approx(both, rel=0.1)  # the critic's transfers are shorter
    generated = option(RunProblem.of(work, machines_by_name("h200", ranks=4)), "generation", "d4t1p1")
    assert generated.seconds == pytest.approx(seconds.generation_serial, rel=exact)


number = st.integers(0, 6).map(float)
some_options = st.lists(
    st.builds(
        lambda t, p, s, h, w: Option(ParallelLayout(4, t, p), s, h, w),
        *([st.sampled_from((1, 2)), st.sampled_from((1, 2))] + [number] * 3),
    ),
    min_size=1,
    max_size=8,
)


@given(some_options, some_options, st.integers(2, 14))
@examples(200)
def test_what_is_left_out_is_never_needed(left, right, memory):
    """Two calls on one rank: the sum of what they hold, and the more of what passes, within memory."""

    def least(some, others):
        pairs = (
            one.seconds + other.seconds
            for one, other in product(some, others)
            if one.held_bytes + other.held_bytes + max(one.passing_bytes, other.passing_bytes) <= memory
        )
        return min(pairs, default=None)

    kept = [leanest_fastest(one, loose=False) for one in (left, right)]
    assert least(left, right) == least(*kept)
    loose = leanest_fastest(left, loose=True)
    assert set(kept[0]) <= set(loose) <= set(left)
    for tp in {one.layout.tp for one in left if one.layout.pp == 1}:  # of each such layout the fastest is there
        same = [one for one in left if one.layout == ParallelLayout(4, tp, 1)]
        assert min(one.seconds for one in same) in {one.seconds for one in loose if one.layout == same[0].layout}


def test_a_model_that_no_rank_can_hold_is_refused():
    work = work_of(drafted(on_gpus(), SPECS, 4))
    work = replace(work, run=work.run.with_config(work.config.with_(trainer={"memory_limit_gb": 4.5})))
    told = r"critic_train of 4 ranks of h100: no layout cuts .* fits into the .* MiB that a rank"
    with pytest.raises(InputError, match=told):
        RunProblem.of(work, machines_by_name("h100", ranks=4))


def machines(*kinds):
    """Machines of four ranks each."""
    return Machines.of([(replace(spec, devices_per_node=4), count) for spec, count in kinds])


def test_a_mesh_is_priced_with_the_kinds_of_its_own_ranks():
    slow = replace(H100, name="slow", flops=H100.flops / 3, memory_bytes=40e9)
    work = work_of(drafted(on_gpus(), SPECS, 4))
    made = RunProblem.of(work, machines((slow, 4), (H100, 4)))
    beside = H100.process_bytes + 5 * H100.communicator_bytes  # of generation, three scorers, and weights on the move
    assert made.problem.memory_bytes == (0.9 * 40e9 - beside,) * 4 + (0.9 * 80e9 - beside,) * 4
    alone = {kind: RunProblem.of(work, machines((kind, 4))) for kind in (slow, H100)}
    for task, call in made.problem.calls.items():
        for mesh, kind in ((Mesh(0, 4), slow), (Mesh(4, 4), H100)):
            mine = [(one.layout, one.seconds) for one in call.options[mesh]]
            theirs = alone[kind].problem.calls[task].options[Mesh(0, 4)]
            assert mine == [(one.layout, one.seconds) for one in theirs]
    whole = RunProblem.of(work, machines((slow, 8)))
    for task, call in made.problem.calls.items():
        mine, theirs = (one.options[Mesh(0, 8)] for one in (call, whole.problem.calls[task]))
        assert [one.seconds for one in mine] == [one.seconds for one in theirs]


@pytest.mark.ci
@pytest.mark.parametrize("slower", [2, 100])
def test_slower_machines_get_less_and_far_slower_ones_nothing(slower):
    """Either way round."""
    slow = replace(H100, name="slow", flops=H100.flops / slower, memory_bandwidth=H100.memory_bandwidth / slower)
    work = work_of(drafted(on_gpus(), SPECS, 4))
    halves, found = [Mesh(0, 4), Mesh(4, 4)], []
    for kinds in ((slow, H100), (H100, slow)):
        best = best_plan(RunProblem.of(work, machines(*((kind, 4) for kind in kinds))).problem)
        taken = [sum(c.option.seconds for c in best.plan.values() if c.mesh.overlaps(half)) for half in halves]
        little, much = taken if kinds[0] is slow else reversed(taken)
        assert little < much and (little == 0 or slower < 100)
        found.append((best.seconds, little, much))
    assert found[0] == found[1]


# terms that placements share with a plan's price ------------------------------------------------------------
