"""Ranks that mpirun started, and the one process there is: and what the first reads."""

from types import SimpleNamespace

import pytest
from mpi_ranks import MpiRanks
from testkit.programs import MPIRUN

from rlhfuse.base.errors import InputError

TOLD = """
import sys
from mpi_ranks import MpiRanks
from rlhfuse.base.errors import InputError
from program import run_program

ranks = MpiRanks.here()

def read():
    if "nothing" in sys.argv:
        raise InputError("nothing to do")
    if "broken" in sys.argv:
        raise RuntimeError("broken")
    return ranks.rank, sys.argv[1]

def main():
    with ranks.together():
        print("rank", ranks.rank, ranks.from_first(read), flush=True)

run_program(main)
"""
mpi = pytest.mark.mpi
no_mpirun = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python: pip install rlhfuse[mpi]")


def test_a_launcher_of_one_rank_needs_no_mpi(monkeypatch):
    monkeypatch.setenv("PMIX_RANK", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setattr("mpi_ranks.load_mpi", lambda: pytest.fail("asked for"))
    assert MpiRanks.here().size == 1


SRUN = {"SLURM_STEP_NUM_TASKS": "2"}
PMI = {**SRUN, "PMI_SIZE": "2", "PMI_RANK": "0"}  # srun --mpi=pmi2, which Open MPI does not hear


@pytest.mark.parametrize("first, other", [(SRUN, {"SLURM_PROCID": "1"}), (PMI, {"PMI_RANK": "1"})])
def test_processes_that_no_mpi_joins_are_refused_each(monkeypatch, first, other):
    lone = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_size=lambda: 1))
    monkeypatch.setattr("mpi_ranks.load_mpi", lambda: lone)
    monkeypatch.setattr("os.environ", {**first, "SLURM_PROCID": "0"})
    with pytest.raises(InputError, match="=2 processes were started, and no MPI .* mpirun"):
        MpiRanks.here()
    monkeypatch.setattr("os.environ", {**first, **other})
    with pytest.raises(InputError, match="unset"):
        MpiRanks.here()


def test_one_rank_of_mpirun_is_no_several_of_srun(monkeypatch):
    monkeypatch.setattr("os.environ", {**SRUN, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"})
    assert MpiRanks.here().size == 1


@mpi
@no_mpirun
def test_every_rank_has_what_the_first_read(tmp_path, programs):
    (tmp_path / "told.py").write_text(TOLD)
    done = programs.mpirun(3, tmp_path / "told.py", "abc", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} (0, 'abc')" for rank in range(3)]


@mpi
@no_mpirun
@pytest.mark.parametrize("word, code, told", [("nothing", 2, "error: nothing to do"), ("broken", 1, "Error: broken")])
def test_it_is_said_once_and_all_end(tmp_path, programs, word, code, told):
    (tmp_path / "told.py").write_text(TOLD)
    done = programs.mpirun(3, tmp_path / "told.py", "abc", word, cwd=tmp_path)
    assert done.returncode == code and done.stdout == ""
    assert done.stderr.count(f"{told}\n") == 1, done.stderr
