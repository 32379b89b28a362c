"""Fills numba's cache in processes of their own: the hundreds of megabytes that the compiler takes end with them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlhfuse.base.launcher import end_with_parent, module_command


@dataclass(frozen=True)
class KernelGroup:
    """What `module` with `arguments` compiles, which no other group does."""

    kernels: tuple[Any, ...]  # the last that it compiles of each folder
    module: str
    arguments: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # a file of each other folder from which functions are compiled along

    @property
    def words(self) -> list[str]:
        return module_command(self.module, *self.arguments)


def is_cached(kernel: Any, sources: Sequence[str] = ()) -> bool:
    """Whether a process compiled this numba function before, for whatever types, and the machine still has it.

    What was compiled before a file of its folder, or of one of `sources`, changed is thrown away: numba looks at a
    kernel's own file alone, not at those of the kernels that it calls.
    """
    folder = Path(kernel.stats.cache_path)
    folders = (Path(file).parent for file in (kernel.py_func.__code__.co_filename, *sources))
    changed = max(file.stat().st_mtime for sources in folders for file in sources.glob("*.py"))
    for index in folder.glob("*.nbi"):
        with suppress(FileNotFoundError):  # another rank's process does the same
            if index.stat().st_mtime < changed:
                index.unlink()
    return any(folder.glob(f"*.{kernel.__name__}-*.nbi"))


def compile_apart(groups: Sequence[KernelGroup], progress: Callable[[str], None] = lambda _: None) -> None:
    """Compile the groups that are not cached, as many at a time as there are cores; two lines say so.

    `progress` is told each line that they print: see `tell_what_is_compiled`. Raises CalledProcessError where one
    fails, after it has said why.
    """
    if not _missing(groups):
        return
    folder = Path(min(kernel.stats.cache_path for group in groups for kernel in group.kernels))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "compiling.lock", "w") as lock:
        with suppress(OSError):  # a file system without locks: others may compile the same meanwhile
            fcntl.flock(lock, fcntl.LOCK_EX)  # other ranks of this machine want the same: they wait, and find it
        if missing := _missing(groups):
            _compile_all(missing, progress)


def _missing(groups: Sequence[KernelGroup]) -> list[KernelGroup]:
    return [group for group in groups if not all([is_cached(kernel, group.sources) for kernel in group.kernels])]


def _compile_all(missing: Sequence[KernelGroup], progress: Callable[[str], None]) -> None:
    start, compiled, one_at_a_time = time.perf_counter(), [], threading.Lock()

    def tell(kernel: str) -> None:
        with one_at_a_time:
            compiled.append(kernel)
            progress(f"compiling kernels: {kernel}")

    print("compiling kernels, once on this machine: up to a minute", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda group: _compile(group, tell), missing))
    kept = os.path.commonpath([kernel.stats.cache_path for group in missing for kernel in group.kernels])
    done = f"compiled {len(compiled)} kernels in {time.perf_counter() - start:.0f} s"
    print(f"{done} (first use; kept in {kept})", file=sys.stderr, flush=True)


def _compile(group: KernelGroup, tell: Callable[[str], None]) -> None:
    ends = partial(end_with_parent, os.getpid())
    with subprocess.Popen(group.words, stdout=subprocess.PIPE, text=True, preexec_fn=ends) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tell(line.strip())
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, group.words)


def tell_what_is_compiled() -> None:
    """Print the name of each kernel that this process begins to compile, but not of what is compiled for it."""
    from numba.core import event

    class Teller(event.Listener):
        depth = 0

        def on_start(self, event: Any) -> None:
            if not self.depth:
                print(event.data["dispatcher"].py_func.__name__, flush=True)
            self.depth += 1

        def on_end(self, event: Any) -> None:
            self.depth -= 1

    event.register("numba:compile", Teller())
