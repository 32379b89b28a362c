"""Decode steps recorded once and replayed: a CUDA graph for each shape, so that the host launches one thing per step.

Shapes are rounded up so that few occur (tasks/decode_shapes.py). All graphs share one memory pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhfuse.base.clock import Clock
from rlhfuse.gen.core.draws import DrawBatch
from rlhfuse.gen.core.forward_batch import ForwardBatch
from rlhfuse.gen.gpu.draws import DrawInputs, draw_array
from rlhfuse.tasks.decode_shapes import rounded_rows, rounded_width


class DecodeShape(NamedTuple):
    rows: int  # sequences
    width: int  # columns of the block tables
    draws: int = DrawInputs.columns(0)  # integers of a row's draw

    @staticmethod
    def holding(sequences: int, blocks: int, most_sequences: int, most_blocks: int, block_tokens: int) -> DecodeShape:
        """The smallest shape for so many sequences of at most `blocks` blocks; beyond the `most_` only if they are."""
        return DecodeShape(rounded_rows(sequences, most_sequences), rounded_width(blocks, most_blocks, block_tokens))


class DecodeInputs(NamedTuple):
    """Integers of a step of one shape, int32 on the device: the next step of this shape overwrites their memory."""

    facts: Tensor  # [3, rows]: tokens, ~i until `feed` has put the i-th draw of the step before there; positions; slots
    draws: Tensor  # [integers of a row's draw, rows], as DrawInputs.packed
    contexts: Tensor  # [rows]: tokens of each sequence
    tables: Tensor  # [rows, width] cache blocks; those past a context are never looked at


def padded_arrays(
    batch: ForwardBatch, draws: DrawBatch, shape: DecodeShape, spare_block: int, block_tokens: int
) -> list[np.ndarray]:
    """DecodeInputs of a batch of sequences that decode, with padding rows, in host memory."""
    # Padding is token 0 at position 0, in a spare block that no sequence ever gets; what it reads is of no interest.
    rows = len(batch.tokens)
    assert len(batch.contexts) == rows <= shape.rows, f"{rows} tokens of {len(batch.contexts)} sequences, not {shape}"
    tables = np.full((shape.rows, shape.width), spare_block, np.int32)
    tables[:rows, : batch.tables.shape[1]] = batch.tables
    contexts = np.ones(shape.rows, np.int32)
    contexts[:rows] = batch.contexts
    facts = np.zeros((3, shape.rows), np.int32)
    facts[2] = spare_block * block_tokens
    facts[:, :rows] = batch.tokens, batch.positions, batch.slots
    return [facts, draw_array(draws, batch.draw_rows, shape.rows), contexts, tables]


class Staging:
    """Page-locked host memory through which a step's integers reach the device in one copy that nobody waits for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.int32)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def send(self, arrays: list[np.ndarray], target: Tensor | None = None) -> list[Tensor]:
        """The arrays as int32 on the device, side by side in `target` or a new tensor; they may change at once."""
        sizes = [array.size for array in arrays]
        total = sum(sizes)
        if self._copied is not None:
            self._copied.synchronize()  # the copy before this one still reads the host memory
        if total > self._host.numel():
            self._host = torch.empty(2 * total, dtype=torch.int32, pin_memory=self._copied is not None)
        np.concatenate([array.reshape(-1) for array in arrays], out=self._host.numpy()[:total], casting="same_kind")
        if target is None:
            target = torch.empty(total, dtype=torch.int32, device=self._device)
        target.copy_(self._host[:total], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        return [part.view(array.shape) for part, array in zip(target.split(sizes), arrays)]


class CudaRecorder:
    """Turns work on fixed memory into something that does it again: CUDA graphs of one device, in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """What repeats `work`, which is run while recording, once for real."""
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
        """Give back the memory of what was recorded; the caller has dropped all of it."""
        torch.cuda.synchronize(self._device)  # no replay may still be running in the memory that is given back
        self._pool = None


class DecodeGraphs:
    """The recorded decode steps of one model over one cache.

    A graph knows memory by its address, and is dropped when weights, cache or its input moved. NCCL's sums are captured
    too, so all ranks must capture and replay in one order: the ranks of an engine take identical steps.
    """

    def __init__(self, recorder: CudaRecorder | None, device: torch.device) -> None:
        """`recorder` None: steps are launched one by one, and nothing is recorded."""
        self._recorder, self._device = recorder, device
        self._recorded: dict[DecodeShape, tuple[Tensor, Callable[[], None]]] = {}  # memory of its inputs, replay
        self._addresses: tuple[int, ...] = ()
        self.recording_seconds, self.recorded_shapes = 0.0, 0  # since the beginning

    def keep_for(self, addresses: tuple[int, ...]) -> None:
        """Drop everything unless it was recorded over memory at these addresses."""
        if addresses != self._addresses:
            self.release()
            self._addresses = addresses

    def run(
        self, shape: DecodeShape, arrays: list[np.ndarray], staging: Staging, work: Callable[[DecodeInputs], None]
    ) -> None:
        """Launch one step; records a new shape first.

        `work` must allocate nothing that outlives it, read nothing back, and write only what it would write again.
        """
        if self._recorder is None:
            return work(DecodeInputs(*staging.send(arrays)))
        packed, replay = self._recorded.get(shape, (None, None))
        if packed is None:
            packed = torch.empty(sum(array.size for array in arrays), dtype=torch.int32, device=self._device)
        inputs = DecodeInputs(*staging.send(arrays, packed))
        if replay is None:
            with Clock().work() as recording:
                replay = self._recorder.record(lambda: work(inputs))
            self._recorded[shape] = packed, replay
            self.recording_seconds += recording.seconds
            self.recorded_shapes += 1
        replay()

    def release(self) -> None:
        """Drop all graphs and their memory."""
        if self._recorder is not None and self._recorded:
            self._recorded.clear()
            self._recorder.release()
        self._addresses = ()
