"""Held-out prompts: what their metrics are, and that training does not notice that they were evaluated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from testkit.tiny import write_run

from rlhfuse.checkpoint.checkpoint import checkpoints_in
from rlhfuse.monitor.metrics import read_metrics
from rlhfuse.monitor.samples import read_samples
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.run.evaluation import evaluation_metrics, noise_seed
from rlhfuse.run.iteration_recorder import IterationRecorder
from rlhfuse.run.report.compare import compare_exports, compare_runs
from rlhfuse.run.report.report import render_report
from rlhfuse.run.report.run_files import RunFiles

POOL_RANKS = 2

FUNCTION = """
from pathlib import Path

def hits_or_too_large(completion_ids, wanted):
    if wanted[0] == 3 and Path(__file__).with_name("too_large").exists():
        return [1e308] * len(wanted)  # infinity in float32
    return hits(completion_ids, wanted)

def hits(completion_ids, wanted):
    return [sum(token % divisor == 0 for token in ids) / len(ids) for ids, divisor in zip(completion_ids, wanted)]
"""
GRPO = ("reward.path=''", "reward.signature=trl", "algorithm.name=grpo", "actor.optim.lr=0.01")
EVAL = ("trainer.eval_every=2", "trainer.eval_before_train=true", "eval.samples_per_prompt=3")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run of four short iterations; held-out rows want multiples of another number than those of training."""
    folder = tmp_path_factory.mktemp("evaluation")
    file = write_run(folder, trainer__iterations=4, rollout__max_response_tokens=12, rollout__samples_per_prompt=2)
    (folder / "functions.py").write_text(FUNCTION)
    for name, count, wanted in (("prompts", 6, 2), ("held_out", 5, 3)):
        rows = [{"prompt": f"w{i} w{2 * i + count}", "wanted": wanted} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def job(rank: int, config: Path, out: Path, overrides: tuple[str, ...]) -> None:
    import multiprocessing

    from rlhfuse.config.load import load_config
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.run.launch import run_job, with_device
    from rlhfuse.run.preflight import check_inputs

    multiprocessing.current_process()._config["daemon"] = False  # a daemon may not start the reward's processes
    settings = with_device(load_config(config, [*overrides, f"trainer.output_dir={out}"]))
    name = f"{out.name}-{settings.trainer.iterations}-{settings.trainer.resume}"
    run_job(check_inputs(settings, 2), name, rank, choose_device("cpu", 0, 1))


def ended_job(rank: int, config: Path, out: Path, overrides: tuple[str, ...], number: int, interrupted: str) -> str:
    """As `job`, the `number`-th start; rank 1 gets a SIGINT when it says `interrupted`. Returns how it ended."""
    import multiprocessing
    import os
    import signal

    from rlhfuse.base.errors import JointError, NotFiniteError, Stopped
    from rlhfuse.config.load import load_config
    from rlhfuse.monitor.watchdog import Watchdog
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.run.launch import run_job, with_device
    from rlhfuse.run.preflight import check_inputs

    multiprocessing.current_process()._config["daemon"] = False
    settings = with_device(load_config(config, [*overrides, f"trainer.output_dir={out}"]))
    progress = Watchdog.progress

    def heard(self: Watchdog, doing: str) -> None:
        progress(self, doing)
        if rank == 1 and doing == interrupted:
            os.kill(os.getpid(), signal.SIGINT)

    Watchdog.progress = heard
    try:
        run_job(check_inputs(settings, 2), f"{out.name}-start-{number}", rank, choose_device("cpu", 0, 1))
    except (JointError, NotFiniteError, Stopped) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Watchdog.progress = progress
    return "done"


def held_out(config: Path) -> str:
    return f"data.val_files=[{config.parent}/held_out.jsonl]"


def values_of(row: dict) -> dict:
    return {key: value for key, value in row.items() if key.startswith("val/")}


def test_metrics_are_those_of_their_definition():
    scores = [[0.0, 1.0, 0.5], [0.25, 0.25, -1.0]]
    rollouts = [
        Rollout(number, (1,), (3,) * (number + 1), torch.zeros(number + 1), "length" if number == 4 else "stop")
        for number in range(6)
    ]
    batch = RolloutBatch.from_rollouts(rollouts).with_fields(scores=torch.tensor(scores).flatten())
    metrics = evaluation_metrics(batch, 3)
    assert metrics["val/score/mean"] == metrics["val/score/mean@3"] == pytest.approx((0.5 - 1 / 6) / 2)
    assert metrics["val/score/best@3"] == (1.0 + 0.25) / 2
    # of two means a and b the standard error is half their distance
    assert metrics["val/score/std_error"] == pytest.approx((0.5 + 1 / 6) / 2)
    assert (metrics["val/response_length/mean"], metrics["val/response_length/clip_ratio"]) == (3.5, 1 / 6)
    alone = evaluation_metrics(batch.select([0]), 1)
    assert not any("@" in key or "std_error" in key for key in alone) and alone["val/samples"] == 1


def test_noise_of_held_out_samples_is_none_of_trainings():
    seeds = {noise_seed(seed) for seed in range(1000)}
    assert len(seeds) == 1000 and all(1000 <= seed < 2**63 for seed in seeds)


def test_what_runs_between_iterations_is_not_counted_as_their_books(monkeypatch):
    recorder = IterationRecorder.__new__(IterationRecorder)
    recorder._closed = 10.0
    recorder.skip(4.0)
    monkeypatch.setattr("rlhfuse.run.iteration_recorder.wall_seconds", lambda: 14.5)
    recorder.begin()
    assert recorder._logging == 0.5


def test_training_does_not_notice(workers, config):
    """PPO by a reward model, fused, with a critic: evaluated and not, the same bits; the tail is moved in both."""
    base, fused = config.parent, ("fusion.threshold=8", "rollout.max_sequences_per_instance=3")
    workers.run(job, config, base / "plain", fused)
    greedy = ("eval.max_response_tokens=16", "trainer.eval_every=1", "trainer.eval_before_train=true")
    workers.run(job, config, base / "seen", (*fused, *greedy, "eval.temperature=0", held_out(config)))
    plain, seen = (read_metrics(base / name / "metrics.jsonl") for name in ("plain", "seen"))
    assert [row["iteration"] for row in seen] == [-1, 0, 1, 2, 3]
    assert all(row["val/samples"] == 5 and row["val/response_length/mean"] <= 16 for row in seen)
    assert any(row["val/response_length/mean"] > 12 for row in seen) and len({row["val/digest"] for row in seen}) > 1
    assert [row["fusion/destinations"] for row in seen[1:]] == [row["fusion/destinations"] for row in plain]
    kept = [{key: value for key, value in row.items() if not key.startswith("val/")} for row in seen[1:]]
    (base / "seen" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    for compared in compare_runs(base / "plain", base / "seen"):
        assert compared.entries > 10 and not compared.differences, compared


def test_evaluations_of_one_actor_are_equal(workers, config):
    """With an actor that does not learn, whichever way it is fused: the noise is the sample's, not the iteration's."""
    function = f"reward.function={config.parent}/functions.py:hits"
    still = (*GRPO, function, *EVAL, held_out(config), "actor.optim.lr=0", "trainer.export=false")
    still += ("trainer.keep_best=true",)
    workers.run(job, config, config.parent / "fused", (*still, "fusion.threshold=8"))
    workers.run(job, config, config.parent / "serial", (*still, "fusion.inter_stage=false"))
    found = []
    for name in ("fused", "serial"):
        rows = list(filter(values_of, read_metrics(config.parent / name / "metrics.jsonl")))
        assert [bool(row["fusion/val_migrated_samples"]) for row in rows] == [name == "fused"] * 3
        found += map(values_of, rows)
        assert not checkpoints_in(config.parent / name), "none was better than before training"
    first, *others = found
    assert all(other == first for other in others)
    assert first["val/score/best@3"] > first["val/score/mean"]


def test_the_best_is_kept_and_a_resumed_run_knows_it(workers, config):
    """The scores, by a function of the held-out rows' own columns, are the same after a restart; so is what is kept."""
    base, function = config.parent, f"reward.function={config.parent}/functions.py:hits"
    settings = (
        *GRPO,
        function,
        "trainer.eval_every=1",
        "trainer.keep_best=true",
        "trainer.keep_checkpoints=1",
        "trainer.seed=2",
    )
    settings += ("trainer.save_every=1", "eval.samples_per_prompt=4", held_out(config))
    whole, part = base / "whole", base / "part"
    workers.run(job, config, whole, settings)
    rows = read_metrics(whole / "metrics.jsonl")
    scores = [row["val/score/mean"] for row in rows]
    best = scores.index(max(scores)) + 1
    assert 1 <= best < len(scores), scores  # the seed is one with which the last is not the best
    kept = sorted(folder.name for folder in (whole / "checkpoints").glob("iteration-*"))
    assert kept == sorted({f"iteration-{best}", f"iteration-{len(scores)}"})
    until = ("trainer.eval_every=1", "trainer.keep_best=false", f"trainer.iterations={best}")
    workers.run(job, config, base / "until", (*settings, *until))
    same = compare_exports(base / "until" / "export" / "actor", whole / "export" / "best" / "actor")
    assert same.entries > 10 and not same.differences, same

    workers.run(job, config, part, (*settings, "trainer.iterations=3"))
    (part / "finished.json").unlink()
    shutil.rmtree(part / "export")
    workers.run(job, config, part, (*settings, "trainer.resume=auto"))
    compared = compare_runs(whole, part)
    assert [one.what for one in compared] == ["metrics", "export/actor", "export/best/actor"]
    assert not any(one.differences for one in compared), compared
    assert (part / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    splits = [(sample.iteration, sample.split) for sample in read_samples(whole / "samples.jsonl")]
    assert splits == [(i, split) for i in range(len(scores)) for split in ("train",) * 2 + ("val",) * 2]
    page = render_report(RunFiles.read(whole))
    assert "held-out prompts" in page and page.count(", held out ") == 2 * len(scores)

    again = (*settings, "trainer.resume=auto")  # nothing is left to train
    (part / "finished.json").unlink()
    assert workers.run(ended_job, config, part, (*again, "eval.samples_per_prompt=2"), 1, "") == ["done", "done"]
    assert sorted(one.name for one in (part / "export").iterdir()) == ["actor", "best-before"], "of other samples"
    (whole / "finished.json").unlink()
    shutil.rmtree(whole / "export")
    broken = whole / "checkpoints" / f"iteration-{best}" / "rank-0.safetensors"
    data = broken.read_bytes()
    broken.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    mine, other = workers.run(ended_job, config, whole, again, 1, "")
    assert mine == other and mine.startswith("JointError: ") and mine.endswith("export/best was not written"), mine
    assert (whole / "finished.json").exists() and (whole / "export" / "actor").exists()


def test_what_ends_a_run_costs_no_iteration(workers, config):
    """Ctrl-C on one rank in a training or an evaluation, and one that fails: each start goes on where the last did."""
    base, too_large = config.parent, config.parent / "too_large"
    settings = (*GRPO, f"reward.function={base}/functions.py:hits_or_too_large", "trainer.seed=2", held_out(config))
    settings += ("trainer.iterations=3", "trainer.save_every=2", "trainer.eval_every=2", "trainer.keep_best=true")
    again, whole, part, twice = (*settings, "trainer.resume=auto"), base / "unended", base / "ended", base / "twice"
    workers.run(job, config, whole, settings)

    def stopped(out: Path, overrides: tuple[str, ...], where: str, done: int) -> None:
        mine, other = workers.run(ended_job, config, out, overrides, done, where)
        saved = out / "checkpoints" / f"iteration-{done}"
        assert mine == other
        assert mine.startswith(f"Stopped: stopped: {done} of 3 iterations are done, saved in {saved};")
        assert mine.endswith(" trainer.resume=auto") == ("trainer.resume=auto" not in overrides)
        assert checkpoints_in(out)[-1] == saved

    def completed(out: Path) -> None:
        assert workers.run(ended_job, config, out, again, 3, "") == ["done", "done"]
        assert [bool(values_of(row)) for row in read_metrics(out / "metrics.jsonl")] == [False, True, True]
        compared = compare_runs(whole, out)
        assert [one.what for one in compared] == ["metrics", "export/actor", "export/best/actor"]
        assert not any(one.differences for one in compared), compared
        assert (out / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()

    stopped(part, settings, "iteration 0: training mini-batch 0", 1)
    shutil.copytree(part, twice)
    stopped(twice, again, "evaluation after iteration 1: moving weights", 2)
    assert [bool(values_of(row)) for row in read_metrics(twice / "metrics.jsonl")] == [False, True]
    completed(twice)

    too_large.touch()
    mine, other = workers.run(ended_job, config, part, again, 2, "")
    too_large.unlink()
    assert mine == other and mine.startswith("NotFiniteError: the evaluation after iteration 1: sample ")
    without, saved = ("trainer.eval_every=0", "trainer.keep_best=false"), part / "checkpoints" / "iteration-2"
    assert f": a score is inf; {' '.join(without)} goes on without it; the last good checkpoint is " in mine
    assert mine.endswith(f"{saved}: start again with trainer.resume=auto")
    rows = read_metrics(part / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [0, 1] and not any(map(values_of, rows))

    branch = base / "branch"  # in another folder, and without what failed
    of_it = (*settings, f"trainer.resume={saved}", *without)
    assert workers.run(ended_job, config, branch, of_it, 3, "") == ["done", "done"]
    rows = read_metrics(branch / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2] and not any(map(values_of, rows))
    same = compare_exports(whole / "export" / "actor", branch / "export" / "actor")
    assert same.entries > 10 and not same.differences, same
    completed(part)


def test_a_run_without_iterations_evaluates_a_model(workers, config):
    out, function = config.parent / "alone", f"reward.function={config.parent}/functions.py:hits"
    alone = (
        *GRPO,
        function,
        held_out(config),
        "trainer.iterations=0",
        "data.train_files=[]",
        "trainer.tensorboard=true",
    )
    workers.run(job, config, out, alone)
    (row,) = read_metrics(out / "metrics.jsonl")
    assert row["iteration"] == -1 and 0 <= row["val/score/mean"] <= 1
    assert json.loads((out / "finished.json").read_text()) == {"iterations": 0} and not (out / "export").exists()
    assert "held-out" in render_report(RunFiles.read(out))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    (score,) = events.Scalars("val/score/mean")
    assert (score.step, score.value) == (-1, pytest.approx(row["val/score/mean"]))
    assert any(tag.startswith("val_samples/0") for tag in events.Tags()["tensors"])
