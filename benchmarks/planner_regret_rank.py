"""One rank of the regret benchmark: jobs of the trainer one after the other, with responses of given lengths.

Every job is a fork of a process that has imported everything, so that many tables of layouts are measured without the
start of a process for each, and none finds what another left.
"""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import random_models  # noqa: F401  # silences what importing Megatron says
import torch
import torch.distributed as dist
from processes import TIMEOUT_SECONDS
from torch.distributed.distributed_c10d import PrefixStore

from rlhfuse.config.load import load_config
from rlhfuse.data.prompts import Prompt
from rlhfuse.fusion.inter.request import Request
from rlhfuse.monitor.guard import Guard
from rlhfuse.parallel.device import allow_many_files, choose_device
from rlhfuse.run.launch import joint_inputs, run_job
from rlhfuse.run.trainer import Trainer

RANKS = 2


class JobRank:
    """A process whose forks run jobs as one of RANKS ranks."""

    def __init__(self, rank: int) -> None:
        os.environ["LOCAL_RANK"] = str(rank)
        torch.set_num_threads(1)
        allow_many_files()
        self._rank, self._jobs = rank, 0
        self._store = self._connect(serve=rank == 0)

    def run(self, config: Path, overrides: Sequence[str], batches: Sequence[Sequence[int]]) -> None:
        """A job to its end; what it measures is in its run directory. Raises RuntimeError where it fails.

        Sample i of iteration j has batches[j][i] tokens of response.
        """
        self._jobs += 1
        apart(partial(self._job, config, overrides, batches))

    def _connect(self, serve: bool) -> dist.Store:
        timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        public = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]  # but not in torch's list
        return public(*address, RANKS, serve, timeout)

    def _job(self, config: Path, overrides: Sequence[str], batches: Sequence[Sequence[int]]) -> None:
        device, plain = choose_device("cpu", self._rank, 1), Trainer._requests
        store = PrefixStore(f"job{self._jobs}", self._connect(serve=False))
        inputs = joint_inputs(load_config(str(config), list(overrides)), store, self._rank, RANKS)
        torch.manual_seed(inputs.config.trainer.seed)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=RANKS)

        def requests(trainer: Trainer, iteration: int, prompts: Sequence[Prompt], first: int) -> list[Request]:
            lengths = zip(plain(trainer, iteration, prompts, first), batches[iteration], strict=True)
            return [replace(one, params=replace(one.params, max_tokens=tokens)) for one, tokens in lengths]

        with patch.object(Trainer, "_requests", requests), Guard(self._rank, TIMEOUT_SECONDS) as guard:
            run_job(inputs, "regret", self._rank, device, guard)


def apart(work: Callable[[], None]) -> None:
    """Do it in a fork. Raises RuntimeError with its traceback."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os.write(theirs, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours) as said:
        failed = said.read()
    status = os.waitpid(child, 0)[1]
    if failed or status:
        raise RuntimeError(f"a fork ended with status {status}\n{failed}")
