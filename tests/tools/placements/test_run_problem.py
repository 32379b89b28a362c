"""What a run's calls take on meshes: as its plan says for the same layouts."""

from dataclasses import replace
from itertools import product
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placements.exact_search import best_plan
from placements.forward_options import generation_options
from placements.mesh import Mesh
from placements.problem import Option
from placements.run_problem import RunProblem, leanest_fastest, run_meshes, split_points
from placements.training_options import training_options
from run_report.timeline import simulate_gen_infer
from testkit.four_ranks import drafted, full, run, with_cores
from testkit.mesh_cases import run_problem_of, work_of
from testkit.profiles import examples
from testkit.sim_helpers import long_tail

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.machines import Machines
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO
from rlhfuse.costs.analytic_table import analytic_table
from rlhfuse.costs.hardware import hardware_by_name, machines_by_name
from rlhfuse.costs.layout_moves import model_load
from rlhfuse.costs.machine import SharedCores
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.price import bound_seconds
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.rooflines import optimizer_step_seconds
from rlhfuse.planning.training.training_problem import TICK_SECONDS
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.ranks import plain_cells

SMALL = ModelSpec("llama", 16, 2048, 16, 8, 128, 5632, 32000, 2048)
SPECS = {role: SMALL for role in ("actor", "critic", "reference", "reward")}
CUT = {"fusion__actor_microbatches": AUTO, "fusion__microbatch_tokens": 768}  # of two samples at full length
ACTOR_SPECS = {role: SMALL for role in ("actor", "reference", "reward")}
H100 = hardware_by_name("h100")


def on_gpus(**keys):
    keys = {"trainer__hardware": "h100", "trainer__dtype": "bfloat16", **keys}
    return run(**{"fusion__intra_stage": "serial", "rollout__prompts_per_iteration": 64, **keys})


def problem_of(**keys):
    return run_problem_of(drafted(on_gpus(**keys), SPECS, 4))


def option(run_problem, task, layout, note=""):
    whole = run_problem.problem.calls[task].options[run_problem.whole]
    return next(one for one in whole if str(one.layout) == layout and one.note.startswith(note))


def all_trainings(work, task, ranks=4, hardware=H100, memory=80e9):
    return {(str(one.layout), one.note): one for one in training_options(work, task, ranks, hardware, memory)}


def actor_trainings(work, hardware=H100, ranks=4):
    return all_trainings(work, "actor_train", ranks, hardware, 1e15)


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


def test_scoring_takes_what_the_simulation_says():
    """One model after generation, its weights loaded first."""
    draft = drafted(on_gpus(), SPECS, 4, long_tail(300, longest=256))
    work = work_of(draft)
    costs = {name: work.cost(name, draft.tasks[0].layout, H100) for name in ("generation", "reference_inference")}
    share = work.inputs.lengths.samples.output_share
    job = analytic_table(costs["generation"], (costs["reference_inference"],), output_share=share)
    limits = replace(draft.generation.limits, scoring_models=1, early_models=0)
    lines = [simulate_gen_infer(batch, 4, job, limits, threshold=0) for batch in work.inputs.drawn.batches]
    scored = option(RunProblem.of(work, machines_by_name("h100", ranks=4)), "reference_inference", "d4t1p1")
    assert scored.seconds == pytest.approx(fmean(line.total_seconds - line.generation_seconds for line in lines))


@pytest.mark.parametrize("layout", ["d1t1p4", "d2t1p2", "d4t1p1", "d1t4p1"])
@pytest.mark.parametrize("offload", ["true", "false"])
def test_a_model_that_trains_alone_needs_what_the_plan_says(layout, offload):
    keys = {"parallel__actor_train": layout, **CUT, "algorithm__name": "grpo"}
    keys |= {"parallel__critic_train": layout, "trainer__offload_optimizer": offload}
    draft = drafted(on_gpus(**keys), ACTOR_SPECS, 4)
    memory = draft.memory.phases(draft.memory.held_by(*make_plan(draft).schedules.values()))
    work = work_of(draft)
    note = "T768" + (", optimizer on the host" if offload == "true" else "")
    found = all_trainings(work, "actor_train")[layout, note]
    training, before = memory[-1], next(phase for phase in memory if phase.phase == "generation")
    assert found.held_bytes + found.passing_bytes == pytest.approx(training.device, rel=0.01)
    rests = training.weights + before.optimizer  # of the rank that is fullest while it trains
    assert found.held_bytes >= rests * 0.98 and (layout.endswith("p4") or found.held_bytes <= rests * 1.02)


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


def test_meshes_are_whole_machines_or_within_one():
    nodes = machines_by_name("h100", ranks=64)
    meshes = run_meshes(nodes)
    assert split_points(nodes) == [8, 16, 24, 32, 40, 48, 56] and Mesh(24, 40) in meshes and Mesh(8, 32) in meshes
    for mesh in meshes:
        inside = mesh.first // 8 == mesh.last // 8
        assert inside and mesh.size >= 4 or mesh.first % 8 == 0 and mesh.size % 8 == 0
    eight = machines_by_name("h100", ranks=8)
    assert split_points(eight) == [4] and [str(mesh) for mesh in run_meshes(eight)] == ["@0-3", "@0-7", "@4-7"]
    for ranks, points in ((1, []), (3, []), (12, [8]), (1024, list(range(128, 1024, 128)))):
        assert split_points(machines_by_name("h100", ranks=ranks)) == points


def test_every_option_cuts_the_model_and_the_batch():
    made = problem_of()
    for task, call in made.problem.calls.items():
        for mesh, some in call.options.items():
            assert len(set(map(str, some))) <= len(some)
            for one in some:
                SMALL.check_layout(one.layout, task)
                assert one.layout.size == mesh.size and one.held_bytes + one.passing_bytes <= 80e9
                assert one.layout.pp == 1 or task.endswith("_train")
    assert made.problem.calls["generation"].source == "actor_train"
    assert [call.name for call in made.problem.phases[-1]] == ["critic_train", "actor_train"]


def test_a_smaller_cache_is_leaner_and_no_faster():
    """Responses of one length on one instance, that wait for one another where not all have room."""
    config = on_gpus(rollout__prompts_per_iteration=512, rollout__max_sequences_per_instance=2048)
    work = work_of(drafted(config, SPECS, 4))
    caches = RunProblem.of(work, machines_by_name("h100", ranks=4)).problem.calls["generation"]
    caches = [one for one in caches.options[Mesh(0, 4)] if str(one.layout) == "d4t1p1"]
    assert len(caches) >= 2
    ordered = sorted(caches, key=lambda one: one.passing_bytes)
    assert [one.seconds for one in ordered] == sorted((one.seconds for one in caches), reverse=True)


def test_runs_without_a_critic_or_a_reference_have_fewer_calls():
    calls = problem_of(algorithm__name="grpo").problem.calls
    assert set(calls) == {"generation", "reference_inference", "reward_inference", "actor_train"}


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


def alone(ranks=4, **keys):
    """A run without a critic: its actor trains alone, as in a placement."""
    layouts = {f"parallel__{row}": f"d{ranks}t1p1" for row in ("generation", "inference", "reference_inference")}
    layouts |= {"parallel__reward_inference": f"d{ranks}t1p1", "parallel__actor_train": f"d1t1p{ranks}"}
    defaults = {**CUT, "fusion__split_backward": "false", "algorithm__name": "grpo"}
    made = on_gpus(**{"fusion__intra_stage": "search", **defaults, **layouts, **keys})
    return drafted(made, ACTOR_SPECS, ranks, full(made))


def price_of(draft):
    """Seconds of training in an iteration, as the plan has them."""
    minibatch = bound_seconds(draft)
    return draft.batch.optimizer_steps * (minibatch + optimizer_step_seconds(draft.analytic))


def test_stages_on_two_machines_wait_for_the_network():
    draft = alone(16, parallel__actor_train="d1t1p16", trainer__hardware="h200")  # whose host launches fast
    assert draft.training.problem.transfer > 0
    found = actor_trainings(work_of(draft), draft.inputs.hardware, 16)["d1t1p16", "T768"].seconds
    at_once = replace(draft.training, problems={m: replace(p, transfer=0) for m, p in draft.training.problems.items()})
    free = price_of(replace(draft, training=at_once))
    assert found == pytest.approx(price_of(draft), rel=1e-3) and found > 1.01 * free


@pytest.mark.parametrize("cores", [4, 2, 1])
def test_ranks_that_share_cores(monkeypatch, cores):
    """On fewer cores than ranks a pipeline takes the work of all, and generation waits for cores."""
    with_cores(monkeypatch, float(cores))
    keys = {"trainer__hardware": "cpu", "trainer__dtype": "float32", "trainer__memory_limit_gb": 200.0}
    draft = alone(**keys)
    work = work_of(draft)
    assert draft.inputs.cores.waiting == 4 / cores
    found = actor_trainings(work, draft.inputs.hardware)["d1t1p4", "T768"].seconds
    assert found == pytest.approx(price_of(draft), rel=1e-3)
    lone = price_of(replace(draft, inputs=replace(draft.inputs, cores=SharedCores(4.0, 4, 1))))
    assert found > 1.2 * lone if cores < 4 else found == pytest.approx(lone, rel=1e-3)
    generated = min(one.seconds for one in generation_options(work, 4, draft.inputs.hardware, 4, 1e15))
    cores_each = replace(work, inputs=replace(work.inputs, cores=SharedCores(4.0, 4, 1)))
    fastest = min(one.seconds for one in generation_options(cores_each, 4, draft.inputs.hardware, 4, 1e15))
    assert generated == pytest.approx(fastest * 4 / cores, rel=1e-6)


def test_communicators_are_those_of_the_plan():
    """For generation and inference without tensor ranks the plan has none but that in which weights move."""
    for layout in ("d1t1p4", "d2t1p2", "d2t2p1"):
        draft = alone(parallel__actor_train=layout)
        made = run_problem_of(draft)
        own = actor_trainings(work_of(draft))
        held = [one for one in made.problem.calls["actor_train"].options[made.whole] if str(one.layout) == layout]
        assert held
        for one in held:
            mine = one.held_bytes - own[layout, one.note].held_bytes
            assert mine + H100.communicator_bytes == draft.memory.communicators
    shared = alone(trainer__share_gpu=True, trainer__memory_limit_gb=70.0, rollout__cuda_graphs=False)
    made = run_problem_of(shared)
    assert made.problem.memory_bytes == (0.9 * 70e9 - H100.process_bytes,) * 4
    one = made.problem.calls["actor_train"].options[made.whole][0]
    assert one.held_bytes == actor_trainings(work_of(shared))[str(one.layout), one.note].held_bytes


def test_headroom_is_left_by_every_call():
    whole, some = (run_problem_of(alone(parallel__headroom=share)) for share in (0.0, 0.25))
    room = some.problem.memory_bytes[0]
    assert whole.problem.memory_bytes[0] - room == 0.25 * H100.memory_bytes
    for task, call in whole.problem.calls.items():
        found = {(str(one.layout), one.note): one for one in some.problem.calls[task].options[whole.whole]}
        kept = [one for one in call.options[whole.whole] if (str(one.layout), one.note) in found]
        assert kept and all(one.held_bytes + one.passing_bytes <= room for one in kept)


def test_sequence_parallelism_that_is_open_is_tried_both_ways():
    draft = alone()
    asked = draft.run.given.with_(parallel={"sequence_parallel": "auto"})
    opened = replace(draft.run, asked=asked)
    both = work_of(replace(draft, run=opened))
    given = actor_trainings(work_of(draft))
    found = {
        (layout, note.replace(", sequence parallel", ""), "sequence parallel" in note): one
        for (layout, note), one in actor_trainings(both).items()
    }
    assert {key[:2] for key in found if key[2]} == {(layout, note) for layout, note in given if "t1" not in layout}
    assert {key[:2]: one for key, one in found.items() if not key[2]} == given
    for (*key, cut), one in found.items():
        if cut and "recompute" not in key[1]:  # which keeps little that could be cut
            whole = given[tuple(key)]
            assert one.held_bytes + one.passing_bytes < whole.held_bytes + whole.passing_bytes


LLAMA3_8B = ModelSpec("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192)


@pytest.mark.parametrize("ranks", [8, 32])
def test_weights_are_fetched_in_about_what_their_moves_take(ranks):
    """Moves from every layout of training on the same ranks, against the one number of an option: the middle one of
    them takes 0.7 to 1.1 of it, none more than 2.5 times as long."""
    draft = alone()
    work = work_of(draft)
    work = replace(work, run=replace(work.run, specs={role: LLAMA3_8B for role in ACTOR_SPECS}))
    sources = [one for one in work.layouts("actor_train", ranks, 8) if one.dp <= 64]
    for layout in work.layouts("generation", ranks, 8):
        some = generation_options(work, ranks, H100, ranks, 1e15)
        fetch = next(one.fetch_seconds for one in some if one.layout == layout)
        shares = []
        for source in sources:
            load = model_load(LLAMA3_8B, source, plain_cells(source), layout, 2, H100.devices_per_node)
            shares.append(load.seconds(H100) / fetch)
        assert 0.7 < median(shares) < 1.1 and max(shares) < 2.5
