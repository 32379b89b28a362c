"""A run whose optimizer rests on the host between trainings is the run in which it stays, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from testkit.tiny import write_run

from rlhfuse.run.report.compare import compare_runs

POOL_RANKS = 2

EVALUATES = ("trainer.eval_every=2", "trainer.eval_before_train=true")


def job(rank: int, config: Path, out: Path, overrides: tuple[str, ...]) -> list[int]:
    """Run; returns the host bytes of each time that a model's states had left."""
    from rlhfuse.config.load import load_config
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.parallel.offload import RestingTensors
    from rlhfuse.run.launch import run_job, with_device
    from rlhfuse.run.preflight import check_inputs

    rested, free = [], RestingTensors.free

    def counted(states: RestingTensors) -> None:
        if states._resting and not states._freed:
            rested.append(states.host_bytes)
        free(states)

    RestingTensors.free = counted
    try:
        settings = with_device(load_config(config, [*overrides, f"trainer.output_dir={out}"]))
        name = f"{out.name}-{settings.trainer.iterations}-{settings.trainer.resume}"
        run_job(check_inputs(settings, 2), name, rank, choose_device("cpu", 0, 1))
    finally:
        RestingTensors.free = free
    return rested


@pytest.mark.slow
def test_a_run_is_the_same(workers, tmp_path):
    """With the actor held at first, evaluations, checkpoints, and an end in the middle."""
    config = write_run(tmp_path, trainer__save_every=1, trainer__dtype="bfloat16", rollout__max_response_tokens=12)
    shutil.copy(tmp_path / "prompts.jsonl", tmp_path / "held_out.jsonl")
    common = (f"data.val_files=[{tmp_path}/held_out.jsonl]", *EVALUATES, "critic.warmup_iterations=1")
    assert workers.run(job, config, tmp_path / "stays", (*common, "trainer.offload_optimizer=false")) == [[], []]
    rests = (*common, "trainer.offload_optimizer=true")
    for iterations, resume in ((2, "never"), (3, "auto")):
        settings = (*rests, f"trainer.iterations={iterations}", f"trainer.resume={resume}")
        rested = workers.run(job, config, tmp_path / "rests", settings)
        # both models before the first evaluation or iteration, and after every training but the last, if that ends
        assert {len(times) for times in rested} == {2 * (3 if iterations == 2 else 2)}
        assert all(min(times[-2:]) > 1e5 for times in rested)
    comparisons = compare_runs(tmp_path / "stays", tmp_path / "rests")
    assert len(comparisons) == 3 and all(c.entries > 10 and not c.differences for c in comparisons), comparisons
    for rank in range(2):
        one, two = (tmp_path / name / f"checkpoints/iteration-3/rank-{rank}.safetensors" for name in ("stays", "rests"))
        with safe_open(one, "pt") as a, safe_open(two, "pt") as b:
            assert set(a.keys()) == set(b.keys()) and len(list(a.keys())) > 30
            assert all(a.get_tensor(key).equal(b.get_tensor(key)) for key in a.keys())
    plan = json.loads((tmp_path / "rests" / "plan.json").read_text())
    assert plan["offload"]["first_phase"] == "generation"
    by_phase = {phase["phase"]: phase for phase in plan["memory"]}
    assert by_phase["generation"]["optimizer"] == 0 < by_phase["training"]["optimizer"]
    assert by_phase["inference"]["host"] > by_phase["training"]["optimizer"]
