"""Whether the optimizer rests on the host outside training, and models that score come early; what the plan says."""

from functools import cache

import pytest
from testkit import four_ranks
from testkit.four_ranks import SPECS, planned, run, shared_plan
from testkit.llama3 import llama3

from rlhfuse.base.errors import InputError
from rlhfuse.base.readable_bytes import readable_bytes
from rlhfuse.config.load import load_config, read_specs
from rlhfuse.planning.candidate import Candidate
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.price import GenerationPrice, Moves, with_schedules
from rlhfuse.planning.report.report import PlanReport

RUN = """
actor: {{path: {model}}}
critic: {{path: {model}}}
reference: {{path: {model}}}
reward: {{path: {model}}}
data: {{train_files: [none.jsonl], max_prompt_tokens: 1024}}
rollout: {{prompts_per_iteration: 1024, samples_per_prompt: 1, max_response_tokens: 1024}}
fusion: {{actor_microbatches: 128, intra_stage: false, threshold: 64}}
parallel: {{headroom: 0.0, sequence_parallel: true, actor_train: d2t4p8, critic_train: d2t4p8, generation: d8t8p1}}
trainer: {{device: cuda, hardware: h200, memory_limit_gb: 80, dtype: bfloat16}}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Four models of 70B on 64 H100."""
    folder = llama3(tmp_path_factory.mktemp("llama3"), "70B")
    (folder / "run.yaml").write_text(RUN.format(model=folder))
    return folder / "run.yaml"


@cache
def drafted(file, *overrides: str) -> Candidate:
    config = load_config(file, overrides)
    return four_ranks.drafted(config, read_specs(config), 64)


@cache
def reported(file, *overrides: str) -> PlanReport:
    return PlanReport.of(make_plan(drafted(file, *overrides)))


def static(draft: Candidate) -> dict:
    return {phase.phase: phase for phase in draft.memory.static}


def test_four_models_of_70b_fit_64_gpus_because_the_optimizer_leaves(file):
    """What it holds is 12 bytes of each parameter of two models, cut by 8 stages, 4 tensor ranks and 2 replicas."""
    draft = drafted(file)
    offload = draft.memory.offload
    parameters = [max(draft.analytic[task].memory.place_parameters) for task in ("actor_train", "critic_train")]
    assert offload.nbytes == pytest.approx(12 / 2 * sum(parameters), rel=0.05)
    assert offload.seconds == pytest.approx(offload.nbytes / 51.2e9)
    assert offload.first_phase == "generation"  # weights move beside it
    phases = static(draft)
    assert [phases[name].optimizer for name in ("generation", "inference")] == [0, 0]
    assert phases["training"].optimizer == phases["moves"].optimizer == offload.nbytes
    assert all(draft.memory.needed(phase) <= 80e9 for phase in phases.values())
    stays = draft.memory.needed(phases["inference"]) + offload.nbytes
    with pytest.raises(InputError, match=r"inference needs .* 74.5 GiB; set trainer.offload_optimizer=auto, or lower"):
        drafted(file, "trainer.offload_optimizer=false")
    assert stays > 80e9
    scorers = sum(
        draft.analytic[f"{role}_inference"].memory.weights_bytes() for role in ("reference", "reward", "critic")
    )
    assert {phases[name].host for name in ("moves", "inference", "training")} == {scorers + offload.nbytes}
    assert phases["start"].host == scorers


def test_the_plan_tells_where_it_rests_and_what_that_costs(file):
    report = reported(file)
    assert PlanReport.from_dict(report.to_dict()).memory.offload == report.memory.offload
    (line,) = [line for line in report.reasons if "offload_optimizer" in line]
    assert line.startswith("trainer.offload_optimizer=auto: a phase would not fit beside it, on the host outside")
    held, seconds = readable_bytes(report.memory.offload.nbytes), f"{report.memory.offload.seconds:.2g}"
    assert f"rest {held} of optimizer per rank; they leave while the weights move and come back during the" in line
    moving, offload = Moves.of(report.weight_moves).before, report.memory.offload
    seen = offload.seen_seconds(moving, report.schedule.makespan_seconds)
    assert f"{seconds} s each way, of which {seen:.2g} s are not hidden" in line
    assert report.seconds.weight_moves == pytest.approx(moving + seen)


def test_seconds_that_are_hidden(file):
    offload = drafted(file).memory.offload
    assert offload.seen_seconds(moving=10.0, minibatch=10.0) == 0
    assert offload.seen_seconds(moving=0.5, minibatch=10.0) == pytest.approx(offload.seconds - 0.5)
    assert offload.seen_seconds(moving=0.0, minibatch=0.0) == 2 * offload.seconds


def test_it_leaves_before_the_weights_move_where_those_have_no_room_beside_it(file):
    keys = "trainer.recompute=full", "parallel.generation=d16t4p1", "parallel.inference=d8t8p1"
    roomy = drafted(file, *keys, "trainer.offload_optimizer=true")
    limit = roomy.memory.needed(static(roomy)["moves"]) / 1e9 - 0.1
    draft = drafted(file, *keys, f"trainer.memory_limit_gb={limit}")
    assert draft.memory.offload.first_phase == "moves" and static(draft)["moves"].optimizer == 0
    assert draft.memory.offload.seen_seconds(moving=10.0, minibatch=10.0) == draft.memory.offload.seconds
    generation = GenerationPrice(0, None, "", 1.0, 1.0, None, None)
    assert with_schedules(draft, generation, Moves(10.0, 0.0), 10.0).offload == draft.memory.offload.seconds
    report = PlanReport.of(make_plan(draft))
    told = "they leave before the weights move and come back during the first mini-batch"
    seconds = f"{report.memory.offload.seconds:.2g} s"
    assert f"{told}, {seconds} each way, of which {seconds} are not hidden" in "\n".join(report.reasons)
    moving = Moves.of(report.weight_moves).before
    assert report.seconds.weight_moves == pytest.approx(moving + report.memory.offload.seconds)


def test_it_stays_where_all_phases_fit_beside_it(file):
    draft = drafted(file, "trainer.memory_limit_gb=100")
    assert draft.memory.offload is None and static(draft)["inference"].optimizer > 0
    reasons = "\n".join(PlanReport.of(make_plan(draft)).reasons)
    assert "trainer.offload_optimizer=auto: the optimizer stays on the device, every phase fits beside it" in reasons
    forced = drafted(file, "trainer.memory_limit_gb=100", "trainer.offload_optimizer=true")
    assert forced.memory.offload.nbytes > 0 and static(forced)["inference"].optimizer == 0
    held = {made.training.problem.static_memory for made in (forced, draft)}
    assert len(held) == 1  # of training, which it is back for


def test_it_leaves_as_soon_as_a_phase_would_not_leave_the_headroom(file):
    """And before the weights move where those would not."""
    base = "trainer.recompute=full"
    stays = drafted(file, base, "trainer.offload_optimizer=false", "trainer.memory_limit_gb=141")
    needs = {name: stays.memory.needed(phase) / 1e9 for name, phase in static(stays).items()}
    beside = max(needs["inference"], needs["moves"])
    for limit, share, first in (
        (beside / 0.9 + 0.1, 0.1, None),
        (beside / 0.9 - 0.1, 0.1, "generation" if needs["moves"] < needs["inference"] else "moves"),
        (needs["moves"] / 0.9 - 0.1, 0.1, "moves"),
        (beside / 0.9 - 0.1, 0.0, None),
    ):
        offload = drafted(file, base, f"trainer.memory_limit_gb={limit}", f"parallel.headroom={share}").memory.offload
        assert (offload and offload.first_phase) == first, (limit, share)


def test_room_for_the_cache_is_cut_before_the_optimizer_leaves(file):
    small = "reward.path=''", "reward.function=rewards:one", "reference.path=none", "algorithm.kl_coef=0"
    draft = drafted(file, *small, "rollout.max_response_tokens=7168", "trainer.recompute=full")
    assert draft.memory.offload is None and draft.config.rollout.kv_blocks_per_instance > 0


@pytest.mark.parametrize("asked", ["auto", "true"])
def test_on_a_cpu_only_where_it_is_asked_for(asked):
    plan = PlanReport.of(planned(run(trainer__offload_optimizer=asked)))
    assert (plan.memory.offload is None) == (asked == "auto")
    phases = {phase.phase: phase for phase in plan.memory.phases}
    assert (phases["generation"].optimizer == 0) == (asked == "true")
    stays, rests = (
        four_ranks.drafted(run(trainer__offload_optimizer=answer), SPECS, 4).memory.ranks for answer in ("false", asked)
    )
    for one, other in zip(stays, rests):  # two allocations there
        extra = one.static[-1].optimizer if asked == "true" else 0
        assert {phase.host for phase in other.static} == {one.static[-1].host + extra}


# models that score, loaded before generation ends ------------------------------------------------------------------


def test_as_many_as_have_room_beside_generation(file):
    """In the order in which they score; a tenth of the limit stays free."""
    draft = drafted(file)
    weights = [draft.analytic[f"{role}_inference"].memory.weights_bytes() for role in ("reference", "critic", "reward")]
    none = drafted(file, "rollout.kv_blocks_per_instance=60000")
    assert none.memory.early == () and none.generation.limits.early_models == 0
    before = static(draft)["generation"].weights - sum(draft.memory.early)
    assert before == static(none)["generation"].weights
    for limit, count in ((80, 1), (90, 2), (110, 3)):
        roomy = drafted(file, f"trainer.memory_limit_gb={limit}", "trainer.offload_optimizer=true")
        assert roomy.memory.early == tuple(weights[:count]) and roomy.generation.limits.early_models == count
        phase = static(roomy)["generation"]
        assert phase.weights == before + sum(weights[:count])
        assert roomy.memory.needed(phase) + roomy.memory.generation.graphs <= 0.9 * limit * 1e9
        assert count == 3 or roomy.memory.needed(phase) + weights[count] > 0.9 * limit * 1e9 - 1e9


def test_the_plan_tells_which_come_early(file):
    report = reported(file)
    assert report.generation.limits.early_models == 1
    (line,) = [line for line in report.reasons if line.startswith("loading ")]
    assert line.startswith("loading reference, critic, reward takes 1 s of an instance: reference (16.4 GiB)")
    assert line.endswith("beneath the end of generation; critic, reward after it, for want of room")
    report = reported(file, "rollout.kv_blocks_per_instance=60000")
    (line,) = [line for line in report.reasons if line.startswith("loading ")]
    assert "after generation: beside it not even reference has room in 90% of the limit" in line


def test_on_a_cpu_none_comes_early():
    """Copies there take the cores that decode."""
    plan = PlanReport.of(shared_plan())
    assert plan.generation.limits.early_models == 0 and not [
        line for line in plan.reasons if line.startswith("loading ")
    ]
