"""B and W of a split backward: their seconds and bytes counted by hand."""

from dataclasses import replace

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.forms.training import MicrobatchTokens, StageSeconds
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.kernels import Kernels

LLAMA_8B = ModelSpec("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192)
H100 = hardware_by_name("h800")
TOKENS = 8192
MICRO = MicrobatchTokens(TOKENS, 4, TOKENS)


def cost(layout: str = "d1t1p4", **more) -> AnalyticCost:
    return AnalyticCost(LLAMA_8B, ParallelLayout.parse(layout), H100, 2, **{"kernels": Kernels(), **more})


def test_what_is_kept_of_a_layer():
    """qkv: 4096 in, 6144 out; proj: 4096 in and out; fc1: 4096 in, 2 x 14336 out; fc2: 14336 in, 4096 out."""
    inputs, gradients = 4096 + 4096 + 4096 + 14336, 6144 + 4096 + 28672 + 4096
    assert cost("d1t1p1").memory.split_layer_bytes(10) == 10 * 2 * (inputs + gradients)
    halves = (4096 + 14336 + 6144 + 28672) / 2  # what two tensor ranks share
    assert cost("d1t2p1").memory.split_layer_bytes(10) == 10 * 2 * (4096 + 4096 + halves + 4096 + 4096)
    assert cost("d1t2p1", sequence_parallel=True).memory.split_layer_bytes(10) == 10 * 2 * (
        2048 + 2048 + halves + 4096 + 4096
    )


def test_stages_have_b_w_and_what_w_keeps():
    whole, split = cost().stage_costs(MICRO), cost().stage_costs(MICRO, split=True)
    assert split.forward == whole.forward and split.activation == whole.activation
    assert (
        len(set(split.weight_gradient)) == 1 and split.forward[3] > split.forward[0]
    )  # the head's gradients are made there
    every, received = cost().memory.split_layer_bytes(TOKENS), TOKENS * 4096 * 2
    assert split.weight_activation == (8 * every - received,) * 3 + (8 * every,)
    on_cpu = replace(cost(), hardware=hardware_by_name("cpu"), kernels=None, element_bytes=4)
    assert on_cpu.stage_costs(MICRO, split=True).weight_activation == (8 * 2 * every,) * 4
    assert whole.weight_gradient is None and whole.weight_activation is None


def test_a_stage_of_several_layers_rounds_once():
    seconds = StageSeconds((1.2e-6, 2.4e-6), ((0.0, 0.0), (0.3e-6, 0.6e-6)), split=(1.4e-6, 1.2e-6))
    assert seconds.ticks((2, 3)) == ((2, 4), (5, 8))
    assert seconds.ticks((2, 3), split=True) == ((2, 4), (3, 5), (2, 4))
