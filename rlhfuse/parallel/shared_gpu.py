"""A process group for ranks that share one GPU: gloo, with every CUDA tensor copied through page-locked host memory.

NCCL takes one rank per GPU, and gloo alone sends and receives no CUDA tensors. Results are gloo's on CPU tensors, bit
for bit. Seconds mean nothing: ranks take turns on the device, and what leaves them crosses the host.
"""

# torch passes other arguments to a group, by position, than its stubs tell
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore

SHARED_GPU = "shared_gpu"  # the name of the backend
Start = Callable[[], dist.Work]


def is_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda


def register(stages: Callable[[Tensor], bool] = is_cuda) -> None:
    """Let `init_process_group(SHARED_GPU)` make such groups. `stages`: which tensors pass through host copies."""
    starter = Starter()

    def make(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> SharedGpuGroup:
        return SharedGpuGroup(store, rank, size, timeout, starter, stages)

    dist.Backend.register_backend(SHARED_GPU, make, devices=["cpu", "cuda"])


class Starter:
    """One thread that starts transfers in the order of issue, each once the device has written what it sends.

    It waits for the device alone, never for a peer: whatever order peers send in, none of them waits for this rank.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[torch.cuda.Event | None, Start, Future[dist.Work]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="shared-gpu-starter", daemon=True).start()

    def submit(self, written: torch.cuda.Event | None, start: Start) -> Future[dist.Work]:
        started: Future[dist.Work] = Future()
        self._jobs.put((written, start, started))
        return started

    def _run(self) -> None:
        while True:
            self._begin(*self._jobs.get())  # keeps nothing of a job that is done

    def _begin(self, written: torch.cuda.Event | None, start: Start, started: Future[dist.Work]) -> None:
        try:
            if written is not None:
                written.synchronize()
            started.set_result(start())
        except BaseException as error:  # raised where the work is waited for
            started.set_exception(error)


class StagedWork(dist.Work):
    """A transfer between host copies; `finish` brings what arrived to its tensors, where `wait` is called."""

    def __init__(self, started: Future[dist.Work], finish: Callable[[], None], receives: bool) -> None:
        super().__init__()
        self._started, self._finish, self._receives, self._done = started, finish, receives, False

    def is_completed(self) -> bool:
        """Whether nothing is left to do; a work that receives is only completed by `wait`."""
        started = self._started
        sent = not self._receives and started.done() and not started.exception() and started.result().is_completed()
        return self._done or sent

    def is_success(self) -> bool:
        return self.is_completed()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the transfer; then the current stream, which need not wait for the host, has the tensors."""
        if not self._done:
            work = self._started.result()
            work.wait() if timeout is None else work.wait(timeout)
            self._finish()
            self._finish, self._done = _nothing, True  # lets go of the host copies
        return True


class _Together(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True


class SharedGpuGroup(dist.ProcessGroup):
    """Two gloo groups: one for the host copies of CUDA tensors, one for CPU tensors, which it gets as they are.

    gloo matches collectives by their number in the group, and a staged one starts later than it is issued: in one
    group a CPU tensor's could overtake it on one rank and not on another.
    """

    _device_types = (torch.device("cpu"), torch.device("cuda"))  # what torch asks, such as to set a timeout

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        starter: Starter,
        stages: Callable[[Tensor], bool] = is_cuda,
    ) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]  # what a group written in Python calls
        self._plain: Any = ProcessGroupGloo(PrefixStore("host", store), rank, size, timeout)
        self._staged: Any = ProcessGroupGloo(PrefixStore("device", store), rank, size, timeout)
        self._starter, self._stages = starter, stages

    # what torch asks of a group

    def getBackendName(self) -> str:
        return SHARED_GPU

    def rank(self) -> int:
        return self._plain.rank()

    def size(self) -> int:
        return self._plain.size()

    def _set_group_name(self, name: str) -> None:  # torch's own keeps it in backends that this group has not
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _get_backend(self, device: torch.device) -> ProcessGroupGloo:
        return self._plain if device.type == "cpu" else self._staged

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        for group in (self._plain, self._staged):
            group._set_default_timeout(timeout)

    # point to point

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        if not self._stages(tensors[0]):
            return self._plain.send(tensors, dst, tag)
        hosts = self._to_host(tensors)
        return self._work(tensors, (), (), lambda: self._staged.send(hosts, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        if not self._stages(tensors[0]):
            return self._plain.recv(tensors, src, tag)
        hosts = [_host(tensor) for tensor in tensors]
        posted: Future[dist.Work] = Future()
        posted.set_result(self._staged.recv(hosts, src, tag))  # at once: it needs nothing of the device
        return self._work(tensors, tensors, hosts, None, posted)

    # collectives

    def broadcast(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        return self._in_place("broadcast", tensors, options)

    def allreduce(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        return self._in_place("allreduce", tensors, options)

    def allreduce_coalesced(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        return self._in_place("allreduce_coalesced", tensors, options)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *options: Any) -> dist.Work:
        if not self._stages(inputs[0]):
            return self._plain.allgather(outputs, inputs, *options)
        sent, arrived = self._to_host(inputs), [[_host(tensor) for tensor in one] for one in outputs]
        flat, hosts = ([tensor for one in lists for tensor in one] for lists in (outputs, arrived))
        return self._work(inputs, flat, hosts, lambda: self._staged.allgather(arrived, sent, *options))

    def all_gather_single(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        return self._into("_allgather_base", output, input, options)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        return self._into("_reduce_scatter_base", output, input, options)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> dist.Work:
        return _Together([self.all_gather_single(*pair, *options) for pair in zip(outputs, inputs)])

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> dist.Work:
        return _Together([self.reduce_scatter_single(*pair, *options) for pair in zip(outputs, inputs)])

    _allgather_base = all_gather_single  # the names until torch 2.12
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, *options: Any, **named: Any) -> dist.Work:
        return self._plain.barrier(*options, **named)

    # staging

    def _in_place(self, name: str, tensors: list[Tensor], options: tuple) -> dist.Work:
        if not self._stages(tensors[0]):
            return getattr(self._plain, name)(tensors, *options)
        hosts = self._to_host(tensors)
        return self._work(tensors, tensors, hosts, lambda: getattr(self._staged, name)(hosts, *options))

    def _into(self, name: str, output: Tensor, input: Tensor, options: tuple) -> dist.Work:
        if not self._stages(input):
            return getattr(self._plain, name)(output, input, *options)
        sent, arrived = self._to_host([input])[0], _host(output)
        return self._work([input], [output], [arrived], lambda: getattr(self._staged, name)(arrived, sent, *options))

    def _to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host copies that the current stream is writing."""
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("what ranks on one GPU exchange passes through the host and cannot be captured")
        with torch.no_grad():
            return [_host(tensor).copy_(tensor, non_blocking=True) for tensor in tensors]

    def _work(
        self,
        issued: Sequence[Tensor],
        tensors: Sequence[Tensor],
        hosts: Sequence[Tensor],
        start: Start | None,
        started: Future[dist.Work] | None = None,
    ) -> StagedWork:
        """A transfer that `start` begins, or that has `started`, and then fills `tensors` from `hosts`."""
        event = None
        if issued[0].is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(issued[0].device))
        if started is None:
            assert start is not None, "a transfer that has not started needs a start"
            started = self._starter.submit(event, start)

        def finish() -> None:
            if event is not None:  # the tensors may still be read by what was issued before, on another stream
                torch.cuda.current_stream(issued[0].device).wait_event(event)
            for tensor, host in zip(tensors, hosts):  # its allocator keeps page-locked memory until it has been read
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(host, non_blocking=True)

        return StagedWork(started, finish, bool(tensors))


def _host(tensor: Tensor) -> Tensor:
    """Unset host memory for it, contiguous, that another thread may write to."""
    with torch.inference_mode(False):
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _nothing() -> None:
    """What is left to finish once a work is done."""
