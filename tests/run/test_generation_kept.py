"""A run whose generation keeps its weights and cache between iterations trains as one that releases them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gloo import Workers
from tiny import write_run

from rlhfuse.monitor.metrics import read_metrics
from rlhfuse.run.report.compare import compare_runs

ITERATIONS, SEQUENCES = 2, 3


@pytest.fixture(scope="module")
def workers():
    pool = Workers(2)
    yield pool
    pool.close()


def job(rank: int, config: Path, out: Path, keep: bool) -> None:
    """A run whose plan says `keep`, as it would on GPUs; how often the engine took memory goes to a file."""
    from rlhfuse.config.load import load_config
    from rlhfuse.gen.model_runner import ModelRunner
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.planning.memory import MemoryBudget
    from rlhfuse.run.launch import run_job, with_device
    from rlhfuse.run.preflight import check_inputs

    caches, weights = [], []
    held_out = f"data.val_files=[{config.parent}/held_out.jsonl]"
    settings = with_device(load_config(config, [f"trainer.output_dir={out}", held_out]))
    with pytest.MonkeyPatch.context() as patch:
        take, bind = ModelRunner.new_cache, ModelRunner.bind

        def take_cache(self: ModelRunner):
            caches.append(self.options.max_sequences)
            return take(self)

        def bind_weights(self: ModelRunner, given) -> None:
            bind(self, given)
            if self.options.max_sequences == SEQUENCES:  # not the model that kernels are compiled with
                weights.append(self.weights.addresses())

        patch.setattr(MemoryBudget, "keeps_generation", lambda self, activations: keep)
        patch.setattr(ModelRunner, "new_cache", take_cache)
        patch.setattr(ModelRunner, "bind", bind_weights)
        run_job(check_inputs(settings, 2), out.name, rank, choose_device("cpu", 0, 1))
    seen = {"caches": caches.count(SEQUENCES), "loads": len(weights), "addresses": len(set(weights))}
    (out / f"engine-{rank}.json").write_text(json.dumps(seen))


def test_keeping_changes_no_bit(workers, tmp_path):
    """Two iterations, fused, with a critic, and held-out prompts after each."""
    settings = dict(
        trainer__iterations=ITERATIONS,
        trainer__eval_every=1,
        rollout__max_response_tokens=12,
        fusion__threshold=8,
        rollout__max_sequences_per_instance=SEQUENCES,
    )
    config = write_run(tmp_path, **settings)
    rows = [json.dumps({"prompt": f"w{i} w{2 * i + 5}"}) for i in range(5)]
    (tmp_path / "held_out.jsonl").write_text("\n".join(rows) + "\n")
    for name, keep in (("released", False), ("kept", True)):
        workers.run(job, config, tmp_path / name, keep)
    for compared in compare_runs(tmp_path / "released", tmp_path / "kept"):
        assert compared.entries > 10 and not compared.differences, compared
    rows = read_metrics(tmp_path / "kept" / "metrics.jsonl")
    assert len(rows) == ITERATIONS and all(row["val/samples"] == 5 for row in rows)
    plans = [json.loads((tmp_path / name / "plan.json").read_text()) for name in ("released", "kept")]
    assert [plan["keeps_generation"] for plan in plans] == [False, True]
    loads = 2 * ITERATIONS  # for each iteration and each evaluation
    for rank in range(2):
        released, kept = (
            json.loads((tmp_path / name / f"engine-{rank}.json").read_text()) for name in ("released", "kept")
        )
        assert released["caches"] == released["loads"] == kept["loads"] == loads
        assert kept["caches"] == kept["addresses"] == 1
