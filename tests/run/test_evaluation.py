"""Held-out prompts: what their metrics are, and that training does not notice that they were evaluated."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from run_comparison import compare_exports
from run_report.report import render_report
from run_report.run_files import RunFiles
from testkit.runs_table import BEST, HELD_OUT, assert_same_bits, begin_again, by_function, metrics_of

from rlhfuse.base.clock import Clock
from rlhfuse.monitor.samples import read_samples
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.run.checkpoint.checkpoint import checkpoints_in
from rlhfuse.run.evaluation import evaluation_metrics, noise_seed
from rlhfuse.run.iteration_recorder import IterationRecorder

ENDS = ("left alone", "ended", "ended twice")


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


def test_a_failed_sample_is_in_no_score():
    """The first prompt has one sample left, the second none, the third both."""
    failed = (False, True, True, True, False, False)
    rollouts = [Rollout(i, (1,), (3,), torch.zeros(1), "stop", failed=failed[i]) for i in range(6)]
    scores = torch.tensor([0.5, 9.0, 8.0, 7.0, 1.0, 2.0])
    metrics = evaluation_metrics(RolloutBatch.from_rollouts(rollouts).with_fields(scores=scores), 2)
    assert metrics["val/score/mean"] == (0.5 + 1.5) / 2 and metrics["val/score/best@2"] == (0.5 + 2.0) / 2
    assert metrics["val/score/std_error"] == pytest.approx(0.5) and metrics["val/samples"] == 6
    lost = RolloutBatch.from_rollouts(rollouts[2:4]).with_fields(scores=scores[2:4])
    assert math.isnan(evaluation_metrics(lost, 2)["val/score/mean"])


def test_noise_of_held_out_samples_is_none_of_trainings():
    seeds = {noise_seed(seed) for seed in range(1000)}
    assert len(seeds) == 1000 and all(1000 <= seed < 2**63 for seed in seeds)


def test_what_runs_between_iterations_is_not_counted_as_their_books(monkeypatch):
    clock, recorder = Clock(), IterationRecorder.__new__(IterationRecorder)
    monkeypatch.setattr(clock, "now", lambda: 10.0)
    recorder._clock, recorder._log = clock, clock.begin()
    recorder.skip(4.0)
    monkeypatch.setattr(clock, "now", lambda: 14.5)
    recorder.begin()
    assert recorder._logging == 0.5


def test_training_does_not_notice(runs):
    """PPO by a reward model, fused, with a critic: evaluated and not, the same bits; the tail is moved in both."""
    plain, seen = (metrics_of(runs[name]) for name in ("ppo", "ppo evaluated"))
    assert [row["iteration"] for row in seen] == [-1, 0, 1]
    assert all(row["val/samples"] == 5 and row["val/response_length/mean"] <= 16 for row in seen)
    assert any(row["val/response_length/mean"] > 12 for row in seen) and len({row["val/digest"] for row in seen}) > 1
    assert [row["fusion/destinations"] for row in seen[1:]] == [row["fusion/destinations"] for row in plain]


def test_evaluations_of_one_actor_are_equal(runs):
    """With an actor that does not learn, whichever way it is fused: the noise is the sample's, not the iteration's."""
    found = []
    for name in ("still", "still serial"):
        rows = list(filter(values_of, metrics_of(runs[name])))
        assert [bool(row["fusion/val_migrated_samples"]) for row in rows] == [name == "still"] * 3
        found += map(values_of, rows)
        assert not checkpoints_in(runs[name]), "none was better than before training"
    first, *others = found
    assert all(other == first for other in others)
    assert first["val/score/best@3"] > first["val/score/mean"]


def test_the_best_is_kept_and_a_resumed_run_knows_it(runs):
    """The scores, by a function of the held-out rows' own columns, are the same after a restart; so is what is kept."""
    whole, part = runs["best"], runs["best resumed"]
    scores = [row["val/score/mean"] for row in metrics_of(whole)]
    best = scores.index(max(scores)) + 1
    assert 1 <= best < len(scores), scores  # the seed is one with which the last is not the best
    kept = sorted(folder.name for folder in (whole / "checkpoints").glob("iteration-*"))
    assert kept == sorted({f"iteration-{best}", f"iteration-{len(scores)}"})
    runs.start("until", BEST, f"trainer.keep_best=false trainer.iterations={best}")
    same = compare_exports(runs.folder / "until" / "export" / "actor", whole / "export" / "best" / "actor")
    assert same.entries > 10 and not same.differences, same

    assert assert_same_bits(whole, part) == ["metrics", "export/actor", "export/best/actor"]
    assert (part / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    splits = [(sample.iteration, sample.split) for sample in read_samples(whole / "samples.jsonl")]
    assert splits == [(i, split) for i in range(len(scores)) for split in ("train",) * 2 + ("val",) * 2]
    page = render_report(RunFiles.read(whole))
    assert "held-out prompts" in page and page.count(", held out ") == 2 * len(scores)

    again = f"{BEST} trainer.resume=auto"  # nothing is left to train
    of_others, broken = (Path(shutil.copytree(part, runs.folder / name)) for name in ("of others", "broken"))
    (of_others / "finished.json").unlink()
    runs.start("of others", again, "eval.samples_per_prompt=2")
    assert sorted(one.name for one in (of_others / "export").iterdir()) == ["actor", "best-before"], "of other samples"
    begin_again(broken)
    file = broken / "checkpoints" / f"iteration-{best}" / "rank-0.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    mine, other = runs.start("broken", again, errors=True)
    assert mine == other and mine.startswith("JointError: ") and mine.endswith("export/best was not written"), mine
    assert (broken / "finished.json").exists() and (broken / "export" / "actor").exists()


def test_what_ends_a_run_costs_no_iteration(runs):
    """Ctrl-C on one rank in a training or an evaluation, and one that fails: each start goes on where the last did."""
    too_large = runs.folder / "too_large"
    settings = f"""{by_function("hits_or_too_large")} {HELD_OUT} actor.optim.lr=0.01 trainer.seed=2
        trainer.iterations=3 trainer.save_every=2 trainer.eval_every=2 trainer.keep_best=true"""
    again, (whole, part, twice) = f"{settings} trainer.resume=auto", (runs.folder / name for name in ENDS)
    runs.start(whole.name, settings)

    def stopped(run: Path, overrides: str, where: str, done: int) -> None:
        mine, other = runs.start(run.name, overrides, errors=True, interrupted=where)
        saved = run / "checkpoints" / f"iteration-{done}"
        assert mine == other
        assert mine.startswith(f"Stopped: stopped: {done} of 3 iterations are done, saved in {saved};")
        assert mine.endswith(" trainer.resume=auto") == ("trainer.resume=auto" not in overrides)
        assert checkpoints_in(run)[-1] == saved

    def completed(run: Path) -> None:
        runs.start(run.name, again)
        assert [bool(values_of(row)) for row in metrics_of(run)] == [False, True, True]
        assert assert_same_bits(whole, run) == ["metrics", "export/actor", "export/best/actor"]
        assert (run / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()

    stopped(part, settings, "iteration 0: actor_train mini-batch 0", 1)
    shutil.copytree(part, twice)
    stopped(twice, again, "evaluation after iteration 1: actor_move", 2)
    assert [bool(values_of(row)) for row in metrics_of(twice)] == [False, True]
    completed(twice)

    too_large.touch()
    mine, other = runs.start(part.name, again, errors=True)
    too_large.unlink()
    assert mine == other and mine.startswith("NotFiniteError: the evaluation after iteration 1: sample ")
    without, saved = "trainer.eval_every=0 trainer.keep_best=false", part / "checkpoints" / "iteration-2"
    assert f": a score is inf; {without} goes on without it; the last good checkpoint is " in mine
    assert mine.endswith(f"{saved}: start again with trainer.resume=auto")
    rows = metrics_of(part)
    assert [row["iteration"] for row in rows] == [0, 1] and not any(map(values_of, rows))

    # in another folder, and without what failed
    runs.start("branch", settings, f"trainer.resume={saved}", without)
    rows = metrics_of(runs.folder / "branch")
    assert [row["iteration"] for row in rows] == [1, 2] and not any(map(values_of, rows))
    same = compare_exports(whole / "export" / "actor", runs.folder / "branch" / "export" / "actor")
    assert same.entries > 10 and not same.differences, same
    completed(part)


def test_a_run_without_iterations_evaluates_a_model(runs):
    (row,) = metrics_of(run := runs["alone"])
    assert row["iteration"] == -1 and 0 <= row["val/score/mean"] <= 1
    assert json.loads((run / "finished.json").read_text()) == {"iterations": 0} and not (run / "export").exists()
    assert "held-out" in render_report(RunFiles.read(run))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    (score,) = events.Scalars("val/score/mean")
    assert (score.step, score.value) == (-1, pytest.approx(row["val/score/mean"]))
    assert any(tag.startswith("val_samples/0") for tag in events.Tags()["tensors"])
