"""A benchmark as its users run it: a program with arguments, ended and read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def command(program: str, *arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks" / program), *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(program: str, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(command(program, *arguments), env=environment(), capture_output=True, text=True, timeout=540)


def check_refused(message: str, program: str, *arguments: object) -> None:
    """Bad input: exit code 2, the message, and no traceback."""
    finished = run(program, *arguments)
    assert finished.returncode == 2 and message in finished.stderr and "Traceback" not in finished.stderr
