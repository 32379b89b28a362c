"""Every pair of layouts trains as one process would, and every schedule of it gives the same bits.

A row is trained once and held against the whole models: losses, gradients, weights. Trained again by another schedule,
or with backwards that are split, all that was recorded is equal: losses, gradients, norms, weights, optimizer state.
"""

from dataclasses import replace

import pytest
import torch
from testkit.training_case import SAMPLES, Case, predicted_peaks, write_models
from testkit.training_record import run_case
from testkit.training_references import References
from testkit.whole_model import ADAM, Recipe

from rlhfuse.schedule.ir.action import Kind

SLOW = pytest.mark.slow
BOTH = ("actor", "critic")
FUSED, SERIAL, EAGER, CAPPED, SHARED, INTERLEAVED = (
    {"schedule": name} for name in ("fused", "serial", "eager", "capped", "time-shared", "interleaved")
)
RANDOM_SPLIT, CRITIC_SPLIT = {"schedule": "random", "split": BOTH}, {"split": ("critic",)}
PARALLEL, SELECTIVE = {"sequence_parallel": True}, {"recompute": "selective"}
BY_SAMPLE = Recipe(by_sample=True)
TIED = {"actor": "tied", "critic": "five"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references():
    return References()


def case_of(models, layouts: str, *, actor="actor", critic="critic", **changes) -> Case:
    """`layouts` of actor, critic and perhaps a second actor, trained from these of `models`."""
    named = dict(zip((*BOTH, "second"), layouts.split()))
    folders = {"actor": models[actor], "critic": models[critic], "second": models["second"]}
    return Case(named, {model: folders[model] for model in named}, **changes)


def check_equal_bits(base, run) -> None:
    """Everything that was recorded of both runs, and live activations as each schedule predicts."""
    case = run.case
    assert run.digests == base.digests and run.losses == base.losses and run.norms == base.norms, case
    assert run.peak_live == predicted_peaks(case), case
    kinds = {(action.pipeline, action.kind) for order in case.planned.orders for action in order}
    assert {p for p, kind in kinds if kind is Kind.W} == {p.name for p in case.problem.pipelines if p.split}
    changed = (case.schedule, case.split) != (base.case.schedule, base.case.split)
    assert (case.planned.text() != base.case.planned.text()) == changed, "two schedules are the same"


ROWS = [
    ("d1t1p4 d2t1p2", {}, [SERIAL, EAGER, CAPPED]),
    ("d1t1p4 d1t2p2", {}, [SERIAL]),
    ("d2t1p2 d2t1p2", {}, [SERIAL]),  # two replicas of one fused group
    ("d1t1p4 d2t1p2", {"recipe": ADAM, "tokens": 40}, [SERIAL, {"schedule": "random"}]),
    ("d2t1p2 d1t1p4", {"tokens": 56}, [SERIAL, RANDOM_SPLIT]),
    ("d1t2p2 d2t1p2", {"recipe": ADAM, "actor": "tied"}, [{"reduce": "joint"}, {"recompute": "full"}, SELECTIVE]),
    ("d1t1p4:1,1,2,1 d2t1p2:4,1", {"recipe": ADAM, **TIED}, [SERIAL]),
    ("d2t1p2v2 d2t1p2v2", {"recipe": ADAM, **TIED}, [SERIAL, INTERLEAVED]),
    ("d1t1p4 d1t1p4", {"recipe": ADAM, "alternate": False}, [SERIAL, SHARED]),  # stage by stage on the same ranks
    ("d2t2p1 d1t2p2", {"recipe": ADAM, "steps": 2, **PARALLEL}, [RANDOM_SPLIT, CRITIC_SPLIT]),
    ("d1t2p2 d1t1p4", {"actor": "qwen3", "critic": "five", "steps": 2, **PARALLEL}, [{**SERIAL, "recompute": "full"}]),
    (
        "d2t1p2v2:1,2,1,1 d1t1p4:2,1,1,1",
        {"recipe": ADAM, "steps": 2, **TIED},
        [RANDOM_SPLIT, CRITIC_SPLIT, {**RANDOM_SPLIT, **SELECTIVE}],
    ),
    ("d1t2p2v2 d2t1p2v2", {"recipe": ADAM, **SELECTIVE, **PARALLEL}, [{"recompute": "none"}, RANDOM_SPLIT]),
    (
        "d1t2p2 d2t1p2",
        {"recipe": ADAM, "steps": 2, "recompute": "full", **PARALLEL},
        [RANDOM_SPLIT, CRITIC_SPLIT, {**RANDOM_SPLIT, **SELECTIVE}],
    ),
    ("d1t1p4 d1t1p4", {"steps": 1, "microbatches": SAMPLES}, []),  # a sample each
    ("d4t1p1 d4t1p1", {"steps": 1, "microbatches": 1}, []),
    ("d1t1p4 d2t1p2 d1t2p2", {}, [SERIAL, {"schedule": "random", "split": ("actor", "second")}]),
    ("d1t2p2 d2t1p2", {"steps": 2, "recipe": BY_SAMPLE}, [SERIAL]),
    pytest.param("d1t1p4 d2t1p2", {"recipe": ADAM, "steps": 2}, [RANDOM_SPLIT, CRITIC_SPLIT], marks=SLOW),
    pytest.param("d1t2p2 d1t1p4", {"actor": "tied", "steps": 2}, [RANDOM_SPLIT, CRITIC_SPLIT], marks=SLOW),
    pytest.param("d4t1p1 d1t1p4", {"recipe": ADAM}, [SERIAL, EAGER, CAPPED], marks=SLOW),
    pytest.param("d2t1p2 d2t1p2", {"recipe": ADAM, "alternate": False}, [SERIAL, SHARED], marks=SLOW),
    pytest.param("d1t2p2v2 d2t1p2v2", {"recipe": ADAM}, [SERIAL, INTERLEAVED], marks=SLOW),
    pytest.param("d2t2p1 d1t2p2", {"recipe": ADAM, **PARALLEL}, [SERIAL], marks=SLOW),
    pytest.param("d1t2p2 d1t2p2", PARALLEL, [], marks=SLOW),
    pytest.param("d2t1p2 d1t1p4", {}, [SERIAL, EAGER], marks=SLOW),
    pytest.param("d4t1p1 d2t1p2", {}, [SERIAL, EAGER], marks=SLOW),
    pytest.param("d1t2p2 d2t1p2", {}, [SERIAL, EAGER], marks=SLOW),  # the critic's two stages are merged on one node
    pytest.param("d2t2p1 d1t2p2", {}, [], marks=SLOW),
    pytest.param("d1t1p4 d2t1p2", {"recipe": ADAM}, [SERIAL], marks=SLOW),
    pytest.param("d1t1p4 d2t1p2", TIED, [], marks=SLOW),
    pytest.param("d1t2p2 d1t1p4", TIED, [], marks=SLOW),
    pytest.param("d2t1p2v2:1,2,1,1 d1t2p2:1,4", {"recipe": ADAM, **TIED}, [SERIAL], marks=SLOW),
    pytest.param(
        "d2t2p1 d2t2p1", {"recipe": ADAM, "steps": 2, "actor": "tied"}, [RANDOM_SPLIT, CRITIC_SPLIT], marks=SLOW
    ),
    pytest.param("d1t1p4 d1t1p4", {"steps": 1, "microbatches": 2}, [], marks=SLOW),
    pytest.param("d1t1p4 d1t1p4", {"steps": 1, "microbatches": 8}, [], marks=SLOW),
    pytest.param(
        "d4t1p1 d1t1p4", {"steps": 2, "recipe": BY_SAMPLE, "microbatches": SAMPLES // 4}, [], marks=SLOW
    ),  # some count nothing
]


@pytest.mark.parametrize("layouts, changes, variants", ROWS)
def test_a_row_trains_as_whole_models_and_in_any_order_alike(workers, models, references, layouts, changes, variants):
    base = run_case(workers, case_of(models, layouts, **changes))
    references.check(base)
    for variant in variants:
        check_equal_bits(base, run_case(workers, base.case.but(**variant)))


def test_coprime_pipelines_on_six_ranks(pools, models, references):
    """The actor's two of three stages against the critic's three of two."""
    six, case = pools.of(6), case_of(models, "d2t1p3 d3t1p2", critic="five", microbatches=3)
    assert [share.pipelines for share in case.ranks.shape.shares] == [2, 3]
    fused, serial = (run_case(six, case.but(**schedule)) for schedule in (FUSED, SERIAL))
    check_equal_bits(fused, serial)
    references.check(fused)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_programs(workers, models, seed):
    layouts = ("d1t1p4 d2t1p2", "d2t1p2v2 d1t2p2")[seed % 2]
    whole = run_case(workers, case_of(models, layouts, recipe=ADAM, steps=2, microbatches=6))
    split = (BOTH, ("actor",), ("critic",))[seed % 3]
    check_equal_bits(whole, run_case(workers, whole.case.but(split=split, seed=seed, schedule="random")))


@pytest.mark.parametrize("layout", ["d1t1p4", pytest.param("d2t1p2", marks=pytest.mark.slow)])
def test_one_direction_and_opposite_directions_differ_in_the_gradient_norm_alone(workers, models, layout):
    """The norm is summed over ranks in their order; with the stages on other ranks its last bits differ."""
    case = case_of(models, f"{layout} {layout}", recipe=replace(ADAM, clip_grad=0.0))
    opposed = run_case(workers, case)
    shared = run_case(workers, case.but(alternate=False, **SHARED))
    assert opposed.losses == shared.losses
    for model in case.layouts:
        for name, gradient in opposed.gradients[model].items():
            assert torch.equal(gradient, shared.gradients[model][name]), (model, name)
            assert torch.equal(opposed.weights[model][name], shared.weights[model][name]), (model, name)
        for ours, theirs in zip(opposed.norms, shared.norms):
            assert ours[model] == pytest.approx(theirs[model], rel=1e-6)
