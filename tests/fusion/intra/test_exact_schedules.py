"""On one layout every schedule gives the same bits: losses, gradients, weights and optimizer state of three steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from testkit.against_whole import References, write_models
from testkit.training_case import Case, Recording, predicted_peaks, run_case
from testkit.whole_model import ADAM

from rlhfuse.config.spec import ParallelLayout
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.rules.builders import serial_1f1b


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def pair(models, actor: str, critic: str, **changes) -> Case:
    folders = {"actor": models[changes.pop("a", "actor")], "critic": models[changes.pop("c", "critic")]}
    return Case({"actor": actor, "critic": critic}, folders, **{"recipe": ADAM, "steps": 3} | changes)


def check_equal_bits(runs: dict[str, Recording]) -> None:
    """Everything that was recorded of all runs, bit for bit, and live activations as each schedule predicts."""
    first = next(iter(runs.values()))
    for name, run in runs.items():
        assert run.digests == first.digests, name
        assert run.losses == first.losses and run.norms == first.norms, name
        assert run.peak_live == predicted_peaks(run.case), name


@pytest.mark.parametrize(
    "actor,critic,schedules",
    [
        ("d1t1p4", "d2t1p2", ("serial", "fused", "eager", "capped")),
        pytest.param("d2t1p2", "d2t1p2", ("serial", "fused"), marks=pytest.mark.slow),
        pytest.param("d1t2p2", "d2t1p2", ("serial", "fused", "eager"), marks=pytest.mark.slow),
        pytest.param("d4t1p1", "d1t1p4", ("serial", "fused", "eager", "capped"), marks=pytest.mark.slow),
    ],
)
def test_schedules_of_one_layout_give_the_same_bits(workers, models, actor, critic, schedules):
    runs = {name: run_case(workers, pair(models, actor, critic, schedule=name)) for name in schedules}
    assert len({run.case.planned.text() for run in runs.values()}) == len(runs), "two schedules are the same"
    check_equal_bits(runs)


@pytest.mark.parametrize("layout", ["d1t1p4", pytest.param("d2t1p2", marks=pytest.mark.slow)])
def test_time_sharing_and_others_in_one_direction_give_the_same_bits(workers, models, layout):
    """PUZZLE's order wants both models on the same ranks, stage by stage."""
    case = pair(models, layout, layout, alternate=False)
    check_equal_bits({name: run_case(workers, case.but(schedule=name)) for name in ("serial", "time-shared", "fused")})


@pytest.mark.parametrize("layout", ["d1t1p4", pytest.param("d2t1p2", marks=pytest.mark.slow)])
def test_one_direction_and_opposite_directions_differ_in_the_gradient_norm_alone(workers, models, layout):
    """The norm is summed over ranks in their order; with the stages on other ranks its last bits differ."""
    case = pair(models, layout, layout, recipe=replace(ADAM, clip_grad=0.0))
    opposed = run_case(workers, case)
    shared = run_case(workers, case.but(alternate=False, schedule="time-shared"))
    assert opposed.losses == shared.losses
    for model in case.layouts:
        for name, gradient in opposed.gradients[model].items():
            assert torch.equal(gradient, shared.gradients[model][name]), (model, name)
            assert torch.equal(opposed.weights[model][name], shared.weights[model][name]), (model, name)
        for ours, theirs in zip(opposed.norms, shared.norms):
            assert ours[model] == pytest.approx(theirs[model], rel=1e-6)


@pytest.mark.parametrize(
    "a,c,actor",
    [("tied", "five", "d2t1p2v2"), pytest.param("actor", "critic", "d1t2p2v2", marks=pytest.mark.slow)],
)
def test_interleaved_stages_give_the_same_bits_in_every_order(workers, models, a, c, actor):
    case = pair(models, actor, "d2t1p2v2", a=a, c=c)
    runs = {name: run_case(workers, case.but(schedule=name)) for name in ("interleaved", "serial", "fused")}
    check_equal_bits(runs)


@pytest.mark.parametrize(
    "changes", [dict(reduce="joint"), dict(recompute=True)], ids=["joint reductions", "recomputation"]
)
def test_what_changes_no_bit(workers, models, changes):
    case = pair(models, "d1t2p2", "d2t1p2", a="tied")
    check_equal_bits({"plain": run_case(workers, case), "changed": run_case(workers, case.but(**changes))})


@pytest.mark.slow
def test_sequence_parallelism_gives_the_same_bits_in_every_order(workers, models):
    case = pair(models, "d2t2p1", "d1t2p2", sequence_parallel=True)
    check_equal_bits({name: run_case(workers, case.but(schedule=name)) for name in ("fused", "serial")})


def test_pipelines_of_half_the_depth_and_twice_the_replicas(workers, models):
    """1F1B+ is serial 1F1B on the halved layouts: shorter bubbles, and the results of the reference."""
    deep = pair(models, "d1t1p4", "d1t1p4")
    halves = [str(ParallelLayout.parse(layout).halved()) for layout in deep.layouts.values()]
    case = pair(models, *halves, schedule="serial", microbatches=deep.microbatches // 2)
    # a stage of the halved layout is two of the deep one's, and takes one unit like one of them
    assert 2 * evaluate(case.planned).makespan < evaluate(serial_1f1b(deep.problem)).makespan
    References().check(run_case(workers, case))
