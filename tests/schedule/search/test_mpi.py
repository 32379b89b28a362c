"""Signals that end a search, and what its ranks tell each other."""

import os
import signal

import pytest
from testkit.programs import MPIRUN

from rlhfuse.schedule.search.mpi import StopSignals


def test_signals_are_remembered_and_a_second_ctrl_c_insists():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # the batch system and mpirun both
            assert signals.received == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.received == 0
    finally:
        signal.signal(signal.SIGINT, before)


EXCHANGE = """
import os
import time
import numpy as np
from mpi4py import MPI
from rlhfuse.schedule.search.mpi import Exchange, RoundMessage

exchange = Exchange(5, MPI.COMM_WORLD)
looks = 0
rank = exchange.rank
best = [(9.0, 9.0)]

def round_of(keys, **more):
    own = keys[rank]
    message = RoundMessage(own, np.arange(5) + 10 * rank, **more) if own else RoundMessage(**more)
    result = exchange.agree(message, lambda key: key < best[0])
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
