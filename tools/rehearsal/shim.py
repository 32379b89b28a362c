"""A CUDA device that is there and does nothing, for a torch without CUDA: shim.cpp, compiled once on this machine.

It must be loaded before torch, which asks for such a device once, while it is imported; this file does not import it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import user_cache

SOURCE = Path(__file__).with_name("shim.cpp")
TORCH = "2.13"  # the minor version whose private names device.py and tensors.py use


def obstacle() -> str:
    """Why this machine cannot rehearse, with what would do: another torch, or no compiler; '' if it can."""
    version = importlib.metadata.version("torch")
    if not version.startswith(f"{TORCH}."):
        return f"a rehearsal is written for torch {TORCH}, and this is {version}; install torch {TORCH} (CPU)"
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return f"a rehearsal takes the place of torch's CUDA half, which {version} has; install its build for CPUs"
    if not _library().exists() and shutil.which("g++") is None:
        return "a rehearsal needs g++, once, to compile tools/rehearsal/shim.cpp; install it"
    return ""


def refuse_unless_possible() -> None:
    """Raise InputError where this machine cannot rehearse."""
    if why := obstacle():
        raise InputError(why)


def load_shim() -> None:
    """Make torch, which is not imported yet, find one CUDA device. Raises InputError where it cannot be compiled."""
    assert "torch" not in sys.modules, "torch has looked for devices already"
    refuse_unless_possible()
    library = _library()
    if not library.exists():
        _compile(library)
    ctypes.CDLL(str(_torch() / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is installed"
    return Path(spec.origin).parent


def _library() -> Path:
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:8]
    return _cache_folder(SOURCE) / f"shim-torch{importlib.metadata.version('torch')}-{source}.so"


def _cache_folder(source: Path) -> Path:
    """Where numba keeps what it compiles of a file: NUMBA_CACHE_DIR, __pycache__, or the user's."""
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(given)
    beside = source.parent / "__pycache__"
    if os.access(beside if beside.exists() else source.parent, os.W_OK):
        return beside
    return user_cache()


def _compile(library: Path) -> None:
    headers = [_torch() / "include", _torch() / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        words = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", *(f"-I{path}" for path in headers)]
        done = subprocess.run([*words, str(SOURCE), "-o", str(made)], capture_output=True, text=True)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise InputError(f"g++ cannot compile {SOURCE}: {first}")
        os.replace(made, library)  # another process may have been quicker
