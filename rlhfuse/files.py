"""Files that are written whole or not at all: replaced by rename, or grown by whole pieces."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rlhfuse.errors import InputError, writing


def write_text(path: str | Path, text: str) -> None:
    """Write beside and rename. Raises InputError when the folder is missing, not writable or full."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write beside and rename. Raises InputError when the folder is missing, not writable or full."""
    path = Path(path)
    with writing(path, "give a path in a writable folder"):
        descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with writing(path, "give the path of a file"):
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.chmod(beside, 0o644)
            os.replace(beside, path)
    except InputError:
        os.unlink(beside)
        raise


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

    def position(self) -> int:
        """Bytes in the file, all of them on disk when this returns."""
        with writing(self.path):
            os.fsync(self._stream.fileno())
            return os.fstat(self._stream.fileno()).st_size

    def close(self) -> None:
        with writing(self.path):
            self._stream.close()
