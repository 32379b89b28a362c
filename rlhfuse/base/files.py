"""Files and folders that are written whole or not at all: replaced by rename, or grown by whole pieces."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhfuse.base.errors import InputError, writing

UNDER_WAY, REPLACED = ".under-way", ".replaced"  # ends of names that last as long as a write


def write_text(path: str | Path, text: str, durable: bool = False) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode(), durable)


def write_json(path: str | Path, values: Any) -> None:
    """JSON with an entry a line, as `write_text`."""
    write_text(path, json.dumps(values, indent=1) + "\n")


def write_bytes(path: str | Path, data: bytes, durable: bool = False) -> None:
    """Write beside and rename; `durable`: on disk when this returns, and after a power cut old or new, but whole.

    Raises InputError when the folder is missing, not writable or full.
    """
    path = Path(path)
    with writing(path, "give a path in a writable folder"):
        descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNDER_WAY)
    try:
        with writing(path, "give the path of a file"):
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.chmod(beside, 0o644)
            os.replace(beside, path)
            if durable:
                sync(path.parent)
    except InputError:
        Path(beside).unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AppendFile:
    """Appends to `path`, which is made if it is not there. All methods raise InputError naming the file and the fix."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with writing(self.path):
            self._stream = open(self.path, "ab", buffering=0)  # a buffer would try again, at a time of its own

    def append(self, data: bytes) -> None:
        """All of `data`, or nothing; the system has it when this returns."""
        before = os.fstat(self._stream.fileno()).st_size
        try:
            with writing(self.path):
                rest = memoryview(data)
                while rest:  # a file that is nearly full takes a part and refuses the next
                    rest = rest[self._stream.write(rest) :]
        except InputError:
            self._stream.truncate(before)
            raise

    def cut(self, size: int) -> None:
        """Drop what lies behind the first `size` bytes."""
        with writing(self.path):
            self._stream.truncate(size)

    def position(self) -> int:
        """Bytes in the file, all of them on disk when this returns."""
        with writing(self.path):
            os.fsync(self._stream.fileno())
            return os.fstat(self._stream.fileno()).st_size

    def close(self) -> None:
        with writing(self.path):
            self._stream.close()


def check_output_folder(path: str | Path, force: bool) -> None:
    """Raise InputError if `path` is a file, or a folder with something in it that `force` does not allow to replace."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise InputError(f"output {path} is a file; give the path of a folder")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise InputError(f"output folder {path} exists already; give another --out, or --force to replace it")


@contextmanager
def output_folder(path: str | Path, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `path`; on success it takes the place of `path`, on disk; on failure it is removed.

    Raises InputError as `check_output_folder`, and where the system refuses.
    """
    path = Path(path).absolute()
    check_output_folder(path, force)
    fresh, old = (path.with_name(f".{path.name}.{os.getpid()}{state}") for state in (UNDER_WAY, REPLACED))
    with writing(path):
        fresh.mkdir(parents=True)
    try:
        yield fresh
        with writing(path):
            for one in (*fresh.rglob("*"), fresh):
                sync(one)
            if path.exists():
                os.replace(path, old)
            os.replace(fresh, path)
            sync(path.parent)
    finally:
        if old.exists() and not path.exists():
            os.replace(old, path)
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Clear `folder` of what `write_bytes` and `output_folder` left when they were killed; only where nobody writes.

    A folder that was to be replaced, but was not yet, gets its name back. Raises OSError.
    """
    for old in folder.glob(f".*{REPLACED}"):
        name = old.name.removeprefix(".").removesuffix(REPLACED).rpartition(".")[0]
        if not (folder / name).exists():
            os.replace(old, folder / name)
    for end in (UNDER_WAY, REPLACED):
        for left in folder.glob(f".*{end}"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
