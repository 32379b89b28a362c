"""A run whose generation keeps its weights and cache between iterations trains as one that releases them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from testkit.tiny import write_run
from testkit.workers import Workers

from rlhfuse.monitor.metrics import read_metrics
from rlhfuse.run.report.compare import compare_runs

POOL_RANKS = 2

ITERATIONS, SEQUENCES = 2, 3


class Repeater:
    """Stands where the CUDA recorder stands: what it records runs again."""

    recorded = 0

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        self.recorded += 1
        work()
        return work

    def release(self) -> None:
        pass


def job(rank: int, config: Path, out: Path, keep: bool, overrides: tuple[str, ...], graphs: bool) -> None:
    """A run whose plan says `keep`, as it would on GPUs; how often the engine took memory goes to a file.

    With `graphs` it decodes as GPUs do, and what a GPU would record runs again as Python.
    """
    from rlhfuse.config.load import load_config
    from rlhfuse.gen.gpu.forward import DeviceForward
    from rlhfuse.gen.model_runner import EngineOptions, ModelRunner
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.planning.memory import MemoryBudget
    from rlhfuse.run import trainer
    from rlhfuse.run.launch import run_job, with_device
    from rlhfuse.run.preflight import check_inputs

    caches, weights, recorder = [], [], Repeater()
    held_out = f"data.val_files=[{config.parent}/held_out.jsonl]"
    settings = with_device(load_config(config, [f"trainer.output_dir={out}", held_out, *overrides]))
    with pytest.MonkeyPatch.context() as patch:
        take, bind, options, build = (
            ModelRunner.new_cache,
            ModelRunner.bind,
            trainer.engine_options,
            DeviceForward.__init__,
        )

        def take_cache(self: ModelRunner):
            caches.append(self.options.max_sequences)
            return take(self)

        def bind_weights(self: ModelRunner, given) -> None:
            bind(self, given)
            if self.options.max_sequences == SEQUENCES:  # not the model that kernels are compiled with
                weights.append(self.weights.addresses())

        def with_recorder(self, *args) -> None:
            *others, _, kernels, attention, layer, rows = args
            build(self, *others, recorder, kernels, attention, layer, rows)

        def as_on_a_gpu(*args) -> EngineOptions:
            return replace(options(*args), kernels="torch", draft_rows=0)

        patch.setattr(MemoryBudget, "keeps_generation", lambda self, activations: keep)
        patch.setattr(ModelRunner, "new_cache", take_cache)
        patch.setattr(ModelRunner, "bind", bind_weights)
        if graphs:
            patch.setattr(DeviceForward, "__init__", with_recorder)
            patch.setattr(trainer, "engine_options", as_on_a_gpu)
        run_job(check_inputs(settings, 2), out.name, rank, choose_device("cpu", 0, 1))
    seen = {"caches": caches.count(SEQUENCES), "loads": len(weights), "addresses": len(set(weights))}
    (out / f"engine-{rank}.json").write_text(json.dumps(seen | {"recorded": recorder.recorded}))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Two iterations with a critic, and held-out prompts after each."""
    folder = tmp_path_factory.mktemp("kept")
    settings = dict(
        trainer__iterations=ITERATIONS,
        trainer__eval_every=1,
        rollout__max_response_tokens=12,
        rollout__max_sequences_per_instance=SEQUENCES,
    )
    rows = [json.dumps({"prompt": f"w{i} w{2 * i + 5}"}) for i in range(5)]
    (folder / "held_out.jsonl").write_text("\n".join(rows) + "\n")
    return write_run(folder, **settings)


def twice(workers: Workers, config: Path, name: str, overrides: tuple[str, ...], graphs: bool = False):
    """Released and kept: the same bits; metrics of each, and what each rank's engine took."""
    folders = [config.parent / f"{name}-{kind}" for kind in ("released", "kept")]
    for out, keep in zip(folders, (False, True)):
        workers.run(job, config, out, keep, overrides, graphs)
    for compared in compare_runs(*folders):
        assert compared.entries > 10 and not compared.differences, compared
    plans = [json.loads((out / "plan.json").read_text()) for out in folders]
    assert [plan["keeps_generation"] for plan in plans] == [False, True]
    rows = [read_metrics(out / "metrics.jsonl") for out in folders]
    assert all(len(seen) == ITERATIONS and all(row["val/samples"] == 5 for row in seen) for seen in rows)
    ranks = [[json.loads((out / f"engine-{rank}.json").read_text()) for rank in range(2)] for out in folders]
    loads = 2 * ITERATIONS  # for each iteration and each evaluation
    for released, kept in zip(*ranks):
        assert released["caches"] == released["loads"] == kept["loads"] == loads
        assert kept["caches"] == kept["addresses"] == 1
    return rows, ranks


def test_keeping_changes_no_bit(workers, config):
    """Generation and inference fused, the tail moved."""
    rows, _ = twice(workers, config, "fused", ("fusion.threshold=8",))
    assert all("timing_s/graph_capture" not in row for seen in rows for row in seen)  # CPU kernels record nothing


def test_a_run_records_once(workers, config):
    """Every sample is of full length, so that each generation decodes the same shapes."""
    serial = ("fusion.inter_stage=false", "rollout.ignore_eos=true", "trainer.export=false")
    (released, kept), ranks = twice(workers, config, "graphs", serial, graphs=True)
    assert ["timing_s/graph_capture" in row for row in released] == [True] * ITERATIONS
    assert ["timing_s/graph_capture" in row for row in kept] == [True] + [False] * (ITERATIONS - 1)
    for again, once in zip(*ranks):
        assert again["recorded"] > once["recorded"] > 0
        assert again["recorded"] <= 2 * ITERATIONS * once["recorded"]
