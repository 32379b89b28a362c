"""The order of calls by which a CUDA graph is captured, over doubles of torch.cuda's objects."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rlhfuse.gen.gpu.decode_graphs import CudaRecorder


class Device:
    """What would happen there, in order: `log`; `streams`: those of the `with`s we are in."""

    def __init__(self) -> None:
        self.log, self.streams, self.pools = [], ["main"], 0

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"))

    @contextmanager
    def on(self, which):
        self.streams.append(which.name)
        try:
            yield
        finally:
            self.streams.pop()

    @contextmanager
    def capture(self, graph, pool=None, stream=None, capture_error_mode="global"):
        self.log.append(f"capture in pool {pool} on {stream.name}, {capture_error_mode}")
        try:
            with self.on(stream):
                yield
        finally:
            self.log.append("captured")

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    def work(self) -> None:
        self.log.append(f"work on {self.streams[-1]}")


@pytest.fixture
def device(monkeypatch) -> Device:
    found = Device()
    doubles = dict(
        Stream=lambda device: found.stream("side"),
        current_stream=lambda: found.stream("main"),
        stream=found.on,
        device=lambda device: found.on(found.stream("main")),
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: found.log.append("replay")),
        graph=found.capture,
        graph_pool_handle=found.new_pool,
        synchronize=lambda device: found.log.append("synchronize"),
    )
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    return found


@pytest.fixture
def recorder(device) -> CudaRecorder:
    return CudaRecorder(torch.device("cuda"))


def test_a_plain_run_on_the_side_stream_then_the_capture(device, recorder):
    replay = recorder.record(device.work)
    replay()
    assert device.log == [
        "side waits for main",
        "work on side",
        "main waits for side",
        "capture in pool 1 on side, thread_local",
        "work on side",
        "captured",
        "replay",
    ]


def test_graphs_share_a_pool_until_they_are_given_back_or_a_capture_fails(device, recorder):
    def fails_when_captured() -> None:
        if "capture" in device.log[-1]:
            raise RuntimeError("not permitted while capturing")

    for work in (device.work, device.work):
        recorder.record(work)
    recorder.release()
    assert device.log[-1] == "synchronize"
    recorder.record(device.work)
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(fails_when_captured)
    assert device.log[-1] == "captured" and device.streams == ["main"]
    recorder.record(device.work)
    pools = [line.split()[3] for line in device.log if line.startswith("capture in pool")]
    assert pools == ["1", "1", "2", "2", "3"]
