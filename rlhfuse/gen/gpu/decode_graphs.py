"""Decode steps recorded once and replayed: a CUDA graph for each shape, so that the host launches one thing per step.

    first step of a shape    run it on a side stream (kernels load, libraries choose and allocate), then capture it
    later steps              copy the integers into the captured input, replay, read the captured output

A graph knows memory by its address. It serves while weights, cache and its own input lie where they lay, whatever
their values, and is dropped when one of them moved. All graphs share one memory pool and one buffer of logits, which
the next step overwrites: on one stream that is after everything that was queued to read it. Graphs hand nothing to
each other through the pool, so they may be replayed in any order.

Under tensor parallelism the sums over ranks are captured too. NCCL needs all ranks to capture and replay in the same
order: ranks of one engine take identical steps, so they meet a new shape in the same step. Knows nothing of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlhfuse.gen.gpu.decode_inputs import DecodeInputs, DecodeShape, Staging


class Recorder(Protocol):
    """Turns work on fixed memory into something that does it again."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What repeats `work`. `work` may be run while recording, any number of times, also none."""

    def release(self) -> None:
        """Give back the memory of what was recorded; the caller has dropped all of it."""


class CudaRecorder:
    """Records CUDA graphs of one device into one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: tuple[int, int] | None = None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            # On the stream of the capture, so that what libraries allocate per stream lies outside the pool.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                work()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # thread_local: another thread may be loading the weights of a frozen model meanwhile, and NCCL's
                # watchdog queries events; neither touches this stream.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    work()
            except BaseException:
                self._pool = None  # torch refuses a pool that has no graph, as this one may now
                raise
        return graph.replay

    def release(self) -> None:
        torch.cuda.synchronize(self._device)  # no replay may still be running in the memory that is given back
        self._pool = None


@dataclass(frozen=True, eq=False)
class _Recorded:
    inputs: DecodeInputs
    replay: Callable[[], None]


class DecodeGraphs:
    """The recorded decode steps of one model over one cache."""

    def __init__(self, recorder: Recorder, device: torch.device, most_rows: int, vocab: int) -> None:
        self._recorder, self._device = recorder, device
        self._logits_shape = (most_rows, vocab)
        self._logits: Tensor | None = None
        self._recorded: dict[DecodeShape, _Recorded] = {}
        self._addresses: tuple[int, ...] = ()
        self.recording_seconds = 0.0  # since the beginning

    @property
    def shapes(self) -> tuple[DecodeShape, ...]:
        """What is recorded now."""
        return tuple(self._recorded)

    def keep_for(self, addresses: tuple[int, ...]) -> None:
        """Drop everything unless it was recorded over memory at these addresses."""
        if addresses != self._addresses:
            self.release()
            self._addresses = addresses

    def run(
        self, shape: DecodeShape, arrays: list[np.ndarray], staging: Staging, decode: Callable[[DecodeInputs], Tensor]
    ) -> Tensor:
        """Logits [shape.rows, vocab] float32 of one step, valid until the next; records a new shape first.

        `decode` [rows, at least vocab] must allocate nothing that outlives it, read nothing back, and write only
        what it would write again.
        """
        if self._logits is None:
            self._logits = torch.empty(self._logits_shape, dtype=torch.float32, device=self._device)
        logits, vocab = self._logits[: shape.rows], self._logits.shape[1]
        recorded = self._recorded.get(shape)
        inputs = recorded.inputs if recorded else DecodeInputs.empty(shape, self._device)
        staging.send(arrays, inputs.packed)
        if recorded is None:
            start = time.perf_counter()
            replay = self._recorder.record(lambda: _copy(decode(inputs)[:, :vocab], logits))
            recorded = self._recorded[shape] = _Recorded(inputs, replay)
            self.recording_seconds += time.perf_counter() - start
        recorded.replay()
        return logits

    def release(self) -> None:
        """Drop all graphs, their memory and the logits."""
        if self._recorded:
            self._recorded.clear()
            self._recorder.release()
        self._logits = None
        self._addresses = ()


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
