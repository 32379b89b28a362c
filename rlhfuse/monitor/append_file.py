"""A file that grows by whole pieces: one that finds no room leaves the file as it was before.

Knows nothing of what is in it.
"""

from __future__ import annotations

import os
from pathlib import Path

from rlhfuse.errors import InputError, writing


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
