"""What rests or stays between the phases of a run changes no bit: generation's weights and cache, optimizer states."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
from safetensors.torch import load_file
from testkit.recorded_decode import Repeater
from testkit.runs_table import FUSED, HELD_OUT, QUEUED, assert_same_bits, metrics_of, plan_of

ITERATIONS, SEQUENCES = 2, 3


@contextmanager
def generation_that(keeps: bool, graphs: bool):
    """Counts of a rank's engine in a run whose plan `keeps` the memory of generation, as on GPUs.

    With `graphs` it decodes as GPUs do, and what a GPU would record runs again as Python.
    """
    from rlhfuse.gen.engine import Engine, EngineOptions
    from rlhfuse.gen.gpu.forward import DeviceForward
    from rlhfuse.planning.plan import Plan
    from rlhfuse.run import trainer

    caches, weights, recorder, seen = [], [], Repeater(), {}
    take, bind, options, build = Engine._new_cache, Engine._bind, trainer.engine_options, DeviceForward.__init__

    def take_cache(self: Engine):
        caches.append(self.options.max_sequences)
        return take(self)

    def bind_weights(self: Engine, given) -> None:
        bind(self, given)
        if self.options.max_sequences == SEQUENCES:  # not the model that kernels are compiled with
            weights.append(self.weights.addresses())

    def with_recorder(self, *args) -> None:
        *others, _, kernels, attention, layer, measures = args
        build(self, *others, recorder, kernels, attention, layer, measures)

    def as_on_a_gpu(*args) -> EngineOptions:
        return replace(options(*args), kernels="torch")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "keeps_generation", keeps)
        patch.setattr(Engine, "_new_cache", take_cache)
        patch.setattr(Engine, "_bind", bind_weights)
        if graphs:
            patch.setattr(DeviceForward, "__init__", with_recorder)
            patch.setattr(trainer, "engine_options", as_on_a_gpu)
        yield seen
    seen |= {"caches": caches.count(SEQUENCES), "loads": len(weights), "addresses": len(set(weights))}
    seen |= {"recorded": recorder.recorded}


def both(runs, name: str, settings: str, graphs: bool = False):
    """Released and kept: the same bits; metrics of each, and what each rank's engine took."""
    folders, ranks = [runs.folder / f"{name} {kind}" for kind in ("released", "kept")], []
    for run, keeps in zip(folders, (False, True)):
        watch = partial(generation_that, keeps, graphs)
        ranks.append(runs.start(run.name, settings, QUEUED, "trainer.eval_every=1", HELD_OUT, watch=watch))
    assert_same_bits(*folders)
    rows = [metrics_of(run) for run in folders]
    assert all(len(seen) == ITERATIONS and all(row["val/samples"] == 5 for row in seen) for seen in rows)
    loads = 2 * ITERATIONS  # for each iteration and each evaluation
    for released, kept in zip(*ranks):
        assert released["caches"] == released["loads"] == kept["loads"] == loads
        assert kept["caches"] == kept["addresses"] == 1
    return rows, ranks


def test_keeping_changes_no_bit(runs):
    """Generation and inference fused, the tail moved."""
    rows, _ = both(runs, "fused", FUSED)
    assert all("timing_s/graph_capture" not in row for seen in rows for row in seen)  # CPU kernels record nothing


def test_a_run_records_once(runs):
    """Every sample is of full length, so that each generation decodes the same shapes."""
    serial = "fusion.inter_stage=false rollout.ignore_eos=true trainer.export=false"
    (released, kept), ranks = both(runs, "graphs", serial, graphs=True)
    assert ["timing_s/graph_capture" in row for row in released] == [True] * ITERATIONS
    assert ["timing_s/graph_capture" in row for row in kept] == [True] + [False] * (ITERATIONS - 1)
    for again, once in zip(*ranks):
        assert again["recorded"] > once["recorded"] > 0
        assert again["recorded"] <= 2 * ITERATIONS * once["recorded"]


@contextmanager
def rested_bytes():
    """Host bytes of each time that a model's states had left."""
    from rlhfuse.parallel.offload import RestingTensors

    rested, free = [], RestingTensors.free

    def counted(states: RestingTensors) -> None:
        if states._resting and not states._freed:
            rested.append(states.host_bytes)
        free(states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RestingTensors, "free", counted)
        yield rested


@pytest.mark.slow
def test_an_optimizer_that_rests_on_the_host_changes_no_bit(runs):
    """With the actor held at first, evaluations, checkpoints, and an end in the middle."""
    common = f"""{HELD_OUT} trainer.eval_every=2 trainer.eval_before_train=true critic.warmup_iterations=1
        trainer.save_every=1 trainer.dtype=bfloat16"""
    stays, rests = runs.folder / "stays", runs.folder / "rests"
    stay = "trainer.offload_optimizer=false trainer.iterations=3"
    assert runs.start("stays", common, stay, watch=rested_bytes) == [[], []]
    for iterations, resume in ((2, "never"), (3, "auto")):
        rest = f"trainer.offload_optimizer=true trainer.iterations={iterations} trainer.resume={resume}"
        rested = runs.start("rests", common, rest, watch=rested_bytes)
        # both models before the first evaluation or iteration, and after every training but the last, if that ends
        assert {len(times) for times in rested} == {2 * (3 if iterations == 2 else 2)}
        assert all(min(times[-2:]) > 1e5 for times in rested)
    assert len(assert_same_bits(stays, rests)) == 3
    for rank in range(2):
        one, two = (load_file(run / f"checkpoints/iteration-3/rank-{rank}.safetensors") for run in (stays, rests))
        assert one.keys() == two.keys() and len(one) > 30 and all(one[key].equal(two[key]) for key in one)
    plan = plan_of(rests)
    assert plan["memory"]["offload"]["first_phase"] == "generation"
    by_phase = {phase["phase"]: phase for phase in plan["memory"]["phases"]}
    assert by_phase["generation"]["optimizer"] == 0 < by_phase["training"]["optimizer"]
    assert by_phase["inference"]["host"] > by_phase["training"]["optimizer"]
