"""The roofline's limits, its bytes counted by hand, and BS_max."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.sim_helpers import linear_cost

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.analytic_table import analytic_table
from rlhfuse.costs.hardware import hardware_by_name

LLAMA_13B = ModelSpec("llama", 40, 5120, 40, 40, 128, 13824, 32000, 4096)
H800 = hardware_by_name("h800")


def cost(layout: str = "d1t8p1", scalar: bool = False) -> AnalyticCost:
    return AnalyticCost(LLAMA_13B, ParallelLayout.parse(layout), H800, 2, scalar)


def test_a_small_decode_batch_is_flat_and_a_large_one_is_not():
    one = cost().decode_step_seconds(1, 200)
    assert cost().decode_step_seconds(2, 400) == pytest.approx(one, rel=0.02)
    assert cost().decode_step_seconds(512, 512 * 200) > 2 * one


@examples(50)
@given(st.integers(1, 400), st.integers(0, 200_000), st.integers(1, 50))
def test_work_never_gets_cheaper_as_it_grows(batch, context, more):
    assert cost().decode_step_seconds(batch + more, context) >= cost().decode_step_seconds(batch, context)
    assert cost().decode_step_seconds(batch, context + more) >= cost().decode_step_seconds(batch, context)
    assert cost().prefill_seconds(batch + more, 1) >= cost().prefill_seconds(batch, 1)


def test_weights_over_all_ranks_are_the_model():
    norms = 81 * 5120  # whole on each rank
    for layout, scalar in (("d1t1p1", False), ("d1t1p1", True), ("d1t2p1", False)):
        made = cost(layout, scalar)
        tp = made.layout.tp
        assert made.memory.parameters() * tp == LLAMA_13B.parameters(scalar) + (tp - 1) * norms
    fullest = 10 * LLAMA_13B.layer_parameters + LLAMA_13B.embedding_parameters + LLAMA_13B.hidden
    assert cost("d1t1p4").memory.parameters() == fullest  # the last stage: layers, norm and output layer
    assert cost("d1t1p4").memory.weights_bytes() == 2 * fullest
    assert cost("d1t8p2v2").memory.parameters() == cost("d1t8p2").memory.parameters()
    assert cost("d4t1p1").memory.optimizer_bytes() == 3 * LLAMA_13B.parameters()  # 12 bytes over 4 ranks
    assert cost("d1t1p1").memory.gradient_bytes() == 4 * LLAMA_13B.parameters()


def test_bs_max_is_the_edge_of_ten_percent():
    costs = linear_cost()  # a step: 10 ms + 1 ms per sequence + 1 us per context token
    assert costs.largest_flat_batch(0, 64) == 2  # 11 ms x 1.1 = 12.1 ms
    assert costs.largest_flat_batch(0, 64, tolerance=1.0) == 12
    assert costs.largest_flat_batch(0, 5, tolerance=1.0) == 5
    job = analytic_table(cost(), (cost(),))
    edge = job.largest_flat_batch(300, 256)
    allowed = 1.1 * job.decode_step_seconds(1, 300)
    assert job.decode_step_seconds(edge, edge * 300) <= allowed < job.decode_step_seconds(edge + 1, (edge + 1) * 300)


def test_smaller_inference_replicas_share_the_batch():
    small, large = analytic_table(cost(), (cost("d1t4p1", True),)), analytic_table(cost(), (cost("d1t8p1", True),))
    assert small.score_seconds(8192, 32) < large.score_seconds(8192, 32)  # the same devices, fewer all-reduces
    assert small.score_seconds(300, 1) > large.score_seconds(300, 1)  # one sequence cannot be shared
    with pytest.raises(InputError, match="tp\\(3\\) does not divide a generation instance of tp\\(8\\)"):
        analytic_table(cost(), (cost("d1t3p1"),))
