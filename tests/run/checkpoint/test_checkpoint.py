"""Runs go on from their checkpoints: one that was killed ends like one that was left alone, bad ones are refused."""

import errno
import json
import re
import shutil
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import torch
from checkpoint_conversion import convert, open_checkpoint
from run_check import dry_run
from run_comparison import compare_exports, compare_runs
from testkit.programs import KILLED, ended, killed_forked, killed_in
from testkit.runs_table import job
from testkit.tiny import write_run

from rlhfuse.base.errors import InputError
from rlhfuse.config.load import load_config
from rlhfuse.monitor.metrics import read_metrics
from rlhfuse.run.checkpoint.checkpoint import Checkpoint, Manifest, RunState, _digest, checkpoints_in
from rlhfuse.run.checkpoint.compatibility import RunCompatibility, shape_of
from rlhfuse.run.checkpoint.shard_files import FileFacts
from rlhfuse.run.checkpoint.writer import rewind
from rlhfuse.run.launch import ended_schedules, start_line, train
from rlhfuse.run.preflight import check_inputs

pytestmark = pytest.mark.timeout(1800)  # for the first one five trainings are started

# the folder -----------------------------------------------------------------------------------------------------


def _changed(manifest, **changes):
    """Its text with other values, and their digest."""
    raw = json.loads(manifest.to_text()) | changes
    del raw["digest"]
    return json.dumps(raw | {"digest": _digest(raw)})


def _without_digest(manifest):
    raw = json.loads(manifest.to_text())
    del raw["digest"]
    return json.dumps(raw)


def test_a_manifest_parses_back_and_one_that_was_changed_or_is_none_is_found_out():
    settings = {"trainer.seed": 1, "rollout.top_p": 0.1}
    facts = RunCompatibility(2, {"actor_train": "d1t1p2"}, {"actor": {"layers": 4}}, "ab", settings)
    state = RunState({"current": 1, "x": [0.1, 1e-300]}, {"kl_coef": 0.1}, {"metrics_bytes": 12})
    manifest = Manifest(3, facts, state, (FileFacts("rank-0.safetensors", 5, "ab"),))
    text = manifest.to_text()
    assert json.dumps(json.loads(text)) != text, "whatever its form"
    for same in (text, json.dumps(json.loads(text)), _changed(manifest)):
        assert Manifest.parse(same, "m") == manifest
    for text, message in (
        *(
            (text.replace(was, now), "m is not as it was written: its digest is another one")
            for was, now in (('"kl_coef": 0.1', '"kl_coef": 0.2'), ('"metrics_bytes": 12', '"metrics_bytes": 11'))
        ),
        (_without_digest(manifest), "m is not as it was written"),
        ("", "m: not valid JSON .*; use another checkpoint"),
        (_changed(manifest, iteration=-1), "m: iteration -1 of 1 files"),
        (_changed(manifest, files=[]), "m: iteration 3 of 0 files"),
        (_changed(manifest, files=[{"name": "../../x", "size_bytes": 5, "sha256": "ab"}]), "'../../x' is no file of"),
        *(
            (_changed(manifest, state={"threshold": {}, "algorithm": {}, "position": position}), "m: metrics_bytes")
            for position in ({}, {"metrics_bytes": -5}, {"metrics_bytes": "5"}, {"metrics_bytes": True})
        ),
        ("[]", "m: must be a JSON object"),
        ("{}", "m: version None is unknown"),
        ('{"version": 2}', "m: iteration is missing"),
        (_changed(manifest).replace('"facts"', '"fax"'), "m: facts is missing"),
        (_changed(manifest, version=9), "version 9 is unknown"),
    ):
        with pytest.raises(InputError, match=message):
            Manifest.parse(text, "m")


def test_a_checkpoint_may_be_older_than_a_field_of_a_models_shape():
    older = {"layers": 4, "qkv_bias": True}
    assert shape_of(older) == shape_of({**older, "proj_bias": False}) != shape_of({**older, "proj_bias": True})
    assert shape_of(older)["qkv_bias"] and shape_of(older)["layers"] == 4


def test_rewind_removes_what_will_be_made_again(tmp_path):
    for name in ("iteration-2", "iteration-10", "iteration-4", "iteration-6.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").write_text("iteration-10\n")
    (tmp_path / "finished.json").write_text('{"iterations": 10}')
    assert [f.name for f in checkpoints_in(tmp_path)] == ["iteration-2", "iteration-4", "iteration-10"]
    assert rewind(tmp_path, 4) == ["iteration-10", "iteration-6.partial"]
    assert [f.name for f in checkpoints_in(tmp_path)] == ["iteration-2", "iteration-4"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "iteration-4\n"
    assert not (tmp_path / "finished.json").exists()


# a whole run ----------------------------------------------------------------------------------------------------


THREE_KILLS = (
    "1 one 3 iteration 1: generation:",
    "0 all 1 iteration 3: .*train mini-batch 1",
    "1 one 1 file written",  # of rank 1, before the checkpoint has its name
)


@pytest.fixture(scope="module")
def runs(programs, pools, tmp_path_factory):
    """(config, uninterrupted run of 4 iterations, the same killed three times and resumed, its last log)."""
    base = tmp_path_factory.mktemp("runs")
    config = write_run(base, trainer__save_every=2, trainer__iterations=4)
    whole, broken = base / "whole", base / "killed"
    pools.of(2).run(job, config, "whole", [f"trainer.output_dir={whole}"])
    settings = [f"trainer.output_dir={broken}", "trainer.resume=auto"]
    for number, moment in enumerate(THREE_KILLS):
        if " all " in moment:
            killed_in(ended(programs.train(config, *settings, programs=(KILLED,), KILL_AT=moment)))
        else:  # without the seconds of torchrun
            killed_forked(config, moment, base / f"{number}.log", *settings)
    saved = broken / "checkpoints"  # the export may have begun beside the last one, which did not get its name
    assert (saved / "iteration-2").is_dir() and not (saved / "iteration-4").exists()
    return config, whole, broken, programs.trained(config, *settings)


def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(runs):
    _, whole, killed, log = runs
    assert "resuming from" in log and "fresh start" not in log
    assert [row["iteration"] for row in read_metrics(killed / "metrics.jsonl")] == [0, 1, 2, 3]
    comparisons = compare_runs(whole, killed)
    assert [c.what for c in comparisons] == ["metrics", "export/actor", "export/critic"]
    assert all(c.entries > 10 and not c.differences for c in comparisons), comparisons
    # what was written before the first checkpoint is kept
    kept = read_metrics(killed / "attempt-1" / "metrics.jsonl")
    assert [row["iteration"] for row in kept] == [0] and not (killed / "attempt-2").exists()
    first = read_metrics(whole / "metrics.jsonl")[0]
    assert kept[0]["rollout/digest"] == first["rollout/digest"]
    assert not (killed / "run.lock").exists()
    # the threshold in force is resumed
    saved = Checkpoint.open(killed / "checkpoints" / "iteration-2").manifest.state.threshold
    assert read_metrics(killed / "metrics.jsonl")[2]["fusion/threshold"] == saved["threshold"]
    assert len(saved["lengths"]) == 2
    assert len(saved["observations"]) == 1  # a process's first iteration counts only while there is no other


def test_a_checkpoint_converts_to_what_the_run_exports(runs, tmp_path):
    _, whole, _, _ = runs
    names = sorted(f.name for f in (whole / "checkpoints").iterdir())
    assert names == ["iteration-2", "iteration-4", "latest"]
    assert (whole / "checkpoints" / "latest").read_text() == "iteration-4\n"
    checkpoint = open_checkpoint(whole)
    assert checkpoint.iteration == 4 and checkpoint.open_reader().roles() == ("actor", "critic")
    for role in checkpoint.open_reader().roles():
        convert(checkpoint, role, tmp_path / role)
        comparison = compare_exports(whole / "export" / role, tmp_path / role)
        assert comparison.entries > 10 and not comparison.differences
        names = sorted(file.name for file in (whole / "export" / role).iterdir())
        assert names == sorted(file.name for file in (tmp_path / role).iterdir())


def test_a_finished_run_says_so_without_process_groups(runs, monkeypatch, capsys):
    config, whole, _, _ = runs
    for iterations in (3, 4):
        settings = [f"trainer.output_dir={whole}", "trainer.resume=auto", f"trainer.iterations={iterations}"]
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setenv("WORLD_SIZE", "2")
            assert train(load_config(config, settings), "run") == 0
            assert ("finished already" in capsys.readouterr().out) == (rank == "0")
            assert not torch.distributed.is_initialized()
        assert dry_run(load_config(config, settings), 2) == 0
        assert "finished already" in capsys.readouterr().out


# what is refused ------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(runs, tmp_path):
    """(config, a copy of the finished run that a test may damage)."""
    config, whole, _, _ = runs
    shutil.copytree(whole, tmp_path / "run")
    return config, tmp_path / "run"


def inputs_of(config: Path, run_dir: Path, *overrides: str):
    settings = [f"trainer.output_dir={run_dir}", "trainer.resume=auto", "trainer.iterations=6", *overrides]
    return check_inputs(load_config(config, settings), 2)


def refused(config: Path, run_dir: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        inputs_of(config, run_dir, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def resumed(config: Path, run_dir: Path, *overrides: str) -> Checkpoint | None:
    return inputs_of(config, run_dir, *overrides).resume


def test_auto_takes_the_newest_and_a_path_the_one_it_names(copy):
    config, run_dir = copy
    (run_dir / "checkpoints" / "iteration-6.partial").mkdir()
    assert resumed(config, run_dir).iteration == 4
    for name, iteration in (("iteration-2", 2), ("latest", 4)):
        path = run_dir / "checkpoints" / name
        assert resumed(config, run_dir, f"trainer.resume={path}").iteration == iteration
        assert resumed(config, run_dir.with_name("new"), f"trainer.resume={path}").iteration == iteration
    assert resumed(config, run_dir.with_name("new")) is None
    # settings that change no number may change
    free = ["trainer.save_every=5", "fusion.intra_stage=false", "fusion.threshold=3", "parallel.generation=d2t1p1@0-1"]
    assert resumed(config, run_dir, *free).iteration == 4


def test_a_run_goes_on_with_the_day_on_which_it_began(copy):
    config, run_dir = copy
    began = resumed(config, run_dir).manifest.state.position["day"]
    assert date.fromisoformat(began) <= date.today()
    for folder, day in ((run_dir, began), (run_dir.with_name("new"), "2001-02-03")):
        settings = [f"trainer.output_dir={folder}", "trainer.resume=auto", "trainer.iterations=6"]
        assert check_inputs(load_config(config, settings), 2, day="2001-02-03").day == day


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_a_broken_rank_file_is_named_with_the_good_one_before(copy, damage):
    config, run_dir = copy
    file = run_dir / "checkpoints" / "iteration-4" / "rank-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()
    if damage != "missing":
        file.write_bytes(data[:-1] if damage == "cut" else data)
    message = refused(config, run_dir)
    assert {"cut": "bytes", "flipped": "sha256", "missing": "is missing"}[damage] in message and str(file) in message
    assert message.endswith(f"set trainer.resume={run_dir / 'checkpoints' / 'iteration-2'}")


@pytest.mark.parametrize("unreadable", ["rank-1.safetensors", "manifest.json"])
def test_a_file_that_cannot_be_read_is_named_with_the_good_checkpoint_before(copy, monkeypatch, unreadable):
    config, run_dir = copy
    file = run_dir / "checkpoints" / "iteration-4" / unreadable
    opened = open

    def without_permission(path, *more, **how):
        if str(path) == str(file):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *more, **how)

    monkeypatch.setattr("builtins.open", without_permission)
    message = refused(config, run_dir)
    assert f"cannot read {file}" in message
    assert message.endswith(f"set trainer.resume={run_dir / 'checkpoints' / 'iteration-2'}")


def test_a_run_that_is_made_longer_than_its_schedule_is_told_so(copy):
    def line(*overrides: str) -> str:
        inputs = inputs_of(*copy)
        settings = [f"actor.optim.{words}" for words in overrides]
        changed = load_config(copy[0], ["trainer.iterations=6", *settings])
        return "; ".join(ended_schedules(changed, str(inputs.resume.folder)))

    for kind in ("linear", "cosine"):
        decays = f"lr_scheduler_type={kind}", "lr_decay_iterations=4"
        assert "actor is 0 from iteration 4 on" in line(*decays) and "convert_checkpoint" in line(*decays)
        assert line(*decays, "min_lr_ratio=0.1") == line(f"lr_scheduler_type={kind}") == line() == ""


def test_all_settings_that_changed_are_named_with_the_way_to_go_on(copy):
    message = refused(*copy, "actor.optim.lr=0.5", "algorithm.kl_coef=0.25")
    assert "this run has 0.5" in message and "this run has 0.25" in message
    assert f"convert_checkpoint.py {copy[1]}/checkpoints/iteration-4" in message


def test_a_missing_manifest_and_lost_lines_of_metrics(copy):
    config, run_dir = copy
    folder, metrics = run_dir / "checkpoints", run_dir / "metrics.jsonl"
    lines = metrics.read_bytes()
    metrics.write_bytes(lines[:-5])
    assert "lines are lost; bring the file back" in refused(config, run_dir)
    metrics.write_bytes(lines)
    (folder / "iteration-4" / "manifest.json").unlink()
    assert "iteration-4/manifest.json is missing" in refused(config, run_dir)
    shutil.rmtree(folder / "iteration-2")
    assert "no good one before it" in refused(config, run_dir)
    assert "nowhere/manifest.json" in refused(config, run_dir.with_name("new"), "trainer.resume=/nowhere")


@pytest.mark.parametrize(
    "overrides, words",
    [
        ("rollout.temperature=0.5", "rollout.temperature=1.0, this run has 0.5; set rollout.temperature=1.0"),
        ("trainer.seed=2", "set trainer.seed=1"),
        ("trainer.dtype=bfloat16", "set trainer.dtype=float32"),
        ("trainer.output_dir=''", "set it"),
        ("trainer.resume=never", "holds a run already"),
        (
            "trainer.resume={run}/checkpoints/iteration-4 trainer.iterations=3",
            "4 iterations done, trainer.iterations=3",
        ),
        ("trainer.resume={other}/checkpoints/iteration-2", "holds another run"),
    ],
)
def test_another_run_than_the_saved_one(copy, runs, overrides, words):
    config, run_dir = copy
    assert words in refused(config, run_dir, *overrides.format(run=run_dir, other=runs[2]).split())


def test_another_layout_or_world_is_taken_and_told(copy):
    turned = ["parallel.actor_train=d2t1p1", "parallel.critic_train=d1t1p2", "fusion.actor_microbatches=4"]
    line = start_line(inputs := inputs_of(*copy, *turned))
    assert "actor_train d1t1p2 -> d2t1p1, " in line and "not bit for bit" in line
    # of the same pipeline, where the saved run cut evenly
    line = start_line(inputs_of(*copy, "parallel.actor_train=d1t1p2:1,3"))
    assert "actor_train d1t1p2 -> d1t1p2:1,3: equal to about 1e-5" in line
    facts = inputs.resume.manifest.facts
    assert replace(facts, world_size=4).layout_diff(facts) == "2 -> 4 ranks"
    assert facts.layout_diff(facts) == ""
    line = start_line(inputs_of(*copy, "algorithm.skip_zero_gradients=true"))
    assert "algorithm.skip_zero_gradients False -> True: equal to about 1e-5" in line
    older = {key: value for key, value in facts.layouts.items() if key != "algorithm.skip_zero_gradients"}
    assert facts.layout_diff(replace(facts, layouts=older)) == "", "what a checkpoint is older than was off"


def test_another_model_or_vocabulary_and_a_key_that_the_checkpoint_is_older_than(runs):
    facts = Checkpoint.open(runs[1] / "checkpoints" / "iteration-4").manifest.facts
    models = {**facts.models, "critic": {**facts.models["critic"], "hidden": 128}}
    with pytest.raises(InputError, match="critic of hidden=64, critic.path holds one of 128"):
        replace(facts, models=models).check(facts, "c")
    with pytest.raises(InputError, match="another vocabulary; set actor.tokenizer"):
        replace(facts, vocabulary="x").check(facts, "c")
    with pytest.raises(InputError, match="has the models actor, critic, reference, reward, this run actor;"):
        replace(facts, models={"actor": facts.models["actor"]}).check(facts, "c")
    # a key that is new had its default
    key = "actor.optim.lr_scheduler_type"
    newer = (key, "rollout.stop", "rollout.min_tokens")
    older = replace(facts, settings={name: value for name, value in facts.settings.items() if name not in newer})
    facts.check(older, "c")
    with pytest.raises(InputError, match="was saved with actor.optim.lr_scheduler_type=constant, this run has cosine"):
        replace(facts, settings={**facts.settings, key: "cosine"}).check(older, "c")


def test_a_finished_run_without_checkpoints_cannot_be_extended(copy):
    config, run_dir = copy
    shutil.rmtree(run_dir / "checkpoints")
    assert "finished run of 4 iterations without checkpoints" in refused(config, run_dir)
    file = run_dir / "finished.json"
    for text in ('{"done": 4}', "[4]", '{"iterations": -1}', "\xff"):
        file.write_bytes(text.encode("latin-1"))
        assert re.search(f"{file}.*(remove it to continue the run|iconv)", message := refused(config, run_dir)), message
    file.unlink()
    file.mkdir()
    assert f"cannot read {file}: it is a folder; remove it" in refused(config, run_dir)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"../../etc", b"/etc", b"", b"iteration-1\niteration-2"])
def test_latest_names_a_checkpoint_beside_it(copy, text):
    config, run_dir = copy
    latest = run_dir / "checkpoints" / "latest"
    latest.write_bytes(text)
    assert str(latest) in refused(config, run_dir, f"trainer.resume={latest}")
