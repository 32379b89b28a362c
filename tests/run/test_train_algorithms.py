"""Whole runs of two ranks without a critic, without a reference, with functions and mixed rewards: fused is serial."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from testkit.tiny import write_run, write_tokenizer
from testkit.workers import Workers

from rlhfuse.monitor.trace import load_trace
from rlhfuse.run.report.compare import compare_runs
from rlhfuse.run.report.forecast import Forecaster
from rlhfuse.run.report.run_files import RunFiles

POOL_RANKS = 2

FUNCTIONS = """
import time

def words(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str.split())) * float(ground_truth) + (extra_info or {}).get("bonus", 0)

def even(completion_ids):
    # a sample's share of what all of its prompt have: none can be called without the others
    counts = [1 + sum(i % 2 == 0 for i in ids) for ids in completion_ids]
    assert len(counts) == 2
    return [count / sum(counts) for count in counts]

def slow(completion_ids):
    time.sleep(0.5)
    return even(completion_ids)

def fails(completions):
    raise OverflowError("not today")
"""
WITHOUT_CRITIC = ("reward.path=''", "reward.signature=trl", "critic.optim.lr=0.1")
SERIAL = ("fusion.inter_stage=false", "fusion.intra_stage=false")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run's file; its rows are verl's, its functions stand in functions.py beside it."""
    folder = tmp_path_factory.mktemp("algorithms")
    (folder / "functions.py").write_text(FUNCTIONS)
    file = write_run(folder, trainer__iterations=2, rollout__max_response_tokens=12, rollout__samples_per_prompt=2)
    truth = {"data_source": "x", "reward_model": {"ground_truth": 0.1}}
    rows = [{"prompt": f"w{i} w{2 * i}", "extra_info": {"bonus": i}, **truth} for i in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def job(rank: int, config: Path, out: Path, overrides: tuple[str, ...]) -> list[str] | str:
    """The job on this rank; the roles that it trained and scored with, or what failed."""
    import multiprocessing

    from rlhfuse.base.errors import RewardError
    from rlhfuse.config.load import load_config
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.run.launch import run_job, with_device
    from rlhfuse.run.preflight import check_inputs

    multiprocessing.current_process()._config["daemon"] = False  # a daemon may not start the reward's processes
    settings = load_config(config, [*overrides, f"trainer.output_dir={out}"])
    settings = with_device(settings)
    try:
        run_job(
            check_inputs(settings, 2), f"{out.name}-{settings.trainer.iterations}", rank, choose_device("cpu", 0, 1)
        )
    except RewardError as error:
        return str(error)
    return sorted(folder.name for folder in out.glob("export/*"))


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def run_both(workers: Workers, config: Path, name: str, *overrides: str) -> tuple[Path, list[str]]:
    """A fused run with a trigger while everything decodes, and a serial one; both must be the same."""
    fused, serial = config.parent / f"{name}-fused", config.parent / f"{name}-serial"
    exported = workers.run(job, config, fused, (*overrides, "fusion.threshold=8"))[0]
    workers.run(job, config, serial, (*overrides, *SERIAL))
    assert all(row["fusion/destinations"] == 1 for row in rows(fused))
    assert all(row["fusion/destinations"] == 0 for row in rows(serial))
    for compared in compare_runs(fused, serial):
        assert compared.entries > 10 and not compared.differences, compared
    return fused, exported


def test_grpo_with_a_function_reward(workers, config):
    function = f"reward.function={config.parent}/functions.py:even"
    run, exported = run_both(
        workers,
        config,
        "grpo",
        *WITHOUT_CRITIC,
        "algorithm.name=grpo",
        function,
        "algorithm.kl_in=loss",
        "algorithm.kl_estimator=k3",
        "algorithm.epochs=2",
        "algorithm.kl_target=1",
        "algorithm.kl_horizon=100",
    )
    assert exported == ["actor"]
    metrics = rows(run)
    assert all(0 <= row["critic/score/mean"] <= 1 and row["rollout/train_logprob_abs_diff"] < 1e-5 for row in metrics)
    assert metrics[0]["actor/kl_loss"] >= 0 and not {"critic/vf_loss", "critic/values/mean"} & metrics[0].keys()
    assert metrics[0]["actor/kl_coef"] == 0.05 > metrics[1]["actor/kl_coef"]  # it was below its target
    plan = json.loads((run / "plan.json").read_text())
    assert [task["name"] for task in plan["tasks"]] == ["generation", "reference_inference", "actor_train"]


def test_a_slow_reward_function_is_measured_and_predicted(workers, config):
    """Its calls take longer than all else together, so they alone say how long generation and inference take."""
    run, function = config.parent / "slow", f"reward.function={config.parent}/functions.py:slow"
    settings = ("algorithm.name=grpo", function, "fusion.threshold=8", "trainer.trace_iterations=2")
    workers.run(job, config, run, (*WITHOUT_CRITIC, *settings))
    cost, row = json.loads((run / "costs.json").read_text())["reward"], rows(run)[1]
    assert 0.5 <= cost["seconds"] < 0.6 and cost["at_once"] == 2  # a call has both samples of a prompt
    assert 0.5 < row["timing_s/reward"] <= row["timing_s/infer"]
    waits = [span for span in load_trace(run / "trace.json") if span.kind == "reward"]
    assert {span.rank for span in waits} == {0, 1}
    timeline = Forecaster(RunFiles.read(run)).forecast(1).timeline
    assert timeline.total_seconds == pytest.approx(row["fusion/gen_infer_seconds"], rel=0.15)
    assert 0 < timeline.reward_seconds < timeline.total_seconds


def test_ppo_with_a_mixed_reward(workers, config):
    function = f"reward.function={config.parent}/functions.py:words"
    tokenizer = write_tokenizer(config.parent / "tokenizer")
    marked = tokenizer / "tokenizer_config.json"
    marked.write_text(json.dumps(json.loads(marked.read_text()) | {"model_max_length": 77}))
    run, exported = run_both(
        workers,
        config,
        "mixed",
        f"actor.tokenizer={tokenizer}",
        function,
        "reward.model_weight=0.5",
        "reward.function_weight=2",
        "algorithm.clip_eps_high=0.28",
        "algorithm.dual_clip=3",
        "algorithm.missing_eos_penalty=1",
        "trainer.iterations=1",
        f"critic.path={config.parent}/actor",
    )
    assert exported == ["actor", "critic"]
    for role in exported:
        assert (run / "export" / role / "tokenizer_config.json").read_bytes() == marked.read_bytes()
    assert rows(run)[0]["critic/values/mean"] == 0, "a critic that begins as the actor has a value head of zeros"
    for row in rows(run):
        mixed = 0.5 * row["reward/model/mean"] + 2 * row["reward/function/mean"]
        assert row["critic/score/mean"] == pytest.approx(mixed, rel=1e-5)
        assert row["critic/vf_loss"] > 0 and row["actor/pg_clipfrac_lower"] >= 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rloo", "reinforce++"])
def test_without_critic_reference_and_reward_model(workers, config, name):
    """Nothing scores at all but the function."""
    function = f"reward.function={config.parent}/functions.py:even"
    run, exported = run_both(
        workers,
        config,
        name.rstrip("+"),
        *WITHOUT_CRITIC,
        f"algorithm.name={name}",
        function,
        "reference.path=none",
        "algorithm.kl_coef=0",
    )
    assert exported == ["actor"] and "actor/ref_kl" not in rows(run)[0]


@pytest.mark.slow
def test_what_moves_from_iteration_to_iteration_is_resumed(workers, config):
    """The checkpoint holds the KL's coefficient and the spread of scores: the resumed run is the uninterrupted one."""
    moving = ("algorithm.kl_target=0.01", "algorithm.kl_horizon=50", "algorithm.scale_scores=true")
    settings = ("algorithm.name=rloo", *moving, "trainer.iterations=3")
    whole, part = config.parent / "steered", config.parent / "resumed"
    workers.run(job, config, whole, settings)
    first = (*settings[:-1], "trainer.iterations=2", "trainer.save_every=2", "trainer.export=false")
    workers.run(job, config, part, first)
    assert len(rows(part)) == 2
    (part / "finished.json").unlink()
    workers.run(job, config, part, (*settings, "trainer.resume=auto"))
    for name in ("actor/kl_coef", "critic/score_scale"):
        assert len({row[name] for row in rows(whole)}) == 3, name
    for compared in compare_runs(whole, part):
        assert not compared.differences, compared


def actor_in(checkpoint: Path) -> dict:
    """Tensors of the actor in a checkpoint's files, by file and name."""
    from safetensors import safe_open

    found = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {(file.name, key): opened.get_tensor(key) for key in opened.keys() if "actor" in key}
    return found


def test_the_critic_warms_up_alone_and_schedules_go_on_after_a_restart(workers, config):
    """The actor is held still, every bit of it; then its own schedule begins, resumed or not."""
    settings = (
        "critic.warmup_iterations=2",
        "actor.optim.lr_scheduler_type=cosine",
        "critic.optim.lr_scheduler_type=linear",
        "critic.optim.min_lr_ratio=0.1",
        "algorithm.kl_target=1",
        "trainer.save_every=1",
        "trainer.keep_checkpoints=9",
        "trainer.iterations=4",
    )
    whole, part = config.parent / "warm", config.parent / "warm-resumed"
    workers.run(job, config, whole, settings)
    before, after = (actor_in(whole / "checkpoints" / f"iteration-{n}") for n in (1, 2))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert not any("exp_avg" in name for _, name in after), "a held actor has no moments yet"
    moved = actor_in(whole / "checkpoints" / "iteration-3")
    assert any(not torch.equal(moved[key], after[key]) for key in after)
    assert any("exp_avg" in name for _, name in moved)
    metrics = rows(whole)
    assert [row["actor/lr"] for row in metrics] == pytest.approx([0, 0, 1e-3, 5e-4])
    assert [row["critic/lr"] for row in metrics] == pytest.approx([1e-3, 7.75e-4, 5.5e-4, 3.25e-4])
    held = metrics[:2]
    assert all(row["actor/pg_clipfrac"] == 0 and row["actor/grad_norm"] > 0 for row in held)
    assert all(abs(row["actor/ref_kl"]) < 1e-6 for row in held)
    assert {row["actor/kl_coef"] for row in metrics[:3]} == {0.05}, "what steers the actor waits for it"
    shorter = (*settings[:-1], "trainer.iterations=1", "trainer.export=false")
    ends = ("actor.optim.lr_decay_iterations=2", "critic.optim.lr_decay_iterations=4")
    workers.run(job, config, part, (*shorter, *ends))
    (part / "finished.json").unlink()
    workers.run(job, config, part, (*settings, "trainer.resume=auto"))
    for compared in compare_runs(whole, part):
        assert not compared.differences, compared
