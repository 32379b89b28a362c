"""The order of calls by which a CUDA graph is captured, over doubles of torch.cuda's objects."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from rlhfuse.gen.gpu.decode_graphs import CudaRecorder


class Cuda:
    """Writes down what would happen on the device, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pools = 0
        self.stream_now = "main"

    def install(self, monkeypatch) -> None:
        cuda = self

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                cuda.log.append(f"{self.name} waits for {other.name}")

        class CUDAGraph:
            def replay(self) -> None:
                cuda.log.append("replay")

        @contextmanager
        def stream(which):
            before, cuda.stream_now = cuda.stream_now, which.name
            yield
            cuda.stream_now = before

        @contextmanager
        def graph(graph, pool=None, stream=None, capture_error_mode="global"):
            cuda.log.append(f"capture in pool {pool} on {stream.name}, {capture_error_mode}")
            before, cuda.stream_now = cuda.stream_now, stream.name
            try:
                yield
            finally:
                cuda.stream_now = before
                cuda.log.append("captured")

        def pool_handle() -> int:
            self.pools += 1
            return self.pools

        @contextmanager
        def device(which):
            yield

        for name, double in (
            ("Stream", lambda device: Stream("side")),
            ("current_stream", lambda *_: Stream("main")),
            ("stream", stream),
            ("CUDAGraph", CUDAGraph),
            ("graph", graph),
            ("graph_pool_handle", pool_handle),
            ("device", device),
            ("synchronize", lambda device: self.log.append("synchronize")),
        ):
            monkeypatch.setattr(torch.cuda, name, double)


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    found = Cuda()
    found.install(monkeypatch)
    return found


def test_a_plain_run_on_the_side_stream_then_the_capture(cuda):
    recorder = CudaRecorder(torch.device("cuda"))
    replay = recorder.record(lambda: cuda.log.append(f"work on {cuda.stream_now}"))
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
    assert [line for line in cuda.log if "pool" in line] == [
        f"capture in pool {pool} on side, thread_local" for pool in (1, 1, 2)
    ]


def test_a_capture_that_fails_is_told_and_the_next_takes_a_new_pool(cuda):
    recorder, runs = CudaRecorder(torch.device("cuda")), []

    def fails_when_captured() -> None:
        runs.append(cuda.stream_now)
        if len(runs) == 2:
            raise RuntimeError("not permitted while capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(fails_when_captured)
    assert cuda.log[-1] == "captured" and cuda.stream_now == "main"
    recorder.record(lambda: None)
    assert cuda.pools == 2
