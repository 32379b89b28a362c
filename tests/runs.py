"""Whole runs as processes under torchrun: started, waited for, killed at a moment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 900  # a hang; a machine with other work needs minutes for the first start, which compiles


def start(config: Path, *overrides: str, program: Path = ROOT / "tools" / "train_ppo.py", ranks: int = 2, **more: str):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
               str(program), "--config", str(config), *overrides]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
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
    """A run that ends by SIGKILL at the moment (tests/killed_training.py). Returns in what it was killed."""
    process = start(config, *overrides, program=ROOT / "tests" / "killed_training.py", KILL_AT=moment)
    out = ended(process)
    found = re.search(r"killed in: (.*)", out)
    assert process.returncode != 0 and found, out
    return found[1]
