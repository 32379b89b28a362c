"""The roofline's limits, its bytes counted by hand, and BS_max."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.sim_helpers import linear_cost

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs import model_memory
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.analytic_table import analytic_table
from rlhfuse.costs.forms.roofline import forward_seconds
from rlhfuse.costs.forms.training import MicrobatchTokens
from rlhfuse.costs.hardware import hardware_by_name, known_hardware
from rlhfuse.costs.kernels import Kernels
from rlhfuse.models.logprobs import linear_logprobs, linear_loss

LLAMA_13B = ModelSpec("llama", 40, 5120, 40, 40, 128, 13824, 32000, 4096)
H800 = hardware_by_name("h800")


def cost(layout: str = "d1t8p1", scalar: bool = False) -> AnalyticCost:
    return AnalyticCost(LLAMA_13B, ParallelLayout.parse(layout), H800, 2, scalar)


def test_a_small_decode_batch_is_flat_and_a_large_one_is_not():
    one = cost().decode_step_seconds(1, 200)
    assert cost().decode_step_seconds(2, 400) == pytest.approx(one, rel=0.02)
    assert cost().decode_step_seconds(512, 512 * 200) > 2 * one


def test_a_long_forward_runs_at_the_peak_rate():
    """4096 tokens of the 13B: 2 x parameters x tokens + 4 h x pairs per layer, over 8 devices, plus all-reduces."""
    tokens = 4096
    per_layer = 2 * LLAMA_13B.layer_parameters * tokens + 4 * 5120 * tokens * (tokens + 1) / 2
    head = 2 * 5120 * 32000 * tokens
    compute = (40 * per_layer + head) / (8 * H800.flops)
    reduce = 40 * 2 * (2 * 7 / 8) * tokens * 5120 * 2 / H800.node_link_bandwidth
    reduce += 40 * 2 * 6 * H800.collective_seconds  # up and down a tree of 8 ranks
    assert forward_seconds(cost().roofline, tokens, 1, tokens) == pytest.approx(compute + reduce)
    assert forward_seconds(cost().roofline, tokens, 16, tokens) < compute + reduce, "packed sequences attend to less"


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


def test_stage_costs_split_the_forward():
    made = cost("d1t8p4").stage_costs(MicrobatchTokens(2048, 4, 2048))
    whole = forward_seconds(cost("d1t8p1").roofline, 2048, 4, 2048)
    assert sum(made.forward) == pytest.approx(whole * 1e6, abs=4)
    assert made.backward == pytest.approx([2 * ticks for ticks in made.forward], abs=1)
    assert made.forward[0] == made.forward[1] < made.forward[3]
    scalar = cost("d1t8p4", scalar=True).stage_costs(MicrobatchTokens(2048, 4, 2048))
    assert scalar.forward[3] == scalar.forward[0]
    # a stage keeps its output, but what it has received lies in a ring; the last what goes into norm and head, and that
    # once more in float32
    assert scalar.activation[0] - scalar.activation[1] == 2048 * 5120 * 2
    assert scalar.activation[3] - scalar.activation[1] == 2048 * 5120 * (2 + 4)


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
    narrow = cost("d2t4p1")  # generation: a worker spans two of its instances
    wide = analytic_table(narrow, (cost("d1t8p1", True), cost("d2t4p1", True)))
    alone = [analytic_table(narrow, (cost(text, True),)).score_seconds for text in ("d1t8p1", "d2t4p1")]
    assert wide.score_seconds(8192, 32) == pytest.approx(alone[0](8192, 32) + alone[1](4096, 16))


def test_recomputation_and_sequence_parallelism_keep_less_and_the_backward_pays_for_the_first():
    """13B on d1t8p4, 1000 tokens: hidden states are the whole part of what a layer keeps."""
    layout = ParallelLayout.parse("d1t8p4")

    def made(**options) -> AnalyticCost:
        return AnalyticCost(LLAMA_13B, layout, H800, 2, **options)

    hidden, rows = 1000 * 5120 * 2, 1000 * 2 * 4
    # query, key, value and attention's output; gate, up and product; attention's sums of a row and head
    cut = 1000 * (4 * 40 * 128 + 3 * 13824) * 2 + 1000 * 40 * 4
    assert made().memory.kept_layer_bytes(1000) == 4 * hidden + rows + cut / 8
    assert made(sequence_parallel=True).memory.kept_layer_bytes(1000) == (4 * hidden + rows + cut) / 8
    assert made(recompute="full").memory.kept_layer_bytes(1000) == hidden
    some, remade = made(recompute="selective"), 2 * hidden + 1000 * 13824 * 2 / 8  # outputs of norms and of SwiGLU
    assert some.memory.kept_layer_bytes(1000) == made().memory.kept_layer_bytes(1000) - remade
    both = made(sequence_parallel=True, recompute="full")
    assert both.memory.kept_layer_bytes(1000) == hidden / 8
    gradients = 3 * 13824 * 1000 * 2 / 8  # of gate, up and product
    back = hidden + gradients
    assert made().memory.passing_bytes(1000, 1) == made().memory.passing_bytes(1000, 0) == back
    assert some.memory.passing_bytes(1000, 1) == back + remade  # those of one layer
    assert both.memory.passing_bytes(1000, 1) == (3 * hidden + rows + cut) / 8 + hidden / 8 + hidden + gradients
    table = LLAMA_13B.vocab * 5120 * 2 / 8  # its gradient, when the ten layers of the first stage keep nothing
    again = made(recompute="full")
    assert again.memory.passing_bytes(10, 0) == table - 9 * hidden / 100 > again.memory.passing_bytes(10, 1)
    loss = (4 + 2) * LLAMA_13B.vocab / 8 * 1000 + 6 * 5120 * 1000 + hidden  # all rows at once
    assert made().memory.passing_bytes(1000, 3) == made().memory.passing_bytes(1000) == max(back, loss)
    # a gradient, a hidden state of each micro-batch under way, and one more
    assert [made().memory.receiving_bytes(1000, place) / hidden for place in range(4)] == [1, 5, 4, 2]
    assert (made().memory.gathering_bytes(1000), both.memory.gathering_bytes(1000)) == (0, hidden)
    micro = MicrobatchTokens(1000, 1, 1000)
    plain, again = made().stage_costs(micro), both.stage_costs(micro)
    assert again.forward == plain.forward and again.activation[0] == 11 * hidden / 8  # ten inputs, and the output
    assert plain.backward[0] == pytest.approx(2 * plain.forward[0], abs=1)
    assert again.backward[0] == pytest.approx(3 * plain.forward[0], abs=1.5)
    assert 2 * plain.forward[-1] < again.backward[-1] < 3 * plain.forward[-1]  # the output layer does not run again


def test_the_loss_is_planned_with_the_logits_that_it_has():
    assert model_memory.LOGITS_BYTES == linear_logprobs.LOGITS_BYTES
    for name in ("GRADIENT_BYTES", "FLOAT_BYTES"):
        assert getattr(model_memory, name) == getattr(linear_loss, name)
    for tokens in (1000, 100_000):
        assert cost("d1t1p1").memory.loss_bytes(tokens) - 4 * tokens * LLAMA_13B.hidden <= 1 << 30


def test_logits_are_multiplied_once_where_a_token_has_a_loss_of_its_own():
    """On a GPU 6 THV, else 8, all of it in the forward. A CPU keeps logits: 6, of which 4 backwards."""
    for name, by_token, parts in (("h100", True, (3, 0)), ("h100", False, (4, 0)), ("cpu", True, (1, 2))):
        machine = known_hardware()[name]
        kernels = replace(Kernels.on(machine, True, by_token), tile_forward_bytes=0, tile_backward_bytes=0)
        kernels = replace(kernels, head_gradient_sum_bytes=0)
        made = AnalyticCost(LLAMA_13B, ParallelLayout(1, 1, 2), machine, 2, kernels=kernels)
        head, ends = made.head_seconds(10_000), made.stage_seconds(MicrobatchTokens(10_000, 1, 10_000)).ends[-1]
        assert ends == pytest.approx([part * head + machine.pass_seconds for part in parts])
