"""A folder that appears whole or not at all: written beside its place, then renamed into it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhfuse.errors import InputError


def check_output_folder(path: str | Path, force: bool) -> None:
    """Raise InputError if `path` exists already (and `force` is not given) or is no folder."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise InputError(f"output {path} is a file; give the path of a folder")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise InputError(f"output folder {path} exists already; give another --out, or --force to replace it")


@contextmanager
def output_folder(path: str | Path, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `path`; on success it takes the place of `path`, on failure it is removed."""
    path = Path(path).absolute()
    check_output_folder(path, force)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (path.with_name(f".{path.name}.{os.getpid()}.{state}") for state in ("new", "old"))
    fresh.mkdir()
    try:
        yield fresh
        if path.exists():
            os.replace(path, old)
        os.replace(fresh, path)
    finally:
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)
