"""A checkpoint holds all of a run: state comes back bit for bit, a killed run ends like one that was left alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from gloo import Workers
from tiny import write_checkpoint, write_run

from rlhfuse.checkpoint import Checkpoint, FileFacts, Manifest, RunFacts, checkpoints_in, rewind
from rlhfuse.config import OptimizerConfig, ParallelConfig, RunConfig, load_config
from rlhfuse.errors import InputError
from rlhfuse.launch import dry_run, train
from rlhfuse.monitor.compare import compare_runs
from rlhfuse.monitor.metrics import read_metrics
from rlhfuse.preflight import prepare
from rlhfuse.schedule.ranks import rank_map
from rlhfuse.spec import ModelSpec, ParallelLayout

ROOT = Path(__file__).resolve().parents[1]
NO_FACTS = RunFacts(4, {}, {}, {})

# state of one rank ----------------------------------------------------------------------------------------------


def build(rank: int, folders: dict, actor: str, critic: str, dtype: str) -> dict:
    """role -> ModelOptimizer of freshly loaded models."""
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.roles import Checkpoints, build_roles

    config = RunConfig(parallel=ParallelConfig(actor, critic, False, *["d4t1p1"] * 5))
    config.trainer.dtype = dtype
    config.actor.optim = OptimizerConfig(lr=1e-3, weight_decay=0.1)
    ranks = rank_map({"actor": ParallelLayout.parse(actor), "critic": ParallelLayout.parse(critic)})
    specs = {role: ModelSpec.from_config(path) for role, path in folders.items()}
    roles = build_roles(config, Checkpoints(folders, specs), ranks, rank, choose_device("cpu", 0, 1))
    return {role: model.optimizer for role, model in roles.trained.items()}


def one_step(rank: int, models: dict, seed: int) -> None:
    """An optimizer step on made-up gradients."""
    for model in models.values():
        generator = torch.Generator().manual_seed(100 * seed + rank)
        model.zero_grad()
        for parameter in model.module.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        model.finish_gradients()
        model.step(1e-3)


def save_and_load(rank: int, folders: dict, out: Path, actor: str, critic: str, dtype: str) -> list[str]:
    """Two steps, save, load into new models, one more step on both; returns what differs and what is odd."""
    from rlhfuse.checkpoint import save_checkpoint
    from rlhfuse.parallel.optimizer_state import export_state, import_state

    models = build(rank, folders, actor, critic, dtype)
    fresh = {role: {k: v.clone() for k, v in export_state(model).items()} for role, model in models.items()}
    one_step(rank, models, 0)
    one_step(rank, models, 1)
    state = {role: export_state(model) for role, model in models.items()}
    save_checkpoint(out, 7, rank, state, NO_FACTS, {"current": 3}, 2, {"kl_coef": 0.05})
    torch.distributed.barrier()
    loaded = build(rank, folders, actor, critic, dtype)
    stored = Checkpoint.open(out / "checkpoints" / "iteration-7").load(rank)
    found = []
    for role, model in loaded.items():
        import_state(model, stored[role])
        found += [f"loaded {role}.{n}" for n in differing(state[role], export_state(model))]
        unchanged = set(fresh[role]) - set(differing(fresh[role], state[role]))
        found += [f"{role}.{n} did not train" for n in unchanged]
        found += [] if any(n.startswith("exp_avg_sq.") for n in state[role]) else [f"{role} has no moments"]
        found += [] if any(n.startswith("main.") for n in state[role]) == (dtype == "bfloat16") else ["main weights"]
        for broken in (dict(list(stored[role].items())[1:]), stored[role] | {"weights.foreign": torch.zeros(1)}):
            try:
                import_state(model, broken)
                found.append(f"{role}: broken state was taken")
            except ValueError:
                import_state(model, stored[role])
    one_step(rank, models, 2)
    one_step(rank, loaded, 2)
    for role in models:
        found += [f"continued {role}.{n}" for n in differing(export_state(models[role]), export_state(loaded[role]))]
    return found


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [n for n in sorted(a.keys() | b.keys()) if n not in a or n not in b or not torch.equal(a[n], b[n])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    actor = write_checkpoint(base / "actor", seed=1)
    critic = write_checkpoint(base / "critic", scalar_head=True, seed=2)
    return {"actor": actor, "reference": actor, "critic": critic, "reward": critic}


def test_optimizer_and_weights_come_back_bit_for_bit(folders, tmp_path):
    workers = Workers(4)
    try:
        for actor, critic, dtype in (
            ("d4t1p1", "d2t1p2", "float32"),
            ("d1t2p2", "d2t1p2", "bfloat16"),
        ):
            out = tmp_path / f"{actor}-{dtype}"
            assert workers.run(save_and_load, folders, out, actor, critic, dtype) == [[]] * 4
            folder = out / "checkpoints"
            assert sorted(f.name for f in folder.iterdir()) == ["iteration-7", "latest"]
            assert Checkpoint.open(folder / "latest").manifest.threshold == {"current": 3}
    finally:
        workers.close()


# the folder -----------------------------------------------------------------------------------------------------


def test_manifest_prints_and_parses_back():
    facts = RunFacts(2, {"actor_train": "d1t1p2"}, {"actor": {"layers": 4}}, {"trainer.seed": 1, "rollout.top_p": 0.1})
    manifest = Manifest(3, facts, {"current": 1, "x": [0.1, 1e-300]}, {"kl_coef": 0.1}, (FileFacts("rank-0.safetensors", 5, "ab"),))
    assert Manifest.parse(manifest.to_text(), "m") == manifest
    for text in ("", "[]", "{}", '{"version": 1}', manifest.to_text().replace('"facts"', '"fax"')):
        with pytest.raises(InputError, match="m is no manifest"):
            Manifest.parse(text, "m")
    with pytest.raises(InputError, match="version 9 is unknown"):
        Manifest.parse(manifest.to_text().replace('"version": 1', '"version": 9'), "m")


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


def start(config: Path, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(ROOT / "tools" / "train_ppo.py"), "--config", str(config), *overrides]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(process: subprocess.Popen) -> str:
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    return out


def kill_after(process: subprocess.Popen, run_dir: Path, iteration: int) -> None:
    """SIGKILL torchrun and its ranks as soon as the line of `iteration` is there."""
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 200
    while not metrics.exists() or len(read_metrics(metrics)) <= iteration:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.01)
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in tree:
        one.kill()
    psutil.wait_procs(tree, 10)
    process.wait()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(config, uninterrupted run of 4 iterations, run killed in iteration 3 and resumed, its log, R_t of both)."""
    base = tmp_path_factory.mktemp("runs")
    config = write_run(base, trainer__save_every=2, trainer__iterations=4)
    whole, killed = base / "whole", base / "killed"
    finish(start(config, f"trainer.output_dir={whole}"))
    # the longer run is the same run: the number of iterations changes nothing, and leaves time for the kill
    kill_after(start(config, f"trainer.output_dir={killed}", "trainer.iterations=1000"), killed, 2)
    assert (killed / "checkpoints" / "iteration-2").is_dir() and not (killed / "export").exists()
    log = finish(start(config, f"trainer.output_dir={killed}", "trainer.resume=auto"))
    return config, whole, killed, log


def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(runs):
    _, whole, killed, log = runs
    assert "resuming from" in log and "fresh start" not in log
    assert [row["iteration"] for row in read_metrics(killed / "metrics.jsonl")] == [0, 1, 2, 3]
    comparisons = compare_runs(whole, killed)
    assert [c.what for c in comparisons] == ["metrics", "export/actor", "export/critic"]
    assert all(c.entries > 10 and not c.differences for c in comparisons), comparisons


def test_the_threshold_in_force_is_resumed(runs):
    _, _, killed, _ = runs
    saved = Checkpoint.open(killed / "checkpoints" / "iteration-2").manifest.threshold
    assert read_metrics(killed / "metrics.jsonl")[2]["fusion/threshold"] == (saved["triggers"] or [0])[0]
    assert len(saved["observations"]) == len(saved["lengths"]) == 2


def test_the_last_two_checkpoints_are_kept_and_named(runs):
    _, whole, _, _ = runs
    names = sorted(f.name for f in (whole / "checkpoints").iterdir())
    assert names == ["iteration-2", "iteration-4", "latest"]
    assert (whole / "checkpoints" / "latest").read_text() == "iteration-4\n"


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


def refused(config: Path, run_dir: Path, *overrides: str) -> str:
    settings = [f"trainer.output_dir={run_dir}", "trainer.resume=auto", "trainer.iterations=6", *overrides]
    with pytest.raises(InputError) as caught:
        prepare(load_config(config, settings), 2)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def resumed(config: Path, run_dir: Path, *overrides: str) -> Checkpoint | None:
    settings = [f"trainer.output_dir={run_dir}", "trainer.resume=auto", "trainer.iterations=6", *overrides]
    return prepare(load_config(config, settings), 2).resume


def test_auto_takes_the_newest_and_a_path_the_one_it_names(copy):
    config, run_dir = copy
    (run_dir / "checkpoints" / "iteration-6.partial").mkdir()
    assert resumed(config, run_dir).iteration == 4
    for name, iteration in (("iteration-2", 2), ("latest", 4)):
        path = run_dir / "checkpoints" / name
        assert resumed(config, run_dir, f"trainer.resume={path}").iteration == iteration
        assert resumed(config, run_dir.with_name("new"), f"trainer.resume={path}").iteration == iteration
    assert resumed(config, run_dir.with_name("new")) is None


def test_settings_that_change_no_number_may_change(copy):
    config, run_dir = copy
    free = ["trainer.save_every=5", "fusion.intra_stage=false", "fusion.threshold=3", "parallel.generation=d2t1p1@0-1"]
    assert resumed(config, run_dir, *free).iteration == 4


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


def test_a_missing_manifest(copy):
    config, run_dir = copy
    folder = run_dir / "checkpoints"
    (folder / "iteration-4" / "manifest.json").unlink()
    assert "iteration-4/manifest.json is missing" in refused(config, run_dir)
    shutil.rmtree(folder / "iteration-2")
    assert "no good one before it" in refused(config, run_dir)
    assert "nowhere/manifest.json" in refused(config, run_dir.with_name("new"), "trainer.resume=/nowhere")


@pytest.mark.parametrize(
    "override,words",
    [
        ("parallel.critic_train=d1t1p2", "critic_train=d2t1p1, this run d1t1p2; set parallel.critic_train=d2t1p1"),
        ("rollout.temperature=0.5", "rollout.temperature=1.0, this run has 0.5; set rollout.temperature=1.0"),
        ("trainer.seed=2", "set trainer.seed=1"),
        ("trainer.dtype=bfloat16", "set trainer.dtype=float32"),
        ("fusion.actor_microbatches=4", "set fusion.actor_microbatches=2"),
        ("trainer.output_dir=''", "set it"),
        ("trainer.resume=never", "holds a run already"),
    ],
)
def test_another_run_than_the_saved_one(copy, override, words):
    config, run_dir = copy
    assert words in refused(config, run_dir, override)


def test_another_model_or_world(copy):
    _, run_dir = copy
    manifest = Checkpoint.open(run_dir / "checkpoints" / "iteration-4").manifest
    facts = manifest.facts
    with pytest.raises(InputError, match="saved by 2 ranks, this run has 4; start 2 ranks"):
        RunFacts(4, facts.layouts, facts.models, facts.settings).check(facts, "c")
    models = {**facts.models, "critic": {**facts.models["critic"], "hidden": 128}}
    with pytest.raises(InputError, match="critic of hidden=64, critic.path holds one of 128"):
        RunFacts(2, facts.layouts, models, facts.settings).check(facts, "c")


def test_more_iterations_done_than_wanted(copy):
    config, run_dir = copy
    newest = run_dir / "checkpoints" / "iteration-4"
    message = refused(config, run_dir, f"trainer.resume={newest}", "trainer.iterations=3")
    assert "4 iterations done, trainer.iterations=3" in message


def test_a_folder_that_holds_another_run(copy, runs):
    config, run_dir = copy
    other = runs[2] / "checkpoints" / "iteration-2"
    assert "holds another run" in refused(config, run_dir, f"trainer.resume={other}")


def test_a_finished_run_without_checkpoints_cannot_be_extended(copy):
    config, run_dir = copy
    shutil.rmtree(run_dir / "checkpoints")
    assert "finished run of 4 iterations without checkpoints" in refused(config, run_dir)
    (run_dir / "finished.json").write_text(json.dumps({"done": 4}))
    assert "finished.json cannot be read" in refused(config, run_dir)
