"""Makes torch find a CUDA device that computes nothing; to be called before torch is imported.

Torch's dispatcher, autograd with its thread of the device, and Triton's launcher in C run as they do on CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
SHIM = HERE.parents[1] / "tools" / "rehearsal" / "shim.cpp"
CARD = SimpleNamespace(name="null", major=9, minor=0, multi_processor_count=132, warp_size=32, total_memory=80 << 30)


def install() -> Any:
    """The library, whose `null_launches()` counts. Compiles it once a machine, for half a minute."""
    assert "torch" not in sys.modules, "torch has looked for devices already"
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is installed"
    torch_folder, folder = Path(spec.origin).parent, _compiled(Path(spec.origin).parent)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    os.environ.pop("TRITON_INTERPRET", None)  # which tests set
    ctypes.CDLL(str(torch_folder / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    library, _ = (ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL) for name in ("libnull.so", "libcuda.so.1"))
    library.null_launches.restype = ctypes.c_int64
    _answer_for_cuda()
    _give_triton_a_driver()
    return library


def _compiled(torch_folder: Path) -> Path:
    """A folder of the two libraries, in numba's cache or beside this file."""
    sources = HERE / "null_cuda.cpp", HERE / "null_driver.c"
    name = hashlib.sha256(b"".join(source.read_bytes() for source in (*sources, SHIM))).hexdigest()[:8]
    cache = Path(os.environ.get("NUMBA_CACHE_DIR") or HERE / "__pycache__")
    folder = cache / f"null-torch{importlib.metadata.version('torch')}-{name}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as made:
        headers = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
        words = ["g++", "-std=c++20", "-O2", *headers, sources[0], "-o", f"{made}/libnull.so"]
        driver = ["gcc", "-O2", "-Wl,-soname,libcuda.so.1", sources[1], "-o", f"{made}/libcuda.so.1"]
        for command in (words, driver):
            subprocess.run([*command, "-shared", "-fPIC"], check=True)
        os.symlink("libcuda.so.1", f"{made}/libcuda.so")
        with contextlib.suppress(OSError):  # another process may have compiled them meanwhile
            os.rename(made, folder)
    return folder


def _answer_for_cuda() -> None:
    import torch

    def giving(value: Any) -> Any:  # a function of its own each time: torch keeps tables of its functions
        return lambda *_, **__: value

    nothing = giving(None)
    stream = SimpleNamespace(cuda_stream=0, device_index=0, stream_id=0)
    stream.wait_stream = stream.wait_event = stream.synchronize = nothing
    event = SimpleNamespace(
        record=nothing, wait=nothing, synchronize=nothing, query=giving(True), elapsed_time=giving(0.0)
    )
    values: dict[Any, tuple[str, ...]] = {
        None: ("_lazy_init", "set_device", "synchronize", "empty_cache"),
        True: ("is_initialized", "is_available"),
        False: ("is_current_stream_capturing",),
    }
    answers = {name: giving(value) for value, names in values.items() for name in names}
    answers |= {name: giving(stream) for name in ("current_stream", "default_stream", "Stream")}
    answers |= dict(Event=giving(event), device_count=giving(1), current_device=giving(0))
    answers |= dict(get_device_capability=giving((9, 0)), get_device_properties=giving(CARD))
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.backends.cuda.is_flash_attention_available = giving(True)
    torch.Tensor.pin_memory = lambda self, device=None: self.clone()  # type: ignore[method-assign]


def _give_triton_a_driver() -> None:
    import torch
    import triton.backends.nvidia.driver as nvidia
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(
        SimpleNamespace(
            launcher_cls=nvidia.CudaLauncher,
            utils=nvidia.CudaUtils(),
            get_current_device=lambda: 0,
            get_current_stream=torch.cuda.current_device,  # 0 too
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_active_torch_device=lambda: torch.device("cuda", 0),
            get_device_interface=lambda: torch.cuda,
            map_python_to_cpp_type=nvidia.ty_to_cpp,
        )  # pyright: ignore[reportArgumentType]
    )
