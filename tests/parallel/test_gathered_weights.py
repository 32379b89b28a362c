"""Weights gathered beneath what follows a step: on their way after it, whole for whoever reads or runs them."""

from __future__ import annotations

import time

import pytest
import torch
from testkit.stages import load, packed_for, ranks_of
from testkit.tiny import write_checkpoint

from rlhfuse.config.settings import OptimizerConfig

POOL_RANKS = 2

SLOW = 1.0  # seconds by which rank 1 is late


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "critic", seed=1, scalar_head=True, num_hidden_layers=2)


def stepped(rank: int, folder, reader: str) -> tuple:
    """(seconds of a step, gathers under way before and after the weights were asked for, weights)."""
    from rlhfuse.models.build import WHOLE
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.parallel.groups import GroupMaker, ModelGrid

    ranks, maker = ranks_of(critic="d2t1p1"), GroupMaker(600)
    grid = ModelGrid(ranks.pipelines("critic"), 1)
    groups = maker.for_model("critic", grid, rank)
    config = OptimizerConfig(name="adam", lr=1e-2)
    built = load(rank, grid, groups, folder, True, WHOLE, config, choose_device("cpu", 0, 1))
    owner, seen = built.optimizer, []
    (batch,) = packed_for(built, [[[5, 9, 12, 3], [7, 7, 1]]])
    raw = owner._modules[0]
    under_way = lambda: [group.param_gather_handle is not None for group in raw.bucket_groups]  # noqa: E731
    raw.module.embedding.register_forward_pre_hook(lambda *_: seen.append(under_way()))

    def learn() -> None:
        owner.zero_grad()
        built.stages[0].forward(0, batch, None, lambda values, _: values.float().square().sum())
        built.stages[0].backward(0, None)
        owner.finish_gradients()

    learn()
    if reader == "no step":
        owner.step(None)
        return 0.0, [False], under_way(), {}
    start_gather = owner._start_gather
    if rank == 1:
        owner._start_gather = lambda: (time.sleep(SLOW), start_gather())
    begin = time.perf_counter()
    owner.step(1e-2)
    seconds, before = time.perf_counter() - begin, under_way()
    owner._start_gather = start_gather
    if reader == "forward":
        learn()
        assert len(seen) == 2 and not any(seen[1]), "a layer ran before its weights were there"
    weights = {name: weight.detach().clone() for name, weight in owner.modules[0].named_parameters()}
    after = under_way()
    if reader == "forward":
        for _ in range(2):  # steps on, with nothing in between
            owner.step(1e-2)
            owner.finish_gradients()
        weights = {name: weight.detach().clone() for name, weight in owner.module.named_parameters()}
    maker.close()
    return seconds, before, after, weights


@pytest.mark.parametrize("reader", ["forward", "modules"])
def test_a_gather_waits_for_nobody_and_its_reader_for_all(workers, folder, reader):
    (seconds, before, after, weights), (_, _, _, others) = workers.run(stepped, folder, reader)
    assert all(before) and seconds < SLOW / 2, "the step waited for the other rank's"
    assert not any(after)
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_step_that_is_left_out_gathers_nothing(workers, folder):
    assert all(not any(after) for _, _, after, _ in workers.run(stepped, folder, "no step"))
