"""Starts the ranks of a job on this machine, as torchrun does, and ends the screen with the error of the first."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed.run as torchrun
from job_place import GLOO_INTERFACE
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler

from rlhfuse.base.errors import EXIT_INTERRUPTED, LAST_WORD
from rlhfuse.base.launcher import SAFE_PATH, module_command

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where whoever started a process wants its error, as torchrun does of its ranks
BOUND = "--numa-binding=node"
# Those that are handed on: SIGUSR1 would end torchrun alone.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
# As --standalone, which goes by the machine's name: that may not resolve, or to an address that is not reached.
MEETING = ("--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
BEYOND_GRACE_SECONDS = 30  # for ranks that were given up when they had not finished in time


def start_ranks(ranks: int, program: Sequence[str], grace_seconds: float, on_gpus: bool = False) -> int:
    """Run `program`, a Python file and its arguments, as so many ranks of a job on this machine, as torchrun does.

    That hands Ctrl-C, SIGUSR1 and SIGTERM on, and waits a little longer than `grace_seconds`; ranks are bound to the
    cores beside their GPUs where it can. Returns the exit code of the rank that failed first, whose error ends the
    screen.
    """
    logging.disable()  # what torchrun says beside its table: the ranks say it
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(grace_seconds) + BEYOND_GRACE_SECONDS))
    os.environ[LAST_WORD] = "launcher"
    os.environ.pop(SAFE_PATH, None)  # a rank is a file with others beside it
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # it outlives a rank that fails, and has no news
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun, which warns
    os.environ.setdefault(GLOO_INTERFACE, "lo")  # ranks of one machine need no name of it, and no network
    heard = [number.name for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup's stays so
    options = [*MEETING, f"--rdzv-id={uuid.uuid4()}", "--nproc-per-node", str(ranks)]
    options += ["--signals-to-handle", ",".join(heard)]
    if on_gpus:
        trial = module_command("torch.distributed.run", *options, BOUND, "--no-python", "true")
        if subprocess.run(trial, capture_output=True).returncode == 0:
            options.append(BOUND)
        else:
            print(f"ranks are not bound to the cores beside their GPUs: torchrun {BOUND} fails here", file=sys.stderr)
    try:
        torchrun.run(torchrun.parse_args([*options, *program]))
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        said: Any = failure.message  # a text of torch's own, or what the rank left in its error file
        if isinstance(said, Mapping) and ERROR_FILE in os.environ:
            get_error_handler().dump_error_file(failure.error_file, failure.exitcode)
        ended = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"left with {failure.exitcode}"
        if failure.exitcode != EXIT_INTERRUPTED:  # who stopped because it was asked to has said how to go on
            print(said["message"] if isinstance(said, Mapping) else f"error: rank {rank} {ended}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0
