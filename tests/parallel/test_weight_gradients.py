"""Weight gradients that products add up themselves, as on CUDA, against those that are computed and then added."""

import pytest
import torch
from testkit.stages import VOCAB, build_alone, packed_for
from testkit.tiny import write_checkpoint

from rlhfuse.base.errors import InputError
from rlhfuse.parallel.weight_gradients import DeferredProducts, add_product

POOL_RANKS = 2

LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "critic", seed=1, scalar_head=True, num_hidden_layers=2)


def rows(count: int) -> list[list[list[int]]]:
    """Sequences of `count` micro-batches."""
    generator = torch.Generator().manual_seed(4)
    draw = lambda length: torch.randint(0, VOCAB, (length,), generator=generator).tolist()  # noqa: E731
    return [[draw(5 + number), draw(9)] for number in range(count)]


def gradients(
    rank: int, folder, layout: str, dtype, fused: bool, apart: bool, parallel: bool, recompute: str, late: int = 0
) -> dict:
    """Weight -> (its main_grad after three micro-batches, whether its product added it). `apart`: summed here.

    With `late` backwards are split, and the weights' part follows so many micro-batches later.
    """
    from rlhfuse.models.build import Activations
    from rlhfuse.parallel.device import current_device_is_cpu
    from rlhfuse.parallel.weight_gradients import fuse_accumulation

    kept = Activations(parallel, recompute)
    built, maker = build_alone(rank, layout, folder, head=True, activations=kept, dtype=dtype, name="sgd")
    if fused:
        fuse_accumulation(built.optimizer.module)
    named = dict(built.optimizer.module.module.named_parameters())
    sums = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in named.items()}
    built.optimizer.zero_grad()
    stage = built.stages[0]
    stage.split_backward(late > 0)
    for number, batch in enumerate(packed_for(built, rows(3))):
        with current_device_is_cpu():
            stage.forward(number, batch, None, lambda values, _: values.float().square().sum())
            stage.backward(number, None)
        if 0 < late <= number:
            stage.backward_weight(number - late)
        if apart:
            for name, weight in named.items():
                sums[name] += weight.main_grad
            added = {name: weight.grad_added_to_main_grad for name, weight in named.items()}
            built.optimizer.zero_grad()
    for number in range(3 - late, 3):
        stage.backward_weight(number)
    if not apart:
        sums = {name: weight.main_grad.clone() for name, weight in named.items()}
        added = {name: weight.grad_added_to_main_grad for name, weight in named.items()}
    assert all(weight.grad is None for weight in named.values())
    maker.close()
    return {name: (sums[name], added[name]) for name in named}


@pytest.mark.parametrize(
    "layout, dtype, parallel, recompute",
    [
        ("d2t1p1", torch.float32, False, "none"),
        ("d2t1p1", torch.bfloat16, False, "full"),
        ("d1t2p1", torch.float32, True, "selective"),
        ("d1t2p1", torch.bfloat16, False, "none"),
    ],
    ids=str,
)
def test_products_add_what_was_added_after_them(workers, folder, layout, dtype, parallel, recompute):
    settings = folder, layout, dtype
    plain, fused, apart = (
        workers.run(gradients, *settings, *ways, parallel, recompute)
        for ways in ((False, False), (True, False), (True, True))
    )
    for rank in range(2):
        for name, (expected, _) in plain[rank].items():
            found, added = fused[rank][name]
            linear = any(part in name for part in LINEAR) and name.endswith(".weight") and "norm" not in name
            assert added == linear, name
            close = 1e-5 if dtype == torch.float32 else 0.01
            assert (found - expected).norm() <= close * expected.norm() and expected.norm() > 0, name
            in_turn = apart[rank][name][0]  # micro-batch by micro-batch: float32 sums of the same numbers
            assert (found - in_turn).abs().max() <= 1e-6 * in_turn.abs().max(), name
    assert sum(added for _, added in fused[0].values()) == 8


@pytest.mark.parametrize(
    "layout, parallel, recompute",
    [
        ("d2t1p1", False, "full"),
        ("d2t1p1", False, "selective"),
        ("d1t2p1", True, "none"),
        ("d1t2p1", True, "selective"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_that_are_put_off_have_the_same_bits(workers, folder, dtype, layout, parallel, recompute):
    for fused in (False, True):
        ways = folder, layout, dtype, fused, False, parallel
        plain = workers.run(gradients, *ways, "none")
        for whole, split in zip(plain, workers.run(gradients, *ways, recompute, 2)):
            for name, (expected, _) in whole.items():
                assert torch.equal(split[name][0], expected) and expected.any(), (name, fused)


def test_other_layers_are_refused():
    with pytest.raises(InputError, match="trainer.transformer_impl=local"):
        DeferredProducts(torch.nn.Linear(2, 2))


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
