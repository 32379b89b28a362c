"""One GPU that computes nothing: what torch asks of CUDA, answered, and what of torch stands in a fake tensor's way.

All names of torch that the rehearsal replaces are replaced here, for the rest of the process. They are those of one
minor version of torch (shim.py), whose shim must be loaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch
from rehearsal.fused import attend_as_flash, norm_as_fused
from rehearsal.memory import DEVICE
from rehearsal.tensors import CUDA, FakeCuda
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

CARD = SimpleNamespace(name="rehearsal", major=9, minor=0, multi_processor_count=132, warp_size=32)
CARD_BYTES = 80_000_000_000
LOADERS = ("weight-loader", "weight-mover")  # threads that launch work on the device: they run when they are started


class _Done:
    """Whatever is launched or waited for is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def _pass(self, *_: Any) -> None:
        pass

    synchronize = _pass

    def query(self) -> bool:
        return True


class _Block(_Done, contextlib.ContextDecorator):
    """torch.cuda.stream, device and graph."""


class Event(_Done):
    record = wait = _Done._pass

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Stream(_Done):
    cuda_stream, device, device_index = 0, CUDA, 0

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream), f"a stream was to be waited for, not {stream!r}"

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event), f"an event was to be waited for, not {event!r}"

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Graph(_Done):
    """What was recorded has run; its replay is nothing."""

    replay = reset = _Done._pass

    def pool(self) -> tuple[int, int]:
        return 0, 1


def install(mode: FakeCuda) -> None:
    """Give this process its GPU, whose tensors are those of `mode`."""
    _answer_for_cuda(mode)
    _let_fakes_pass(mode)
    _count_resizing(mode)
    _run_loaders_at_once(mode)
    torch.distributed.Work.is_completed = lambda self: True  # type: ignore[method-assign]  # a send is done at once
    torch.distributed.broadcast_object_list = lambda *_, **__: None  # rank 0 would say what this rank says
    torch.nn.functional.scaled_dot_product_attention = attend_as_flash()
    torch.nn.functional.rms_norm = norm_as_fused
    if importlib.util.find_spec("triton"):
        from rehearsal.launches import count_launches

        count_launches(mode)


def _answer_for_cuda(mode: FakeCuda) -> None:
    meter, default = mode.meter, Stream()
    answers: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: default,
        "default_stream": lambda device=None: default,
        "set_stream": lambda stream: None,
        "stream": _Block,
        "device": _Block,
        "graph": _Block,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: CARD.name,
        "get_device_capability": lambda device=None: (CARD.major, CARD.minor),
        "get_device_properties": lambda device=None: CARD,
        "memory_allocated": lambda device=None: meter.now[DEVICE],
        "max_memory_allocated": lambda device=None: meter.peak[DEVICE],
        "memory_reserved": lambda device=None: meter.now[DEVICE],
        "max_memory_reserved": lambda device=None: meter.peak[DEVICE],
        "reset_peak_memory_stats": lambda device=None: meter.reset(),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
        "check_error": lambda code: None,
        "set_sync_debug_mode": lambda mode: None,
        "mem_get_info": lambda device=None: (CARD_BYTES - meter.now[DEVICE], CARD_BYTES),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.backends.cuda.is_flash_attention_available = lambda: True
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign]


def _let_fakes_pass(mode: FakeCuda) -> None:
    FakeTensorMode.avoid_device_init = True  # type: ignore[assignment]  # though there is a device
    fake_tensor.init_gpu_context = lambda device: None
    fake_tensor.CONSTANT_NUMEL_LIMIT = -1  # values are kept as shadows
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):  # or Adam goes another way than on CUDA
        sys.modules[name]._foreach_supported_types.append(FakeTensor)
    torch._C._set_only_lift_cpu_tensors(True)
    torch.nn.Module._apply = lambda self, fn, recurse=True: _apply(self, fn, mode)  # type: ignore[method-assign]
    register = torch.nn.Module.register_parameter

    def register_parameter(self: Any, name: str, weight: Any) -> None:
        """A weight that is built in host memory may be put on the device in place, which only a fake one survives."""
        kept: Any = weight
        if weight is not None and not isinstance(weight, FakeTensor) and weight.device.type == "cpu":
            kept = _with_notes(torch.nn.Parameter(mode.on_host(weight), weight.requires_grad), weight)
        register(self, name, kept)

    torch.nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    data = torch.Tensor.data

    def set_data(self: Any, value: Tensor) -> None:
        data.__set__(self, value)  # type: ignore[attr-defined]
        if isinstance(value, FakeTensor):  # it may be on another device
            self._fake_device, self._shadow = value._fake_device, getattr(value, "_shadow", None)

    FakeTensor.data = property(lambda self: data.__get__(self), set_data)  # type: ignore[attr-defined]
    # any number does that is its own and lies as memory does
    FakeTensor.data_ptr = lambda self: (self.untyped_storage()._cdata << 12) + self.storage_offset() * self.itemsize
    plain_list, plain_tensor = torch.Tensor.tolist, torch.tensor

    def tolist(self: Tensor) -> Any:
        return plain_list(mode.host_waits(self) if isinstance(self, FakeTensor) else self)

    def tensor(values: Any, *args: Any, **kwargs: Any) -> Tensor:
        return plain_tensor(_read(values) if _holds_fakes(values) else values, *args, **kwargs)

    torch.Tensor.tolist = FakeTensor.tolist = tolist  # type: ignore[method-assign]
    torch.tensor = tensor  # type: ignore[assignment]


def _holds_fakes(values: Any) -> bool:
    return isinstance(values, FakeTensor) or isinstance(values, list | tuple) and any(map(_holds_fakes, values))


def _read(values: Any) -> Any:
    return [_read(value) for value in values] if isinstance(values, list | tuple) else float(values)


def _with_notes(weight: torch.nn.Parameter, former: torch.nn.Parameter) -> torch.nn.Parameter:
    """With what was noted on the weight that it stands for."""
    for name, noted in former.__dict__.items():
        if name not in weight.__dict__:
            setattr(weight, name, noted)
    return weight


def _apply(self: Any, fn: Any, mode: FakeCuda) -> Any:
    """As on CUDA a weight that moves keeps what was noted on it; torch would make another of a fake one."""
    for child in self.children():
        child._apply(fn)
    for key, weight in self._parameters.items():
        if weight is None:
            continue
        with torch.no_grad():
            moved = fn(weight)
        if moved is weight:
            continue
        fake = moved if isinstance(moved, FakeTensor) else mode.on_host(moved)
        self._parameters[key] = _with_notes(torch.nn.Parameter(fake, weight.requires_grad), weight)
    for key, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[key] = fn(buffer)
    return self


def _count_resizing(mode: FakeCuda) -> None:
    resize = torch.UntypedStorage.resize_

    def resize_(self: Any, nbytes: int) -> Any:
        key, out = self._cdata, resize(self, nbytes)
        mode.meter.resize(key, nbytes)
        return out

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]


def _run_loaders_at_once(mode: FakeCuda) -> None:
    """A thread of LOADERS has run when `start` returns: modes belong to a thread, and memory to no chance."""
    start, run = threading.Thread.start, threading.Thread.run

    def start_(self: threading.Thread) -> None:
        start(self)
        if self.name in LOADERS:
            self.join()

    def run_(self: threading.Thread) -> None:
        with mode if self.name in LOADERS else contextlib.nullcontext():
            run(self)

    threading.Thread.start, threading.Thread.run = start_, run_  # type: ignore[method-assign]
