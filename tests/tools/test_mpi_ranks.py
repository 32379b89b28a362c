"""Ranks that mpirun started, and the one process there is: what the first reads, and work that they share out."""

from types import SimpleNamespace

import pytest
from mpi_ranks import MpiRanks
from testkit.programs import MPIRUN

from rlhfuse.base.errors import InputError

SHARED = """
import sys
from mpi_ranks import MpiRanks
from rlhfuse.base.errors import InputError, run_program

ranks = MpiRanks.here()

def work(item, comm):
    members = [ranks.rank] if comm is None else comm.allgather(ranks.rank)
    if item in sys.argv[2:]:
        raise InputError(f"{item} cannot be")
    return item, members

def read():
    if "nothing" in sys.argv:
        raise InputError("nothing to do")
    if "broken" in sys.argv:
        raise RuntimeError("broken")
    return ranks.rank, sys.argv[1]

def main():
    with ranks.together():
        first, items = ranks.from_first(read)
        assert first == 0
        print("rank", ranks.rank, ranks.shared(items, work), flush=True)

run_program(main)
"""
mpi = pytest.mark.mpi
no_mpirun = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python: pip install rlhfuse[mpi]")


def test_one_process_does_it_all_in_order():
    ranks = MpiRanks()
    assert ranks.from_first(lambda: 3) == 3
    assert ranks.shared("abc", lambda item, comm: (item, comm)) == [("a", None), ("b", None), ("c", None)]
    assert ranks.shared("", lambda item, comm: item) == []


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
@pytest.mark.parametrize(
    "items, dealt",
    [("abcd", "a0 b1 c2 d0"), ("ab", "a02 b1"), ("", "")],
    ids=["one rank each", "a group for some", "nothing"],
)
def test_every_rank_has_what_all_made(tmp_path, programs, items, dealt):
    (tmp_path / "shared.py").write_text(SHARED)
    done = programs.mpirun(3, tmp_path / "shared.py", items, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = [(word[0], [int(rank) for rank in word[1:]]) for word in dealt.split()]
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} {expected}" for rank in range(3)]


@mpi
@no_mpirun
@pytest.mark.parametrize(
    "words, code, told",
    [
        (("abc", "nothing"), 2, "error: nothing to do"),
        (("abcd", "d", "b"), 2, "error: b cannot be"),  # the first in order, whoever met it
        (("abc", "broken"), 1, "RuntimeError: broken"),
    ],
)
def test_it_is_said_once_and_all_end(tmp_path, programs, words, code, told):
    (tmp_path / "shared.py").write_text(SHARED)
    done = programs.mpirun(3, tmp_path / "shared.py", *words, cwd=tmp_path)
    assert done.returncode == code and done.stdout == ""
    assert done.stderr.count(f"{told}\n") == 1, done.stderr
