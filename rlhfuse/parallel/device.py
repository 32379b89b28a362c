"""Which device and backend a run uses, and what stands in for CUDA where there is none.

Megatron-core asks torch.cuda for the current device and for CUDA tensors when it builds buffers and optimizers. On a
machine without CUDA `fake_cuda` answers with the CPU. No other file works around a missing GPU.
"""

from __future__ import annotations

import contextlib
import os
import resource
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rlhfuse.base.cuda_environment import QUEUES, has_gpu, set_cuda_environment
from rlhfuse.base.errors import InputError
from rlhfuse.parallel.shared_gpu import SHARED_GPU

INSTALLING = "docs/howto/install.md"


@dataclass(frozen=True)
class Device:
    """Where tensors live and how ranks talk."""

    torch_device: torch.device
    backend: str  # "nccl", "gloo", or SHARED_GPU

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def process_group(self) -> str:
        """What `init_process_group` is to make: with NCCL, CPU tensors travel over gloo."""
        return "cpu:gloo,cuda:nccl" if self.backend == "nccl" else self.backend

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def empty_cache(self) -> None:
        """Give freed memory back to the driver: NCCL, CUDA graphs and cuBLAS take theirs beside torch's allocator."""
        if self.is_cuda:
            torch.cuda.empty_cache()


def choose_device(wanted: str, local_rank: int, threads: int, share_gpu: bool = False) -> Device:
    """CUDA device `local_rank` with NCCL if wanted ("auto" takes it when present), else CPU with gloo.

    With `share_gpu` all ranks get the one CUDA device there is, and a process group that `shared_gpu.register` names.
    """
    if device_kind(wanted) == "cuda":
        count = torch.cuda.device_count()
        if share_gpu and count > 1:
            fix = "set CUDA_VISIBLE_DEVICES to one of them, or trainer.share_gpu=false"
            raise InputError(f"trainer.share_gpu=true is for one GPU, and {count} are visible; {fix}")
        index = 0 if share_gpu else local_rank
        if index >= count:
            share = "use trainer.share_gpu=true or" if count == 1 else "start one process per GPU or use"
            raise InputError(
                f"local rank {local_rank} has no GPU of its own ({count} here); {share} trainer.device=cpu"
            )
        give_streams_queues()
        torch.cuda.set_device(index)
        return Device(torch.device("cuda", index), SHARED_GPU if share_gpu else "nccl")
    torch.set_num_threads(threads)
    return Device(torch.device("cpu"), "gloo")


def device_kind(wanted: str) -> str:
    """ "cuda" or "cpu": what trainer.device is here; auto takes a GPU where there is one.

    Raises InputError with torch's reason for a GPU that it cannot use: a model meant for GPUs would train on the CPU.
    """
    if wanted == "cpu" or not (torch.cuda.is_available() or wanted == "cuda" or has_gpu(os.environ)):
        return "cpu"
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()  # is_available warns once a process, or not at all
            reason = "it found no device"
        except (RuntimeError, AssertionError) as error:  # an AssertionError from a build without CUDA
            reason = " ".join(str(error).split()).rstrip(".")
        mend = f"install a torch for this driver (TORCH_INDEX, see {INSTALLING}) or set trainer.device=cpu"
        raise InputError(f"trainer.device={wanted}, but torch {torch.__version__} reaches no GPU: {reason}; {mend}")
    return "cuda"


def give_streams_queues() -> None:
    """Let every CUDA stream have a hardware queue of its own, and kernels be there before they are launched.

    A receive that was posted waits in its stream. Were it to share a queue with the stream that computes what its
    sender waits for, neither would ever run.
    """
    if late := set_cuda_environment(os.environ):
        warnings.warn(
            f"{', '.join(late)} set after torch was imported, too late if CUDA has started: "
            "start with tools/train_ppo.py or export them (scripts/train_torchrun.sh does)",
            stacklevel=2,
        )
    queues = os.environ[QUEUES]
    if not queues.isdigit() or int(queues) < 8:
        raise InputError(f"{QUEUES}={queues} can deadlock pipelines that run in opposite directions; unset it")


class _CudaMeansCpu(TorchFunctionMode):
    """Sends tensors meant for CUDA to the CPU and lets CPU tensors name their CUDA type."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


@contextlib.contextmanager
def current_device_is_cpu() -> Iterator[None]:
    """Answer `torch.cuda.current_device` with the CPU: all that Megatron's layers ask while a model runs."""
    saved = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cuda.current_device = saved


@contextlib.contextmanager
def fake_cuda(device: Device) -> Iterator[None]:
    """Answer Megatron's questions about CUDA with the CPU while the context is open."""
    if device.is_cuda:
        yield
        return
    with current_device_is_cpu(), _CudaMeansCpu():
        yield


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as it may: every gloo group keeps some sockets open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
