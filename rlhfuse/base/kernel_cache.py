"""Fills numba's cache in a process of its own: the hundreds of megabytes that the compiler takes end with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any


def is_cached(kernel: Any) -> bool:
    """Whether a process compiled this numba function before, for whatever types, and the machine still has it."""
    return any(Path(kernel.stats.cache_path).glob(f"*.{kernel.__name__}-*.nbi"))


def compile_apart(kernel: Any, module: str, *arguments: str) -> None:
    """Run `python -m module arguments` unless `kernel`, the last that it compiles, is cached; a line says so.

    Raises CalledProcessError where that fails, after it has said why.
    """
    if not is_cached(kernel):
        print(f"compiling the kernels of {module}, once on this machine: up to a minute", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", module, *arguments], check=True)
