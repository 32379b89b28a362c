"""Variables of other launchers: left by a program that starts ranks, refused where they make no whole job."""

import os
import signal
from unittest import mock

import pytest
from job_place import OF_A_JOB, check_interfaces, check_place, leave_other_jobs
from testkit.programs import call_tool
from testkit.tiny import write_run

from rlhfuse.base.errors import InputError

WHOLE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
OTHERS = {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "far:1", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "8"}
BROKEN = [(name, value) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT") for value in ("", "x", "-1")]
BROKEN += [("RANK", "2"), ("LOCAL_RANK", "x"), ("MASTER_ADDR", "no.such.invalid")]


def test_who_starts_ranks_leaves_every_other_job():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGUSR1])
    with mock.patch.dict(os.environ, WHOLE | OTHERS | {"TORCHELASTIC_RUN_ID": "x"}):
        leave_other_jobs()
        assert not {*OTHERS, *OF_A_JOB} & os.environ.keys()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize("name, value", BROKEN)
def test_a_process_is_no_rank_of_half_a_job(name, value):
    with mock.patch.dict(os.environ, WHOLE):
        check_place()
        os.environ[name] = value
        with pytest.raises(InputError, match="unset RANK.*--ranks"):
            check_place()
        del os.environ[name]
        if name in WHOLE:
            with pytest.raises(InputError, match="unset RANK.*--ranks"):
                check_place()


GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
FOUND = [(GLOO, "lo", False), (NCCL, "ib0", False), (NCCL, "^ib", True), (NCCL, "ib,l", True)]
MISSING = [(GLOO, "lo,ib0", False), (GLOO, "ib0", True), (NCCL, "ib", True), (NCCL, "=ib0", True)]


def test_interfaces_that_are_not_here_are_named(monkeypatch):
    for variable, value, on_gpu in FOUND + MISSING:
        with mock.patch.dict(os.environ, {variable: value}):
            if (variable, value, on_gpu) in FOUND:
                check_interfaces(on_gpu)
                continue
            with pytest.raises(InputError, match=f"{variable}.*lo"):
                check_interfaces(on_gpu)


@pytest.mark.parametrize("variables", [WHOLE | {"RANK": "1"}, OTHERS, {"WORLD_SIZE": "x"}])
def test_a_program_that_starts_ranks_says_its_errors(tmp_path, variables):
    for words in (("--ranks", 2), ("--dry-run",)):
        done = call_tool("train_ppo", "--config", tmp_path / "none.yaml", *words, **variables)
        assert (done.returncode, "none.yaml does not exist" in done.stderr) == (2, True), done


def test_a_run_that_was_moved_is_not_gone_on_with_in_its_former_folder(tmp_path):
    file = write_run(tmp_path, trainer__output_dir=str(tmp_path / "former"))
    (tmp_path / "checkpoints").mkdir()
    done = call_tool("train_ppo", "--config", file, "--ranks", 2)
    assert done.returncode == 2 and f"set trainer.output_dir={tmp_path}" in done.stderr
