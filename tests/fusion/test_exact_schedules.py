"""On one layout every schedule gives the same bits: losses, gradients, weights and optimizer state after three steps."""

from __future__ import annotations

import pytest
from against_whole import References, write_models
from training_case import Case, Recording, predicted_peaks, run_case
from whole_model import ADAM

from rlhfuse.schedule.evaluate import evaluate
from rlhfuse.schedule.halved import halved_1f1b
from rlhfuse.spec import ParallelLayout


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def pair(models, actor: str, critic: str, **changes) -> Case:
    folders = {"actor": models[changes.pop("a", "actor")], "critic": models[changes.pop("c", "critic")]}
    return Case({"actor": actor, "critic": critic}, folders, **{"recipe": ADAM, "steps": 3} | changes)


def bits(run: Recording) -> dict:
    """What must not differ. Digests are of a rank's stages: sets, because time-sharing puts them on other ranks."""
    return {"digests": {model: sorted(digests) for model, digests in run.digests.items()},
            "losses": run.losses, "norms": run.norms}  # fmt: skip


@pytest.mark.parametrize(
    "actor,critic,schedules",
    [
        ("d1t1p4", "d1t1p4", ("fused", "time-shared", "serial", "gpipe", "capped")),
        ("d2t1p2", "d2t1p2", ("fused", "time-shared", "serial", "gpipe")),
        ("d1t1p4", "d2t1p2", ("fused", "serial", "gpipe", "capped")),
        ("d1t2p2", "d2t1p2", ("fused", "serial", "gpipe")),
        ("d4t1p1", "d1t1p4", ("fused", "serial")),
    ],
)
def test_schedules_of_one_layout_give_the_same_bits(workers, models, actor, critic, schedules):
    case = pair(models, actor, critic)
    runs = {name: run_case(workers, case.but(schedule=name)) for name in schedules}
    assert len({tuple(map(str, run.case.planned.orders)) for run in runs.values()}) == len(runs), "equal schedules"
    for name, run in runs.items():
        assert run.peak_live == predicted_peaks(run.case), name
        assert bits(run) == bits(runs["serial"]), name


@pytest.mark.parametrize("a,c,actor", [("tied", "five", "d2t1p2v2"), ("actor", "critic", "d1t2p2v2")])
def test_interleaved_stages_give_the_same_bits_in_every_order(workers, models, a, c, actor):
    case = pair(models, actor, "d2t1p2v2", a=a, c=c)
    runs = {name: run_case(workers, case.but(schedule=name)) for name in ("interleaved", "serial", "fused")}
    for name, run in runs.items():
        assert run.peak_live == predicted_peaks(run.case), name
        assert bits(run) == bits(runs["serial"]), name


@pytest.mark.parametrize(
    "changes", [dict(reduce="joint"), dict(recompute=True)], ids=["joint reductions", "recomputation"]
)
def test_what_changes_no_bit(workers, models, changes):
    case = pair(models, "d1t2p2", "d2t1p2", a="tied")
    plain, other = run_case(workers, case), run_case(workers, case.but(**changes))
    assert bits(plain) == bits(other)
    assert plain.peak_live == other.peak_live


def test_sequence_parallelism_gives_the_same_bits_in_every_order(workers, models):
    case = pair(models, "d2t2p1", "d1t2p2", sequence_parallel=True)
    fused, serial = (run_case(workers, case.but(schedule=name)) for name in ("fused", "serial"))
    assert bits(fused) == bits(serial)


def test_pipelines_of_half_the_depth_and_twice_the_replicas(workers, models):
    """1F1B+ is serial 1F1B on the halved layouts: the time of the halved schedule, and the results of the reference."""
    deep = pair(models, "d1t1p4", "d1t1p4")
    halves = [str(ParallelLayout.parse(layout).halved()) for layout in deep.layouts.values()]
    case = pair(models, *halves, schedule="serial", microbatches=deep.microbatches // 2)
    # a stage of the halved layout is two of the deep one's, and takes one unit like one of them
    assert 2 * evaluate(case.planned).makespan == evaluate(halved_1f1b(deep.problem)).makespan
    References().check(run_case(workers, case))
