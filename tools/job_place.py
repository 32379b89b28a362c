"""This process's place in a job as the environment says it: left, or held against what it must be to meet the others.

Variables of pods, SLURM and MPI may be about other processes, and of interfaces and names that are not here.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress

from rlhfuse.base.errors import InputError
from rlhfuse.base.launcher import cores_of_machine, local_rank

PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_A_JOB = (*PLACE, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def leave_other_jobs(keeps: str = "") -> None:
    """Make this process no rank of any job, for who starts ranks on this machine; torchrun takes PET_* as options.

    `keeps` is a variable that stays.
    """
    for name in {*os.environ} - {keeps}:
        if name in OF_A_JOB or name.startswith("PET_"):
            del os.environ[name]
    os.sched_setaffinity(0, cores_of_machine())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGUSR1])  # blocked for a rank's guard


def check_place() -> None:
    """Raise InputError unless the environment names a whole job, with this process as a rank of it."""
    given = " ".join(f"{name}={os.environ.get(name, '')}" for name in PLACE)
    with suppress(KeyError, ValueError, OSError):  # not set, no number, does not resolve
        rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if 0 <= rank < size and local_rank() >= 0 and socket.getaddrinfo(os.environ["MASTER_ADDR"], port):
            return
    raise InputError(
        f"{given}: no rank of a job, or of one whose address does not resolve; unset RANK, or start the ranks with "
        "--ranks N, or with torchrun and --local-addr ADDRESS, which all of them reach"
    )


def check_interfaces(on_gpu: bool) -> None:
    """Raise InputError for interfaces that are not here, before ranks wait for each other."""
    from torch.distributed import ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]  # not in its __all__

    here = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(GLOO_INTERFACE, "").split(",")):
        try:
            ProcessGroupGloo.create_device(interface=name)
        except RuntimeError:
            raise InputError(f"{GLOO_INTERFACE}={name} has no address here; unset it, or name one of {here}") from None
    wanted = os.environ.get(NCCL_INTERFACE, "") if on_gpu else ""
    begins = tuple(wanted.lstrip("=").split(","))
    if wanted and not wanted.startswith("^") and not any(name.startswith(begins) for name in here):
        raise InputError(f"{NCCL_INTERFACE}={wanted} names no interface here; unset it, or name one of {here}")
