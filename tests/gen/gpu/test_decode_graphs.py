"""The order of calls by which a CUDA graph is captured, over doubles of torch.cuda's objects."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rlhfuse.gen.gpu.decode_graphs import CudaRecorder


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class Cuda:
    """Writes down what would happen on the device, in order; each method stands for torch.cuda's of that name."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pools = 0
        self.now = self.main = Stream("main", self.log)

    def current_stream(self) -> Stream:
        return self.main

    @contextmanager
    def stream(self, which: Stream):
        before, self.now = self.now, which
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def graph(self, graph, pool=None, stream=None, capture_error_mode="global"):
        self.log.append(f"capture in pool {pool} on {stream.name}, {capture_error_mode}")
        try:
            with self.stream(stream):
                yield
        finally:
            self.log.append("captured")

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def synchronize(self, device) -> None:
        self.log.append("synchronize")


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    found = Cuda()
    for name in ("current_stream", "stream", "graph", "graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", found.log))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: found.log.append("replay")))
    monkeypatch.setattr(torch.cuda, "device", lambda device: found.stream(found.now))
    return found


def test_a_plain_run_on_the_side_stream_then_the_capture(cuda):
    recorder = CudaRecorder(torch.device("cuda"))
    replay = recorder.record(lambda: cuda.log.append(f"work on {cuda.now.name}"))
    assert cuda.log == [
        "side waits for main",
        "work on side",
        "main waits for side",
        "capture in pool 1 on side, thread_local",
        "work on side",
        "captured",
    ]
    replay()
    assert cuda.log[-1] == "replay"


def test_graphs_share_a_pool_until_they_are_given_back(cuda):
    recorder = CudaRecorder(torch.device("cuda"))
    recorder.record(lambda: None)
    recorder.record(lambda: None)
    recorder.release()
    assert cuda.log[-1] == "synchronize"
    recorder.record(lambda: None)
    pools = [f"capture in pool {pool} on side, thread_local" for pool in (1, 1, 2)]
    assert [line for line in cuda.log if "pool" in line] == pools


def test_a_capture_that_fails_is_told_and_the_next_takes_a_new_pool(cuda):
    recorder, runs = CudaRecorder(torch.device("cuda")), []

    def fails_when_captured() -> None:
        runs.append(cuda.now)
        if len(runs) == 2:
            raise RuntimeError("not permitted while capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(fails_when_captured)
    assert cuda.log[-1] == "captured" and cuda.now is cuda.main
    recorder.record(lambda: None)
    assert cuda.pools == 2
