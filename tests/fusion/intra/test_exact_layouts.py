"""Every pair of layouts trains as one process would: losses, gradients and weights against the whole models."""

from __future__ import annotations

import pytest
from testkit.against_whole import GRADIENTS, References, distance, write_models
from testkit.training_case import Case, run_case
from testkit.whole_model import ADAM

PAIRS = [
    ("d1t1p4", "d2t1p2"),
    pytest.param("d2t1p2", "d1t1p4", marks=pytest.mark.slow),
    ("d4t1p1", "d2t1p2"),
    ("d1t2p2", "d2t1p2"),  # the critic's two stages are merged on one node
    pytest.param("d1t1p4", "d1t2p2", marks=pytest.mark.slow),
    ("d2t1p2", "d2t1p2"),  # two replicas of one fused group
    ("d2t2p1", "d1t2p2"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def references():
    return References()


def pair(models, actor: str, critic: str, **changes) -> Case:
    folders = {"actor": models[changes.pop("a", "actor")], "critic": models[changes.pop("c", "critic")]}
    return Case({"actor": actor, "critic": critic}, folders, **changes)


@pytest.mark.parametrize("actor,critic", PAIRS)
def test_a_pair_of_layouts_trains_as_whole_models(workers, models, references, actor, critic):
    references.check(run_case(workers, pair(models, actor, critic)))


@pytest.mark.parametrize("actor,critic", [("d1t1p4", "d2t1p2"), ("d1t2p2", "d2t1p2")])
def test_adam_with_weight_decay_and_sharded_state(workers, models, references, actor, critic):
    references.check(run_case(workers, pair(models, actor, critic, recipe=ADAM)))


@pytest.mark.parametrize("actor,critic", [("d1t1p4", "d2t1p2"), ("d1t2p2", "d1t1p4"), ("d2t1p2v2", "d1t1p4")])
def test_tied_embeddings_and_stages_of_unequal_depth(workers, models, references, actor, critic):
    references.check(run_case(workers, pair(models, actor, critic, a="tied", c="five")))


@pytest.mark.parametrize("actor,critic", [("d1t1p4:1,1,2,1", "d2t1p2:4,1"), ("d2t1p2v2:1,2,1,1", "d1t2p2:1,4")])
def test_any_cut_of_the_layers_trains_as_whole_models(workers, models, references, actor, critic):
    case = pair(models, actor, critic, a="tied", c="five", recipe=ADAM)
    fused, serial = (run_case(workers, case.but(schedule=name)) for name in ("fused", "serial"))
    assert fused.digests == serial.digests
    references.check(fused)


@pytest.mark.parametrize(
    "actor,critic", [("d2t2p1", "d1t2p2"), pytest.param("d1t2p2", "d1t2p2", marks=pytest.mark.slow)]
)
def test_sequence_parallelism(workers, models, references, actor, critic):
    references.check(run_case(workers, pair(models, actor, critic, sequence_parallel=True, steps=2)))


def test_three_models_at_once(workers, models, references):
    folders = {name: models[name] for name in ("actor", "critic", "second")}
    case = Case({"actor": "d1t1p4", "critic": "d2t1p2", "second": "d1t2p2"}, folders)
    fused, serial = (run_case(workers, case.but(schedule=name)) for name in ("fused", "serial"))
    assert fused.digests == serial.digests
    references.check(fused)


VARIANTS = {
    "8 micro-batches": dict(microbatches=8),
    "2 micro-batches": dict(microbatches=2),
    "one sample each": dict(microbatches=24),
    "dp 4": dict(layouts={"actor": "d4t1p1", "critic": "d4t1p1"}, microbatches=1),
    "tp 2, dp 2": dict(layouts={"actor": "d2t2p1", "critic": "d2t2p1"}),
    "pp 2, tp 2": dict(layouts={"actor": "d1t2p2", "critic": "d1t2p2"}),
    "pp 2, dp 2": dict(layouts={"actor": "d2t1p2", "critic": "d2t1p2"}),
}


def test_gradients_do_not_depend_on_microbatches_packing_or_layout(workers, models, references):
    base = run_case(workers, pair(models, "d1t1p4", "d1t1p4", steps=1))
    for name, changes in VARIANTS.items():
        other = run_case(workers, base.case.but(**changes))
        for model in base.gradients:
            assert distance(other.gradients[model], base.gradients[model], relative=True) <= GRADIENTS, (name, model)
        references.check(other)
