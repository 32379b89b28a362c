"""Fills numba's cache in a process of its own: the hundreds of megabytes that the compiler takes end with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def is_cached(kernel: Any) -> bool:
    """Whether a process compiled this numba function before, for whatever types, and the machine still has it.

    What was compiled before a file of its folder changed is thrown away: numba looks at a kernel's own file alone, not
    at those of the kernels that it calls.
    """
    folder, sources = Path(kernel.stats.cache_path), Path(kernel.py_func.__code__.co_filename).parent
    changed = max(file.stat().st_mtime for file in sources.glob("*.py"))
    for index in folder.glob("*.nbi"):
        with suppress(FileNotFoundError):  # another rank's process does the same
            if index.stat().st_mtime < changed:
                index.unlink()
    return any(folder.glob(f"*.{kernel.__name__}-*.nbi"))


def compile_apart(kernel: Any, module: str, *arguments: str, progress: Callable[[str], None] = lambda _: None) -> None:
    """Run `python -m module arguments` unless `kernel`, the last that it compiles, is cached; a line says so.

    `progress` is told each line that the module prints: see `tell_what_is_compiled`. Raises CalledProcessError where it
    fails, after it has said why.
    """
    if not is_cached(kernel):
        print(f"compiling the kernels of {module}, once on this machine: up to a minute", file=sys.stderr, flush=True)
        words = [sys.executable, "-m", module, *arguments]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                progress(f"compiling kernels: {line.strip()}")
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, words)


def tell_what_is_compiled() -> None:
    """Print the name of each kernel that this process begins to compile."""
    from numba.core import event

    class Teller(event.Listener):
        def on_start(self, event: Any) -> None:
            print(event.data["dispatcher"].py_func.__name__, flush=True)

        def on_end(self, event: Any) -> None:
            pass

    event.register("numba:compile", Teller())


def cache_folder(source: Path) -> Path:
    """Where numba keeps what it compiles of a file, and others may too: NUMBA_CACHE_DIR, __pycache__, or the user's."""
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(given)
    beside = source.parent / "__pycache__"
    if os.access(beside if beside.exists() else source.parent, os.W_OK):
        return beside
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlhfuse"
