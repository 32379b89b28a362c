"""Calls on a mesh against numbers worked out by hand, and when calls on overlapping meshes run."""

from __future__ import annotations

import pytest
from real.call_graph import GraphCall, graph_seconds, place_calls
from real.model_call import ModelCall

from rlhfuse.config.spec import HardwareSpec, ModelSpec, ParallelLayout
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.collectives import link_bandwidth, ring_all_reduce_seconds, ring_gather_seconds
from rlhfuse.errors import InputError

# 8 layers; a device does 1 TFLOP/s, reads 1 TB/s, sends 10 GB/s within a node of 4 and 1 GB/s beyond.
MACHINE = HardwareSpec("x", 1e12, 1e12, 1e12, 10e9, 1e9, 1e9, 0.0, devices_per_node=4)
SPEC = ModelSpec("llama", 8, 64, 4, 4, 16, 256, 512, 4096)


def call(layout: str, scalar: bool = True, recompute: bool = False, machine: HardwareSpec = MACHINE) -> ModelCall:
    return ModelCall(AnalyticCost(SPEC, ParallelLayout.parse(layout), machine, 2, scalar, recompute=recompute))


def test_rings_and_links():
    assert ring_all_reduce_seconds(8e9, 4, 10e9) == pytest.approx(2 * 3 / 4 * 0.8)
    assert ring_gather_seconds(8e9, 4, 10e9) == pytest.approx(3 / 4 * 0.8)
    assert ring_all_reduce_seconds(8e9, 1, 10e9) == 0
    assert link_bandwidth(MACHINE, 4) == 10e9 and link_bandwidth(MACHINE, 5) == 1e9


def layer(tokens: int, sequences: int) -> float:
    """Forward of one layer on one device, compute bound."""
    return (2 * SPEC.layer_parameters * tokens + 4 * 64 * tokens * (tokens / sequences + 1) / 2) / 1e12


def test_a_pipeline_of_micro_batches_fills_once():
    """24 samples of 1000 tokens on d2t1p4: 12 a replica, 3 passes of 4 micro-batches of 1; (4 + 3) stages of 2."""
    send = 1000 * 64 * 2 / 1e9  # hidden states, between nodes: 8 ranks
    stage = 2 * layer(1000, 1) + send
    assert call("d2t1p4").infer_seconds(24, 1000, passes=3) == pytest.approx(3 * (4 + 3) * stage)
    within = call("d1t1p4").infer_seconds(12, 1000, passes=3)
    assert within == pytest.approx(3 * 7 * (2 * layer(1000, 1) + send / 10))  # one node: its own links


def test_1f1b_with_its_bubble_recomputation_and_gradients():
    """8 samples, 2 steps, d2t1p2, 2 micro-batches of one sample: (2 + 2 - 1) stages of 4 layers, forward + backward."""
    plain, again = call("d2t1p2"), call("d2t1p2", recompute=True)
    stage, send = 4 * layer(1000, 1), 2 * 1000 * 64 * 2 / 10e9
    gradients = plain.gradient_seconds()
    assert plain.train_seconds(8, 1000, 2, 2) == pytest.approx(2 * (3 * (3 * stage + send) + gradients), rel=1e-3)
    assert again.train_seconds(8, 1000, 2, 2) == pytest.approx(2 * (3 * (4 * stage + send) + gradients), rel=1e-3)
    whole = plain.model.rank_parameters() * (4 + 2)  # gradients in float32, weights in bf16; a ring of two ranks
    assert gradients == pytest.approx(whole / 2 / 10e9)
    assert call("d1t1p2").gradient_seconds() == 0


def test_generation_decodes_pp_micro_batches_in_turn():
    """16 prompts on d1t1p2, one pass: two micro-batches of 8, each token of both costs both stages' time."""
    machine = HardwareSpec("x", 1e15, 1e12, 1e12, 1e15, 1e15, 1e9, 0.0, decode_layer_seconds=1e-3, call_seconds=5.0)
    made = call("d1t1p2", machine=machine)
    weights = SPEC.layer_parameters * 2 / 1e12
    keys = 8 * (100 + 50 / 2) * 2 * 64 * 2 / 1e12
    step = 2 * 4 * (1e-3 + weights + keys)
    assert made.generate_seconds(16, 100, 50) == pytest.approx(5 + 49 * step, rel=1e-3)
    twice = made.generate_seconds(32, 100, 50, passes=2) - 5
    assert twice == pytest.approx(2 * (made.generate_seconds(16, 100, 50) - 5))


def test_more_devices_and_graphs_never_cost_more():
    assert call("d2t1p1").infer_seconds(16, 500) < call("d1t1p1").infer_seconds(16, 500)
    unembedded = call("d1t1p1").infer_seconds(16, 500)
    assert call("d1t1p1", scalar=False).infer_seconds(16, 500) > unembedded


def test_calls_share_devices_and_wait_for_parents():
    """Two halves run side by side; a call on both waits for both (REAL, Algorithm 1)."""
    calls = (
        GraphCall("gen", (1, 2), 10.0),
        GraphCall("left", (1, 1), 3.0, ("gen",)),
        GraphCall("right", (2, 2), 5.0, ("gen",)),
        GraphCall("more", (1, 1), 1.0, ("gen",)),
        GraphCall("both", (1, 2), 2.0, ("left",)),
    )
    expected = {"gen": (0, 10), "left": (10, 13), "right": (10, 15), "more": (13, 14), "both": (15, 17)}
    assert place_calls(calls) == expected and graph_seconds(calls) == 17


@pytest.mark.parametrize(
    "calls, message",
    [
        ((GraphCall("a", (1, 1), 1.0), GraphCall("a", (1, 1), 1.0)), "same name"),
        ((GraphCall("a", (1, 1), 1.0, ("b",)),), "parent 'b' is no call"),
        ((GraphCall("a", (1, 1), 1.0, ("b",)), GraphCall("b", (1, 1), 1.0, ("a",))), "a, b wait for one another"),
    ],
)
def test_broken_graphs_are_refused(calls, message):
    with pytest.raises(InputError, match=message):
        place_calls(calls)
