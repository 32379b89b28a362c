"""Files that are read within limits, and written whole or not at all: replaced by rename, or grown by whole pieces."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rlhfuse.base.errors import InputError, writing

UNDER_WAY, REPLACED = ".under-way", ".replaced"  # ends of names that last as long as a write
MOST_BYTES = 1 << 30  # of a file that is read as a whole, and of a line of the others
CHECK = "check the path"


def user_cache() -> Path:
    """Folder of this user for what can be made again: ~/.cache/rlhfuse, or where XDG_CACHE_HOME says."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhfuse"


def is_listed(path: str | Path) -> bool:
    """Whether its folder has this name, be it of a link to nothing: then reading it says so. Raises InputError."""
    try:
        return bool(os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # a folder without permission, a name that the system cannot have
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; {CHECK}") from None


def open_file(path: str | Path, fix: str = CHECK) -> IO[bytes] | gzip.GzipFile:
    """The bytes of a file, unpacked where its name ends in .gz.

    Raises InputError, also for what is no regular file: devices have no end, and a pipe may never have a writer.
    """
    try:
        mode = os.stat(path).st_mode
        why = "it is a folder" if stat.S_ISDIR(mode) else "" if stat.S_ISREG(mode) else "it is no regular file"
        if not why:
            return gzip.open(path) if str(path).endswith(".gz") else open(path, "rb")
    except FileNotFoundError:
        told = f"is a link to {os.readlink(path)}, which does not exist" if os.path.islink(path) else "does not exist"
        raise InputError(f"{path} {told}; {fix}") from None
    except (OSError, ValueError) as error:  # ValueError: a name that the system cannot have
        why = getattr(error, "strerror", None) or str(error)
    raise InputError(f"cannot read {path}: {why}; {fix}")


def _decode(data: bytes, path: str | Path, line: int = 1) -> str:
    """Text of a whole file, or of its `line`."""
    try:
        return data.decode("utf-8-sig")  # a byte order mark is not part of the text
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = line + before.count(b"\n"), error.start - (before.rfind(b"\n") + 1)
        raise InputError(
            f"{path}:{line}: not UTF-8 (byte 0x{data[error.start]:02x} at {column}); convert the file, e.g. with iconv"
        ) from None


def read_text(path: str | Path, fix: str = CHECK) -> str:
    """A whole UTF-8 file. Raises InputError naming the file, what is wrong with it, and the fix."""
    with open_file(path, fix) as stream:
        try:
            data = stream.read(MOST_BYTES + 1)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}; {fix}") from None
    if len(data) > MOST_BYTES:
        raise InputError(f"{path} is larger than {MOST_BYTES} bytes; {fix}")
    return _decode(data, path)


def read_lines(path: str | Path, fix: str = CHECK, finished: bool = False) -> Iterator[tuple[int, str]]:
    """(number from 1, text with its end) of each line of a UTF-8 file, one in memory at a time.

    `finished`: without a last one that has no end, as a killed program leaves it. Raises InputError as `read_text`
    does, naming the line.
    """
    with open_file(path, fix) as stream:
        try:
            for number, line in enumerate(iter(lambda: stream.readline(MOST_BYTES + 1), b""), start=1):
                if len(line) > MOST_BYTES:
                    raise InputError(f"{path}:{number} is longer than {MOST_BYTES} bytes; {fix}")
                if line.endswith(b"\n") or not finished:
                    yield number, _decode(line, path, number)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(f"{path} is not a whole gzip file ({error}); make it again") from None
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}; {fix}") from None


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
    beside = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}{UNDER_WAY}"
    try:
        with writing(path, "give the path of a file in a writable folder"):
            with open(beside, "xb") as file:  # with the mode that the umask leaves
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(beside, path)
            if durable:
                sync(path.parent)
    finally:
        with suppress(OSError):  # its folder may be missing
            beside.unlink()


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AppendFile:
    """Appends lines to `path`, which is made if it is not there; what lies behind `keep_bytes`, of a run that died, is
    dropped first, and half a line before. All methods raise InputError naming the file and the fix."""

    def __init__(self, path: str | Path, keep_bytes: int | None = None) -> None:
        self.path = Path(path)
        with writing(self.path):
            self._stream = open(self.path, "ab", buffering=0)  # a buffer would try again, at a time of its own
            self._stream.truncate(self.path.read_bytes()[:keep_bytes].rfind(b"\n") + 1)

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
            for written in (*fresh.rglob("*"), fresh):
                sync(written)
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
