"""Whole runs as processes under torchrun: started, waited for, killed at a moment.

`killed_forked` does without torchrun: its ranks are forked from a process that has loaded all modules, which takes
longer than a short run. They find each other through a store of this process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
from gloo import forkserver, host_store

ROOT = Path(__file__).resolve().parents[1]
PATHS = os.pathsep.join(str(ROOT / folder) for folder in (".", "tools", "tests", "tests/run"))
TIMEOUT_SECONDS = 900  # a hang; a machine with other work needs minutes for the first start, which compiles


def start(config: Path, *overrides: str, program: Path = ROOT / "tools" / "train_ppo.py", ranks: int = 2, **more: str):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(program),
        "--config",
        str(config),
        *overrides,
    ]
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", **more}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def ended(process: subprocess.Popen) -> str:
    """What the run said, once it has ended; one that takes too long is ended with its ranks."""
    try:
        return process.communicate(timeout=TIMEOUT_SECONDS)[0]
    except subprocess.TimeoutExpired:
        tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for one in tree:
            one.kill()
        raise


def finish(process: subprocess.Popen) -> str:
    out = ended(process)
    assert process.returncode == 0, out
    return out


def killed(config: Path, moment: str, *overrides: str) -> str:
    """A run that ends by SIGKILL at the moment (tests/run/killed_training.py). Returns in what it was killed."""
    process = start(config, *overrides, program=ROOT / "tests" / "run" / "killed_training.py", KILL_AT=moment)
    out = ended(process)
    found = re.search(r"killed in: (.*)", out)
    assert process.returncode != 0 and found, out
    return found[1]


def killed_forked(config: Path, moment: str, log: Path, *overrides: str, ranks: int = 2) -> str:
    """As `killed`. What the ranks say goes to `log`."""
    store = host_store()  # as torchrun's agent: its port is bound when it is chosen
    os.environ["PYTHONPATH"] = PATHS  # for the process that loads modules
    context = forkserver()
    processes = []
    for rank in range(ranks):
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "WORLD_SIZE": ranks,
            "RANK": rank,
            "LOCAL_RANK": rank,
            "KILL_AT": moment,
        }
        arguments = ["--config", str(config), *overrides]
        processes.append(context.Process(target=run_rank, args=(environment, arguments, log)))
        processes[-1].start()
    until = time.monotonic() + TIMEOUT_SECONDS
    for process in processes:
        process.join(max(until - time.monotonic(), 0))
        process.kill()
        process.join()
    out = log.read_text()
    found = re.search(r"killed in: (.*)", out)
    assert found and all(process.exitcode for process in processes), out
    return found[1]


def run_rank(environment: dict, arguments: list[str], log: Path) -> None:
    """The program of a forked rank."""
    import killed_training

    with open(log, "ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ.update({name: str(value) for name, value in environment.items()}, OMP_NUM_THREADS="1")
    sys.argv = ["killed_training.py", *arguments]
    killed_training.run_program(killed_training.main)
