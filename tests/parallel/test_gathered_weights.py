"""Weights gathered beneath what follows a step: on their way after it, whole for whoever reads or runs them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from testkit.stages import build_alone, packed_for
from testkit.tiny import write_checkpoint

POOL_RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "critic", seed=1, scalar_head=True, num_hidden_layers=2)


def stepped(rank: int, folder, reader: str) -> tuple:
    """(gathers under way before and after the weights were asked for, weights).

    Rank 1 begins its gather when rank 0 has stepped and asks for weights.
    """
    built, maker = build_alone(rank, "d2t1p1", folder, head=True, name="adam")
    owner, seen, store = built.optimizer, [], dist.distributed_c10d._get_default_store()
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
        maker.close()
        return [False], under_way(), {}
    start_gather, gone_on = owner._start_gather, f"{reader}: rank 0 has stepped"
    if rank == 1:
        owner._start_gather = lambda: (store.wait([gone_on], timedelta(seconds=540)), start_gather())
    owner.step(1e-2)
    before = under_way()
    store.set(gone_on, f"by rank {rank}")
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
    return before, after, weights


@pytest.mark.parametrize("reader", ["forward", "modules"])
def test_a_gather_waits_for_nobody_and_its_reader_for_all(workers, folder, reader):
    """Were the step to wait for the other rank's gather, neither would end."""
    (before, after, weights), (_, _, others) = workers.run(stepped, folder, reader)
    assert all(before) and not any(after)
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_step_that_is_left_out_gathers_nothing(workers, folder):
    assert all(not any(after) for _, after, _ in workers.run(stepped, folder, "no step"))
