"""Parked models come in one after the other while those that are there compute already.

    thread    | reference  | critic     | reward    |
    caller    | wait(0)    | reference scores | critic scores | reward scores

Knows nothing of what the models are for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from rlhfuse.parallel.offload import OffloadedWeights


class WeightLoader:
    """Loads `models` in order, once; for the next time there is a new loader."""

    def __init__(self, models: Sequence[OffloadedWeights], device: torch.device) -> None:
        self._models, self._device = models, device
        self._there = [threading.Event() for _ in models]
        self._failure: BaseException | None = None
        self.seconds = 0.0  # that the models loaded so far took, without gaps
        self._thread = threading.Thread(target=self._run, name="weight-loader", daemon=True)
        self._thread.start()

    def wait(self, index: int) -> None:
        """Until the model at this position can be used. Raises what loading raised."""
        self._there[index].wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Until all are there; afterwards they may be released. Raises what loading raised."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread begins on GPU 0
                with torch.cuda.stream(torch.cuda.Stream(self._device)):
                    self._load()
            else:
                self._load()
        except BaseException as failure:  # raised by the thread that waits
            self._failure = failure
        finally:
            for event in self._there:
                event.set()

    def _load(self) -> None:
        for model, there in zip(self._models, self._there):
            start = time.perf_counter()
            model.begin_load()
            model.finish_load()
            if self._device.type == "cuda":
                # the copy is queued before this stream, which has nothing else to do: the computing one goes on
                torch.cuda.current_stream(self._device).synchronize()
            self.seconds += time.perf_counter() - start
            there.set()
