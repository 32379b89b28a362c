"""A checkpoint holds all of a run: state comes back bit for bit, a killed run ends like one that was left alone."""

from __future__ import annotations

import json
import resource
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from runs import finish, killed, start
from tiny import write_checkpoint, write_run

from rlhfuse.checkpoint import Checkpoint, Manifest, RunState, checkpoints_in
from rlhfuse.checkpoint_writer import CheckpointWriter, rewind
from rlhfuse.config import OptimizerConfig, ParallelConfig, RunConfig, load_config
from rlhfuse.convert import convert, open_checkpoint
from rlhfuse.errors import InputError
from rlhfuse.launch import dry_run, start_line, train
from rlhfuse.monitor.compare import compare_exports, compare_runs
from rlhfuse.monitor.metrics import read_metrics
from rlhfuse.parallel.fragments import Fragment, Place
from rlhfuse.preflight import prepare
from rlhfuse.run_facts import RunFacts
from rlhfuse.schedule.ranks import rank_map
from rlhfuse.shard_files import FileFacts
from rlhfuse.spec import ModelSpec, ParallelLayout

NO_FACTS = RunFacts(4, {}, {}, "", {})
STATE = RunState({"current": 3}, {"kl_coef": 0.05}, {"metrics_bytes": 7})

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
    """An optimizer step on made-up gradients; tensor ranks have the same one of what each of them holds whole."""
    for model in models.values():
        model.zero_grad()
        for number, parameter in enumerate(model.module.parameters()):
            own = rank if getattr(parameter, "tensor_model_parallel", False) else 0
            generator = torch.Generator().manual_seed(10_000 * seed + 100 * own + number)
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        model.finish_gradients()
        model.step(1e-3)


def state_of(models: dict) -> dict:
    """role -> parameter -> (place, step, copies of the tensors)."""
    from rlhfuse.parallel.optimizer_state import export_state

    return {role: {one.name: one.to_host() for one in export_state(model)} for role, model in models.items()}


def save(rank: int, out: Path, iteration: int, models: dict) -> None:
    from rlhfuse.parallel.optimizer_state import export_state

    writer = CheckpointWriter(out, rank, 4, NO_FACTS, 2, 60)
    writer.start(iteration, STATE, {role: export_state(model) for role, model in models.items()})
    writer.check()
    one_step(rank, models, 99)  # what is written must be the state at the call
    writer.finish()


def load(out: Path, iteration: int, models: dict) -> None:
    from rlhfuse.parallel.optimizer_state import import_state

    reader = Checkpoint.open(out / "checkpoints" / f"iteration-{iteration}").reader
    for role, model in models.items():
        import_state(model, partial(reader.read, role), partial(reader.step, role))


def weights_of(models: dict) -> dict:
    return {f"{r}.{n}": p.detach().clone() for r, m in models.items() for n, p in m.module.named_parameters()}


def save_and_load(rank: int, folders: dict, out: Path, actor: str, critic: str, dtype: str) -> list[str]:
    """Two steps, save, load into new models, one more step on both; returns what differs and what is odd."""
    models = build(rank, folders, actor, critic, dtype)
    fresh = state_of(models)
    one_step(rank, models, 0)
    one_step(rank, models, 1)
    state, weights = state_of(models), weights_of(models)
    save(rank, out, 7, models)
    torch.distributed.barrier()
    loaded = build(rank, folders, actor, critic, dtype)
    load(out, 7, loaded)
    found = [f"loaded {line}" for line in differing(state, state_of(loaded))]
    found += [f"weights {n}" for n, value in weights_of(loaded).items() if not torch.equal(value, weights[n])]
    for role, rows in state.items():
        found += [f"{n} did not train" for n, one in rows.items() if torch.equal(one.tensors["main"], fresh[role][n].tensors["main"])]
        found += [f"{n} has step {one.step}" for n, one in rows.items() if one.step != 2 or len(one.tensors) != 3]
    one_step(rank, loaded, 2)
    again = build(rank, folders, actor, critic, dtype)
    load(out, 7, again)
    one_step(rank, again, 2)
    found += [f"continued {line}" for line in differing(state_of(again), state_of(loaded))]
    return found


def load_elsewhere(rank: int, folders: dict, out: Path, actor: str, critic: str, dtype: str) -> list[str]:
    """Load checkpoint 7 into another layout, save that as 8; returns what weights and files differ."""
    models = build(rank, folders, actor, critic, dtype)
    load(out, 7, models)
    found = [
        f"weight {role}.{one.name}"
        for role, model in models.items()
        for one in state_of({role: model})[role].values()
        if one.step != 2
    ]
    weights = {role: {n: p.detach().clone() for n, p in m.module.named_parameters()} for role, m in models.items()}
    save(rank, out, 8, models)
    torch.distributed.barrier()
    before, after = (Checkpoint.open(out / "checkpoints" / f"iteration-{n}").reader for n in (7, 8))
    for role in models:
        for name, shape in after.shapes(role).items():
            for kind in ("main", "exp_avg", "exp_avg_sq"):
                a, b = (reader.read(role, name, kind, Place.whole(shape)) for reader in (before, after))
                found += [] if torch.equal(a, b) else [f"{role}.{kind}.{name}"]
    assert all(len(rows) > 3 for rows in weights.values())
    return found


def differing(a: dict, b: dict) -> list[str]:
    """Fragments of two `state_of` that are not equal to the bit."""
    found = []
    for role in a:
        for name in sorted(a[role].keys() | b[role].keys()):
            one, two = a[role].get(name), b[role].get(name)
            same = one and two and (one.place, one.step) == (two.place, two.step) and one.tensors.keys() == two.tensors.keys()
            if not same or any(not torch.equal(one.tensors[kind], two.tensors[kind]) for kind in one.tensors):
                found.append(f"{role}.{name}")
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    actor = write_checkpoint(base / "actor", seed=1, tie_word_embeddings=True)
    critic = write_checkpoint(base / "critic", scalar_head=True, seed=2)
    return {"actor": actor, "reference": actor, "critic": critic, "reward": critic}


@pytest.mark.parametrize(
    "saved, dtype, elsewhere",
    [
        (("d4t1p1", "d2t1p2"), "float32", ("d1t1p4", "d2t2p1")),
        (("d1t2p2", "d2t1p2"), "bfloat16", ("d2t2p1", "d1t1p4")),
    ],
)
def test_state_comes_back_bit_for_bit_and_in_other_layouts(workers, folders, tmp_path, saved, dtype, elsewhere):
    assert workers.run(save_and_load, folders, tmp_path, *saved, dtype) == [[]] * 4
    folder = tmp_path / "checkpoints"
    assert sorted(f.name for f in folder.iterdir()) == ["iteration-7", "latest"]
    checkpoint = Checkpoint.open(folder / "latest")
    assert checkpoint.manifest.state == STATE and checkpoint.metrics_bytes == 7
    files = ["manifest.json", *(f"rank-{rank}.safetensors" for rank in range(4))]
    assert sorted(f.name for f in checkpoint.folder.iterdir()) == files
    assert workers.run(load_elsewhere, folders, tmp_path, *elsewhere, dtype) == [[]] * 4


def write_with_a_full_disk(rank: int, out: Path) -> str:
    """Checkpoint 1 is written; of 2 rank 2 may write 50 kB only, then the system refuses. Returns what is raised."""
    place = Place((400_000,), 0, ((0, 400_000),), 100_000 * rank, 100_000 * (rank + 1))
    state = {"actor": [Fragment("w", place, 1, {"main": torch.arange(100_000.0)})]}
    writer = CheckpointWriter(out, rank, 4, NO_FACTS, 2, 60)
    writer.start(1, STATE, state)
    writer.finish()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        writer.start(2, STATE, state)
        writer.finish()
        return "nothing was raised"
    except InputError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_ends_all_ranks_and_leaves_the_last_good_one(workers, tmp_path):
    messages = workers.run(write_with_a_full_disk, tmp_path)
    folder = tmp_path / "checkpoints"
    file = folder / "iteration-2.partial" / "rank-2.safetensors"
    assert len(set(messages)) == 1 and messages[0].startswith(f"rank 2 cannot write {file}: "), messages
    assert f"the last good checkpoint is {folder / 'iteration-1'}" in messages[0] and "\n" not in messages[0]
    assert sorted(f.name for f in folder.iterdir()) == ["iteration-1", "latest"]
    whole = Checkpoint.open(folder / "latest").reader.whole("actor", "w")
    assert torch.equal(whole, torch.arange(100_000.0).repeat(4))


# the folder -----------------------------------------------------------------------------------------------------


def test_manifest_prints_and_parses_back():
    facts = RunFacts(2, {"actor_train": "d1t1p2"}, {"actor": {"layers": 4}}, "ab", {"trainer.seed": 1, "rollout.top_p": 0.1})
    state = RunState({"current": 1, "x": [0.1, 1e-300]}, {"kl_coef": 0.1}, {"metrics_bytes": 12})
    manifest = Manifest(3, facts, state, (FileFacts("rank-0.safetensors", 5, "ab"),))
    assert Manifest.parse(manifest.to_text(), "m") == manifest
    for text in ("", "[]", "{}", '{"version": 2}', manifest.to_text().replace('"facts"', '"fax"')):
        with pytest.raises(InputError, match="m is no manifest"):
            Manifest.parse(text, "m")
    with pytest.raises(InputError, match="version 9 is unknown"):
        Manifest.parse(manifest.to_text().replace('"version": 2', '"version": 9'), "m")


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
    "1 one 3 iteration 1: generation",
    "0 all 1 iteration 3: training mini-batch 1",
    "1 one 1 file written",  # of rank 1, before the checkpoint has its name
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(config, uninterrupted run of 4 iterations, the same killed three times and resumed, its last log)."""
    base = tmp_path_factory.mktemp("runs")
    config = write_run(base, trainer__save_every=2, trainer__iterations=4)
    whole, broken = base / "whole", base / "killed"
    finish(start(config, f"trainer.output_dir={whole}"))
    settings = [f"trainer.output_dir={broken}", "trainer.resume=auto"]
    for moment in THREE_KILLS:
        killed(config, moment, *settings)
    assert (broken / "checkpoints" / "iteration-2").is_dir() and not (broken / "export").exists()
    assert not (broken / "checkpoints" / "iteration-4").exists()
    return config, whole, broken, finish(start(config, *settings))


def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(runs):
    _, whole, killed, log = runs
    assert "resuming from" in log and "fresh start" not in log
    assert [row["iteration"] for row in read_metrics(killed / "metrics.jsonl")] == [0, 1, 2, 3]
    comparisons = compare_runs(whole, killed)
    assert [c.what for c in comparisons] == ["metrics", "export/actor", "export/critic"]
    assert all(c.entries > 10 and not c.differences for c in comparisons), comparisons


def test_a_checkpoint_converts_to_what_the_run_exports(runs, tmp_path):
    _, whole, _, _ = runs
    checkpoint = open_checkpoint(whole)
    assert checkpoint.iteration == 4 and checkpoint.reader.roles() == ("actor", "critic")
    for role in checkpoint.reader.roles():
        convert(checkpoint, role, tmp_path / role)
        comparison = compare_exports(whole / "export" / role, tmp_path / role)
        assert comparison.entries > 10 and not comparison.differences
        names = sorted(file.name for file in (whole / "export" / role).iterdir())
        assert names == sorted(file.name for file in (tmp_path / role).iterdir())


def test_the_threshold_in_force_is_resumed(runs):
    _, _, killed, _ = runs
    saved = Checkpoint.open(killed / "checkpoints" / "iteration-2").manifest.state.threshold
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
        ("rollout.temperature=0.5", "rollout.temperature=1.0, this run has 0.5; set rollout.temperature=1.0"),
        ("trainer.seed=2", "set trainer.seed=1"),
        ("trainer.dtype=bfloat16", "set trainer.dtype=float32"),
        ("trainer.output_dir=''", "set it"),
        ("trainer.resume=never", "holds a run already"),
    ],
)
def test_another_run_than_the_saved_one(copy, override, words):
    config, run_dir = copy
    assert words in refused(config, run_dir, override)


def test_another_layout_or_world_is_taken_and_told(copy):
    config, run_dir = copy
    layouts = {"parallel.actor_train": "d2t1p1", "parallel.critic_train": "d1t1p2", "fusion.actor_microbatches": "4"}
    settings = [f"trainer.output_dir={run_dir}", "trainer.resume=auto", "trainer.iterations=6"]
    prepared = prepare(load_config(config, settings + [f"{k}={v}" for k, v in layouts.items()]), 2)
    line = start_line(prepared)
    assert "actor_train d1t1p2 -> d2t1p1, " in line and "not bit for bit" in line
    facts = prepared.resume.manifest.facts
    assert replace(facts, world_size=4).relayout(facts) == "2 -> 4 ranks"
    assert facts.relayout(facts) == ""


def test_another_model_or_vocabulary(copy):
    _, run_dir = copy
    facts = Checkpoint.open(run_dir / "checkpoints" / "iteration-4").manifest.facts
    models = {**facts.models, "critic": {**facts.models["critic"], "hidden": 128}}
    with pytest.raises(InputError, match="critic of hidden=64, critic.path holds one of 128"):
        replace(facts, models=models).check(facts, "c")
    with pytest.raises(InputError, match="another vocabulary; set actor.tokenizer"):
        replace(facts, vocabulary="x").check(facts, "c")
    with pytest.raises(InputError, match="has the models actor, critic, reference, reward, this run actor;"):
        replace(facts, models={"actor": facts.models["actor"]}).check(facts, "c")


def test_lost_lines_of_metrics_are_refused(copy):
    config, run_dir = copy
    file = run_dir / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    assert "lines are lost; bring the file back" in refused(config, run_dir)


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
