"""What a launcher, such as torchrun, says in the environment of its processes; the end that they have in common."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
from pathlib import Path

from rlhfuse.base.errors import InputError

PATIENCE_SECONDS = "30"  # torchrun's with ranks that it has told to end
STORE_SECONDS = 5.0  # how long the job's store may take to accept a connection
PR_SET_PDEATHSIG = 1
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
SAFE_PATH = "PYTHONSAFEPATH"  # with it a Python imports nothing from the current folder, from 3.11 on
# -m and -c put the current folder before the standard library. sys is built in, so nothing is imported from there.
START = (
    "import sys; sys.path[:] = filter(None, sys.path); del sys.argv[0]; import runpy; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
MPI_RANK = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_SIZE")  # set by what starts MPI's ranks


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal, 0 for none, once the thread of `parent` that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it has ended
        os.kill(os.getpid(), number)


def begin_rank() -> None:
    """Prepare a rank, or a worker of a rank, before it imports what takes long to load; without a launcher nothing."""
    if "RANK" in os.environ:  # signals that come while modules load, some of which would ignore them, wait
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGUSR1])
    # torchrun makes each rank the leader of a session, by which a rank is known whose launcher has ended already
    orphan = "TORCHELASTIC_RUN_ID" in os.environ and os.getsid(0) == os.getpid()
    if not (orphan or torchrun_is_parent() or multiprocessing.parent_process()):
        return  # no launcher, or variables of another job
    end_with_parent(os.getppid())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # which was there before any rank
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            socket.create_connection(place, STORE_SECONDS).close()
        except OSError as error:  # others do not say that nobody listens
            if isinstance(error, ConnectionRefusedError):
                sys.exit(f"error: the launcher has ended: nothing listens at {place[0]}:{place[1]}, its store")


def local_rank() -> int:
    """Number of this process on its node; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def ranks_per_node() -> int | None:
    """Ranks of this job on a node; None without a launcher. Plans ask for it, too: theirs is the job's node.

    Raises InputError for what is no number of ranks.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if text and not (text.isdecimal() and int(text) > 0):
        raise InputError(f"LOCAL_WORLD_SIZE={text!r} is no number of ranks; unset it or give 1 or more")
    return int(text) if text else None


def launcher_command() -> list[str]:
    """The command line of torchrun, which has started this process; of none without it."""
    file = Path(f"/proc/{os.getppid()}/cmdline")
    if "TORCHELASTIC_RUN_ID" not in os.environ or not file.exists():
        return []
    return file.read_text().rstrip("\0").split("\0")


def module_command(module: str, *arguments: str) -> list[str]:
    """The words that run `module` as `python -m` does, but import nothing from the current folder."""
    return [sys.executable, "-c", START, module, *arguments]


def torchrun_is_parent() -> bool:
    """Whether torchrun started this process: variables alone may be of a job that is over, or of another launcher."""
    return any(Path(word).name in TORCHRUN for word in launcher_command()[:4])


def cores_of_machine() -> set[int]:
    """Cores that this process may use. Where mpirun has bound it to some, also those that it was not bound to."""
    bound = os.sched_getaffinity(0)
    if "RANK" in os.environ or not any(name in os.environ for name in MPI_RANK):
        return bound
    os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))  # the system keeps to those of the container
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, bound)
    return allowed


def patience_seconds() -> float:
    """How long torchrun lets a rank live after it has handed it a signal; without torchrun infinite."""
    if not (words := launcher_command()):
        return math.inf
    given = re.search(r"\s--shutdown[-_]timeout[=\s](\d+)\s", f" {' '.join(words)} ")
    return float(given[1] if given else os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", PATIENCE_SECONDS))
