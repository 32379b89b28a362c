"""Weights' gradients of a stage's layers: whole, split and recomputed backwards add the same numbers."""

import pytest
import torch
from testkit.stages import VOCAB, build_alone, packed_for
from testkit.tiny import write_checkpoint

from rlhfuse.parallel.weight_gradients import add_product

POOL_RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    biased = dict(attention_bias=True, num_hidden_layers=2, num_key_value_heads=4)
    return write_checkpoint(tmp_path_factory.mktemp("model") / "critic", seed=1, scalar_head=True, **biased)


def rows(count: int) -> list[list[list[int]]]:
    """Sequences of `count` micro-batches."""
    generator = torch.Generator().manual_seed(4)
    draw = lambda length: torch.randint(0, VOCAB, (length,), generator=generator).tolist()  # noqa: E731
    return [[draw(5 + number), draw(9)] for number in range(count)]


def gradients(
    rank: int, folder, layout: str, dtype, cut: bool, recompute: str, late: int = 0, frozen: str = ""
) -> dict:
    """Weight -> its main_grad after three micro-batches.

    With `late` backwards are split, and the weights' part follows so many micro-batches later. Weights whose names
    contain `frozen` are not trained.
    """
    from rlhfuse.models.build import Activations

    built, maker = build_alone(
        rank, layout, folder, head=True, activations=Activations(cut, recompute), dtype=dtype, name="sgd"
    )
    named = dict(built.optimizer.module.module.named_parameters())
    for name, weight in named.items():
        weight.requires_grad_(not frozen or frozen not in name)
    built.optimizer.zero_grad()
    stage = built.stages[0]
    stage.split_backward(late > 0)
    for number, batch in enumerate(packed_for(built, rows(3))):
        stage.forward(number, batch, None, lambda values, _: values.float().square().sum())
        stage.backward(number, None)
        if 0 < late <= number:
            stage.backward_weight(number - late)
    for number in range(3 - late, 3):
        stage.backward_weight(number)
    found = {name: weight.main_grad.clone() for name, weight in named.items()}
    assert all(weight.grad is None for weight in named.values())
    maker.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout, cut", [("d2t1p1", False), ("d1t2p1", False), ("d1t2p1", True)], ids=str)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_split_and_recomputed_backwards_have_the_same_bits(workers, folder, dtype, layout, cut, recompute):
    settings = folder, layout, dtype, cut
    plain = workers.run(gradients, *settings, "none")
    for late in (0, 2):
        for whole, other in zip(plain, workers.run(gradients, *settings, recompute, late)):
            for name, expected in whole.items():
                assert torch.equal(other[name], expected) and expected.any(), (name, late)


@pytest.mark.parametrize("frozen", ["linear_fc1", "layernorm.weight", "linear_proj", "linear_qkv.bias"])
def test_frozen_weights_get_no_gradient_and_change_no_other(workers, folder, frozen):
    plain, *others = (
        workers.run(gradients, folder, "d2t1p1", torch.float32, False, "none", *more)
        for more in ((), (0, frozen), (1, frozen))
    )
    for found in others:
        for name, expected in plain[0].items():
            wanted = torch.zeros_like(expected) if frozen in name else expected
            assert torch.equal(found[0][name], wanted), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added_in_place_and_in_float32(dtype):
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((700, 24), (700, 40)))
    whole = torch.randn(50, 40, generator=generator)
    before = whole.clone()
    add_product(whole[10:34], a.t(), b)
    expected = before[10:34].double() + a.double().t() @ b.double()
    assert (whole[10:34] - expected).abs().max() < 2e-4
    assert torch.equal(whole[:10], before[:10]) and torch.equal(whole[34:], before[34:])
