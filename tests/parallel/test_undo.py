"""Undoing optimizer steps: weights, moments and counters come back bit for bit, state that did not exist goes."""

from __future__ import annotations

import pytest
import torch

from rlhfuse.parallel.undo import UndoCopy


def state_of(optimizer: torch.optim.Optimizer) -> list:
    return [
        (weight.detach().clone(), {k: v.clone() for k, v in optimizer.state.get(weight, {}).items()})
        for group in optimizer.param_groups
        for weight in group["params"]
    ]


def same(one: list, other: list) -> bool:
    return all(
        torch.equal(w, v) and a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        for (w, a), (v, b) in zip(one, other, strict=True)
    )


def step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.randn(weight.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_step_undone_and_repeated_gives_the_bits_of_one_never_undone(kind, before):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,))]
    optimizer = kind([{"params": weights[:1]}, {"params": weights[1:]}], lr=0.1)
    undo = UndoCopy([optimizer])
    for seed in range(before):
        undo.take()
        step(optimizer, seed)
    kept = state_of(optimizer)
    undo.take()
    step(optimizer, 100)
    assert not same(state_of(optimizer), kept)
    undo.restore()
    assert same(state_of(optimizer), kept)
    undo.take()
    step(optimizer, 101)
    after = state_of(optimizer)
    undo.restore()
    step(optimizer, 101)
    assert same(state_of(optimizer), after)


def test_a_counter_of_a_whole_group_comes_back():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    undo = UndoCopy([optimizer])
    undo.take()
    optimizer.param_groups[0]["step"] = 1
    undo.restore()
    assert "step" not in optimizer.param_groups[0]
    optimizer.param_groups[0]["step"] = 4
    undo.take()
    optimizer.param_groups[0]["step"] = 5
    undo.restore()
    assert optimizer.param_groups[0]["step"] == 4


def test_nothing_to_undo_is_an_error():
    with pytest.raises(RuntimeError, match="no step to undo"):
        UndoCopy([]).restore()
