"""Learning rates against transformers' schedules, whose warm-up begins at 0 and ours at its first step."""

import pytest
import torch
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup, get_linear_schedule_with_warmup

from rlhfuse.config.settings import OptimizerConfig
from rlhfuse.parallel.learning_rate import learning_rate

LR, STEPS = 0.1, 40


def rates(**settings) -> list[float]:
    optim = OptimizerConfig(lr=LR, lr_decay_iterations=STEPS, **settings)
    return [learning_rate(optim, iteration) for iteration in range(STEPS + 5)]


def theirs(make, *arguments, **options) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler, found = make(optimizer, *arguments, **options), []
    for _ in range(STEPS + 1):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 8])
def test_linear_and_cosine_are_those_of_transformers(warmup):
    linear = rates(warmup_iterations=warmup, lr_scheduler_type="linear")
    cosine = rates(warmup_iterations=warmup, lr_scheduler_type="cosine", min_lr_ratio=0.2)
    expected = theirs(get_linear_schedule_with_warmup, warmup, STEPS)
    assert linear[warmup : STEPS + 1] == pytest.approx(expected[warmup:])
    expected = theirs(get_cosine_with_min_lr_schedule_with_warmup, warmup, STEPS, min_lr_rate=0.2)
    assert cosine[warmup : STEPS + 1] == pytest.approx(expected[warmup:])
    for found in (linear, cosine):
        assert found[:warmup] == pytest.approx([LR * (i + 1) / warmup for i in range(warmup)])


def test_the_floor_holds_beyond_the_end_and_a_share_is_so_many_iterations():
    linear = rates(lr_scheduler_type="linear", min_lr_ratio=0.25)
    assert linear[STEPS:] == [LR * 0.25] * 5 and min(linear) == LR * 0.25 and linear[0] == LR
    assert rates(lr_scheduler_type="linear")[STEPS:] == [0.0] * 5
    for kind in ("constant", "linear", "cosine"):
        shared = rates(lr_scheduler_type=kind, lr_warmup_ratio=0.2)
        assert shared == rates(lr_scheduler_type=kind, warmup_iterations=8)
        assert max(shared) == shared[7] == shared[8] == LR
    assert rates(lr_warmup_ratio=0.2)[8:] == [LR] * (STEPS - 3)
