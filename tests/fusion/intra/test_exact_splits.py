"""Split backwards give the bits of whole ones, in every schedule: losses, gradients, weights, optimizer state."""

from __future__ import annotations

import pytest
from testkit.against_whole import References, write_models
from testkit.training_case import Case, predicted_peaks, run_case
from testkit.whole_model import ADAM, SGD

from rlhfuse.schedule.ir.action import Kind

BOTH = ("actor", "critic")
RANDOM = dict(schedule="random")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def case_of(models, layouts: dict[str, str], **changes) -> Case:
    folders = {model: models[changes.pop(model, model)] for model in layouts}
    return Case(layouts, folders, **{"recipe": ADAM, "steps": 2} | changes)


CASES = {
    "unequal depths": ({"actor": "d1t1p4", "critic": "d2t1p2"}, {}),
    "merged stages, tensor ranks": ({"actor": "d1t2p2", "critic": "d1t1p4"}, dict(actor="tied")),
    "sequence parallelism": ({"actor": "d2t2p1", "critic": "d1t2p2"}, dict(sequence_parallel=True)),
    "tied, uneven, two stages a rank": (
        {"actor": "d2t1p2v2:1,2,1,1", "critic": "d1t1p4:2,1,1,1"},
        dict(actor="tied", critic="five"),
    ),
    "recomputation": ({"actor": "d1t2p2", "critic": "d2t1p2"}, dict(recompute=True, sequence_parallel=True)),
    "one stage": ({"actor": "d2t2p1", "critic": "d2t2p1"}, dict(actor="tied")),
}


SLOW = {"unequal depths", "merged stages, tensor ranks"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
def test_split_backwards_have_the_bits_of_whole_ones(workers, models, name):
    layouts, changes = CASES[name]
    whole = run_case(workers, case_of(models, layouts, schedule="serial", **changes))
    runs = [dict(split=BOTH, **RANDOM), dict(split=("critic",), schedule="fused")]
    for run in runs:
        split = run_case(workers, case_of(models, layouts, **changes, **run))
        kinds = {(action.pipeline, action.kind) for order in split.case.planned.orders for action in order}
        assert {p for p, kind in kinds if kind is Kind.W} == {p.name for p in split.case.problem.pipelines if p.split}
        assert split.digests == whole.digests and split.losses == whole.losses and split.norms == whole.norms, run
        assert split.peak_live == predicted_peaks(split.case), run


def test_three_models_of_which_two_are_split(workers, models):
    layouts = {"actor": "d1t1p4", "critic": "d2t1p2", "second": "d1t2p2"}
    whole = run_case(workers, case_of(models, layouts, recipe=SGD))
    split = run_case(workers, case_of(models, layouts, recipe=SGD, split=("actor", "second"), **RANDOM))
    assert split.digests == whole.digests
    References().check(split)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_programs(workers, models, seed):
    layouts = ({"actor": "d1t1p4", "critic": "d2t1p2"}, {"actor": "d2t1p2v2", "critic": "d1t2p2"})[seed % 2]
    whole = run_case(workers, case_of(models, layouts, microbatches=6))
    split = (BOTH, ("actor",), ("critic",))[seed % 3]
    other = run_case(workers, case_of(models, layouts, microbatches=6, split=split, seed=seed, **RANDOM))
    assert other.digests == whole.digests
