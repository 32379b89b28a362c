"""Shapes of decode steps, their padding, the one copy that carries their integers; and the order of calls by which a
CUDA graph is captured, over doubles of torch.cuda's objects."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.draw_batches import draw_batch
from testkit.profiles import examples

from rlhfuse.gen.core.forward_batch import ForwardBatch
from rlhfuse.gen.gpu.decode_graphs import CudaRecorder, DecodeInputs, DecodeShape, Staging, padded_arrays
from rlhfuse.gen.gpu.draws import DrawInputs

CPU = torch.device("cpu")


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


def decode_batch(contexts: list[int], block_tokens: int) -> ForwardBatch:
    """One token of each sequence; the blocks of sequence s are 10 s, 10 s + 1, ..."""
    ends = np.array(contexts)
    blocks = -(-ends // block_tokens)
    tables = np.zeros((len(contexts), blocks.max()), np.int32)
    for s, count in enumerate(blocks):
        tables[s, :count] = 10 * s + np.arange(count)
    positions = ends - 1
    slots = tables[np.arange(len(ends)), positions // block_tokens].astype(np.int64) * block_tokens
    slots += positions % block_tokens
    rows = np.arange(len(ends))
    return ForwardBatch(rows + 100, positions, slots, np.arange(len(ends) + 1), ends, tables, rows)


@examples(100)
@given(st.integers(1, 600), st.integers(1, 600), st.sampled_from([1, 16, 256, 512]))
def test_a_shape_holds_its_batch_wastes_little_and_is_its_own_shape(sequences, context, block_tokens):
    most_rows, most_blocks = 600, -(-600 // block_tokens)
    blocks = -(-context // block_tokens)
    shape = DecodeShape.holding(sequences, blocks, most_rows, most_blocks, block_tokens)
    assert sequences <= shape.rows <= min(max(2 * sequences - 1, 1), sequences + 15, most_rows)
    assert blocks <= shape.width <= most_blocks
    assert shape.width * block_tokens <= max(2 * context, 256) + block_tokens
    assert DecodeShape.holding(shape.rows, shape.width, most_rows, most_blocks, block_tokens) == shape


def test_there_are_few_shapes():
    shapes = {DecodeShape.holding(s, b, 256, 256, 16) for s in range(1, 257) for b in range(1, 257)}
    assert len({shape.rows for shape in shapes}) == 20 and len({shape.width for shape in shapes}) == 5


@examples(100)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=9), st.sampled_from([4, 16]), st.integers(0, 5))
def test_padding_lies_in_the_spare_block_alone(contexts, block_tokens, more_rows):
    batch, spare = decode_batch(contexts, block_tokens), 1000
    shape = DecodeShape(len(contexts) + more_rows, batch.tables.shape[1] + 3)
    draws = draw_batch([{"top_p": 0.3, "banned": (i,)} for i in range(len(contexts))])
    inputs = DecodeInputs(*Staging(CPU).send(padded_arrays(batch, draws, shape, spare, block_tokens)))
    assert {part.dtype for part in inputs} == {torch.int32} and inputs.draws.shape == (shape.draws, shape.rows)
    assert inputs.facts.shape == (3, shape.rows) and inputs.tables.shape == (shape.rows, shape.width)
    tokens, positions, slots = inputs.facts
    real = len(contexts)
    for found, wanted in ((tokens, batch.tokens), (positions, batch.positions), (slots, batch.slots)):
        assert np.array_equal(found[:real], wanted)
    assert np.array_equal(inputs.contexts[:real], batch.contexts)
    assert np.array_equal(inputs.tables[:real, : batch.tables.shape[1]], batch.tables)
    assert (slots[real:] // block_tokens == spare).all() and (slots[:real] // block_tokens != spare).all()
    assert (inputs.tables[real:] == spare).all() and (inputs.contexts[real:] == 1).all()
    assert not tokens[real:].any() and not positions[real:].any()
    places, found = DrawInputs(shape.rows, inputs.draws.flatten()).unpack()
    assert places.tolist() == list(range(real)), "padding draws nothing"
    for name, wanted in vars(draws).items():
        assert wanted is getattr(found, name) is None or np.array_equal(getattr(found, name), wanted), name


def test_a_batch_with_a_chunk_is_no_decode_step():
    batch = decode_batch([3, 5], 4)
    chunk = ForwardBatch(**{**vars(batch), "tokens": np.arange(5), "query_starts": np.array([0, 3, 5])})
    with pytest.raises(AssertionError, match="5 tokens of 2 sequences"):
        padded_arrays(chunk, draw_batch([{}] * 2), DecodeShape(8, 4), 9, 4)


def test_staging_carries_any_arrays_into_new_or_given_memory():
    staging = Staging(CPU)
    first = staging.send([np.arange(6).reshape(2, 3), np.array([7], np.int32)])
    target = torch.zeros(9, dtype=torch.int32)
    staging.send([np.arange(9) * 2], target)
    assert [part.tolist() for part in first] == [[[0, 1, 2], [3, 4, 5]], [7]], "a later send reached into what was sent"
    assert target.tolist() == list(range(0, 18, 2))
