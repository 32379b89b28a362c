"""Whether the optimizer rests on the host outside training, and models that score come early; what the plan says."""

from functools import cache

import pytest
from testkit import four_ranks
from testkit.four_ranks import SPECS, planned, run
from testkit.llama3 import llama3

from rlhfuse.base.errors import InputError
from rlhfuse.config.load import load_config, read_specs
from rlhfuse.planning.candidate import Candidate
from rlhfuse.planning.planner import make_plan
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


def test_it_stays_where_all_phases_fit_beside_it(file):
    draft = drafted(file, "trainer.memory_limit_gb=100")
    assert draft.memory.offload is None and static(draft)["inference"].optimizer > 0
    reasons = "\n".join(PlanReport.of(make_plan(draft)).reasons)
    assert "trainer.offload_optimizer=auto: the optimizer stays on the device, every phase fits beside it" in reasons
    forced = drafted(file, "trainer.memory_limit_gb=100", "trainer.offload_optimizer=true")
    assert forced.memory.offload.nbytes > 0 and static(forced)["inference"].optimizer == 0
    held = {made.training.problem.static_memory for made in (forced, draft)}
    assert len(held) == 1  # of training, which it is back for


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
