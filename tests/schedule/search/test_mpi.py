"""What the ranks of a search tell each other."""

import pytest
from testkit.programs import MPIRUN

from rlhfuse.schedule.search import mpi  # noqa: F401  # which the program below imports

EXCHANGE = """
import os
import time
import numpy as np
from mpi4py import MPI
from rlhfuse.schedule.search.mpi import Exchange
from rlhfuse.schedule.search.solution import Round, Solution

exchange = Exchange(5, MPI.COMM_WORLD)
looks = 0
rank = exchange.rank
best = [(9.0, 9.0)]

def round_of(keys, share=0.0, signal=0, tried=0, accepted=0):
    own = keys[rank] and Solution(*keys[rank], np.arange(5) + 10 * rank)
    result = exchange.agree(Round(tried, own, accepted), share, signal, lambda key: key < best[0])
    first = None if result.sequence is None else int(result.sequence[0]) // 10
    assert first is None or list(result.sequence) == [10 * first + i for i in range(5)]
    return first, result

nothing = None
assert round_of([nothing, nothing, nothing])[0] is None
assert round_of([(9.0, 9.0), nothing, (10.0, 1.0)])[0] is None       # no better than what all have
assert round_of([nothing, (8.0, 9.0), (8.5, 1.0)])[0] == 1           # the makespan decides
assert round_of([(8.0, 9.0), (8.0, 7.0), (8.0, 8.0)])[0] == 1        # then the peak memory
assert round_of([nothing, (8.0, 7.0), (8.0, 7.0)])[0] == 1           # then the lowest rank
assert round_of([(9.0, 9.5), (9.0, 8.0), nothing])[0] == 1           # only the memory is better
result = round_of([nothing] * 3, share=0.5 + rank, signal=15 * (rank == 2), tried=10**12 + rank, accepted=rank)[1]
assert result == (None, 0.5, 15, 3 * 10**12 + 3, 3)
def free():                                                          # as long as rank 1 keeps them waiting
    global looks
    looks += 1
    if looks == 5:
        open(f"free{rank}", "w").close()
exchange.idle = free
while rank == 1 and not (os.path.exists("free0") and os.path.exists("free2")):
    time.sleep(0.01)
round_of([nothing] * 3)
print("rank", rank, "agrees", flush=True)
"""


@pytest.mark.mpi
@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python: pip install rlhfuse[mpi]")
def test_three_ranks_agree(tmp_path, programs):
    (tmp_path / "exchange.py").write_text(EXCHANGE)
    result = programs.mpirun(3, tmp_path / "exchange.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"rank {rank} agrees" for rank in range(3)]
