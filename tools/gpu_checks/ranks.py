"""Ranks of a check: processes forked from one that has imported the program and has not touched a GPU."""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from gpu_checks.bench import Bench
from gpu_checks.result import CheckFailed


def fork_ranks(
    count: int, work: Callable[[], object], log: Path, environment: Mapping[str, str]
) -> tuple[list[int | None], str]:
    """Exit codes of `count` processes that call `work` as ranks of one machine, and what they said.

    Once one has failed the others, which may wait for it, are given ten seconds.
    """
    # as torchrun's agent has it
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    context, processes = multiprocessing.get_context("fork"), []
    for rank in range(count):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        told = {**{name: str(value) for name, value in place.items()}, **environment}
        processes.append(context.Process(target=_run_rank, args=(told, work, log)))
        processes[-1].start()
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            for process in processes:
                process.join(10)
                process.kill()
        time.sleep(0.05)
    return [process.exitcode for process in processes], log.read_text(errors="replace")


def _run_rank(environment: dict[str, str], work: Callable[[], object], log: Path) -> None:
    with open(log, "ab") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    atexit._clear()  # what was registered before the fork is for the other process to run: its folders, its services
    gc.freeze()  # and to collect: its threads are not here
    work()


def on_ranks(bench: Bench, count: int, work: Callable[..., dict], *arguments: Any, **environment: str) -> list[dict]:
    """What `work(bench, count, *arguments)` gives on each rank of a process group, by rank, on a GPU each."""

    def run() -> None:
        rank, code = int(os.environ["RANK"]), 0
        try:
            mine = replace(bench, rank=rank)
            dist.init_process_group(mine.device.process_group)
            found = work(mine, count, *arguments)
            dist.barrier()
        except Exception as error:
            traceback.print_exc()
            found, code = {"error": f"{type(error).__name__}: {error}"}, 1
        (bench.folder / f"rank_{rank}.json").write_text(json.dumps(found))
        os._exit(code)  # what is left of a communicator is not waited for

    codes, said = fork_ranks(count, run, bench.folder / "ranks.log", environment)
    files = [bench.folder / f"rank_{rank}.json" for rank in range(count)]
    found = [json.loads(file.read_text()) if file.is_file() else {"error": said[-500:]} for file in files]
    if any(codes):
        errors = {rank: one["error"][:500] for rank, one in enumerate(found) if "error" in one}
        raise CheckFailed(f"exit codes {codes}: {json.dumps(errors)}")
    return found
