"""A run's folder: whose it is, what stays of an attempt that saved nothing, and which name it gets."""

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist
from testkit.tiny import write_run

from rlhfuse.base.errors import InputError
from rlhfuse.config.load import load_config
from rlhfuse.config.settings import TrainerConfig
from rlhfuse.monitor.run_lock import RUN_LOCK, RunLock
from rlhfuse.run.preflight import check_inputs
from rlhfuse.run.run_directory import make_folder, run_directory

POOL_RANKS = 2


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


def enter(rank: int, config: Path, run_dir: Path, *overrides: str, meanwhile: str = "") -> list[str] | str:
    """Own the folder for a moment, as a run does; returns what is in it then, or the error.

    `meanwhile`: a folder that another run makes there after this one has looked for checkpoints.
    """
    try:
        inputs = check_inputs(load_config(config, [f"trainer.output_dir={run_dir}", *overrides]), 2)
        dist.barrier()
        if meanwhile:
            (run_dir / meanwhile).mkdir(parents=True, exist_ok=True)
        with run_directory(inputs, "run", rank) as directory:
            assert directory.path == run_dir and (directory.lock is None) == (rank > 0)
            found = sorted(str(file.relative_to(run_dir)) for file in run_dir.rglob("*") if file.is_file())
            dist.barrier()  # the lock stays until both have looked
            return found
    except InputError as error:
        return str(error)


def enter_late(rank: int, *arguments) -> list[str] | str:
    return enter(rank, *arguments, meanwhile="checkpoints/iteration-3")


def attempt(run_dir: Path, text: str = '{"iteration": 0}\n') -> None:
    """What a killed attempt leaves that has saved nothing."""
    for name in ("metrics.jsonl", "samples.jsonl", "plan.json", "tensorboard/events", "notes.txt", *JOURNALS):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text(text)


JOURNALS = ("tool_calls.0.jsonl", "tool_calls.3.jsonl")
OF_ATTEMPT = ("metrics.jsonl", "plan.json", "samples.jsonl", "tensorboard/events", *JOURNALS)


def test_auto_keeps_what_an_attempt_without_checkpoint_left(workers, config, tmp_path):
    run_dir = tmp_path / "run"
    expected = [RUN_LOCK, "notes.txt"]
    for number in (1, 2):
        attempt(run_dir)
        expected += [f"attempt-{number}/{name}" for name in OF_ATTEMPT]
        assert workers.run(enter, config, run_dir, "trainer.resume=auto") == [sorted(expected)] * 2
        assert (run_dir / f"attempt-{number}" / "metrics.jsonl").read_text() == '{"iteration": 0}\n'
    attempt(run_dir, "")  # has done nothing
    found = workers.run(enter, config, run_dir, "trainer.resume=auto")[0]
    assert (
        "metrics.jsonl" in found and not {*JOURNALS} & {*found} and not [name for name in found if "attempt-3" in name]
    )
    assert not (run_dir / RUN_LOCK).exists()


def test_what_another_run_saved_meanwhile_is_left_alone(workers, config, tmp_path):
    attempt(tmp_path)
    messages = workers.run(enter_late, config, tmp_path, "trainer.resume=auto")
    assert messages == [f"another run saved in {tmp_path} while this one began; start it again"] * 2
    assert (tmp_path / "metrics.jsonl").exists() and (tmp_path / "checkpoints" / "iteration-3").exists()


def test_a_folder_in_use_ends_all_ranks_by_one_line(workers, config, tmp_path):
    with RunLock(tmp_path):
        messages = workers.run(enter, config, tmp_path)
    assert len(set(messages)) == 1 and f"run that is alive, pid {os.getpid()} on " in messages[0]
    assert workers.run(enter, config, tmp_path) == [[RUN_LOCK]] * 2


def test_a_run_that_has_lost_its_folder_writes_no_more(runs, tmp_path):
    """Another run takes it over while the first iteration is under way."""
    lock, function = runs.folder / "run" / RUN_LOCK, tmp_path / "takes.py"
    function.write_text(
        f"def take(completions):\n    open({str(lock)!r}, 'w').close()\n    return [0.0] * len(completions)\n"
    )
    settings = f"reward.function={function}:take reward.signature=trl"
    for said in runs.start("run", settings, errors=True):
        assert f"{lock} is no longer of this run" in said
    assert (lock.parent / "metrics.jsonl").read_bytes() == b""


def test_runs_of_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20260101-120000")
    folders = [make_folder(TrainerConfig(output_dir=""), "story") for _ in range(3)]
    assert [str(one) for one in folders] == [f"runs/story-20260101-120000{end}" for end in ("", "-2", "-3")]
    given = TrainerConfig(output_dir=str(tmp_path / "given"))
    assert make_folder(given, "story") == make_folder(given, "story") == tmp_path / "given"


def test_leftovers_of_killed_writers_go_at_the_start(workers, config, tmp_path):
    (tmp_path / "export" / ".actor.7.replaced").mkdir(parents=True)
    (tmp_path / "export" / ".critic.7.under-way").mkdir()
    (tmp_path / ".trace.json.ab12.under-way").write_text("[")
    (tmp_path / ".hidden").write_text(json.dumps("the user's"))
    assert workers.run(enter, config, tmp_path)[0] == [".hidden", RUN_LOCK]
    assert [one.name for one in (tmp_path / "export").iterdir()] == ["actor"]
