"""Process groups: their order of ranks, on a torch that sorts too; which of them only carry sizes."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.parallel.device import Device
from rlhfuse.parallel.groups import GroupMaker, ModelGrid, channel_options, new_group, plain_grid
from rlhfuse.schedule.ir.ranks import neighbour_pairs, rank_map

L = ParallelLayout.parse
PAIRS = [
    ("d1t1p4", "d2t1p2"),
    ("d1t1p4", "d1t1p4"),
    ("d2t2p2", "d2t1p4"),
    ("d1t2p2v2", "d1t2p2"),
    ("d2t1p6", "d3t1p4"),
    ("d4t2p1", "d4t2p1"),
]


@pytest.fixture
def old_torch(monkeypatch):
    """torch before it could keep an order; the lists of ranks that it was asked for."""
    asked = []

    def sorting(ranks=None, timeout=None, backend=None, pg_options=None, group_desc=None):
        asked.append(list(ranks))
        return f"group {ranks}"

    monkeypatch.setattr(dist, "new_group", sorting)
    monkeypatch.setattr(dist, "get_world_size", lambda: 0)  # of no group that is asked for here
    return asked


def test_an_order_that_this_torch_cannot_keep_is_refused(old_torch):
    assert new_group((0, 2, 5)) == "group [0, 2, 5]" and old_torch == [[0, 2, 5]]
    with pytest.raises(InputError, match=r"^torch \S+ sorts .* \[3, 1\] must keep this order; install torch 2.12"):
        new_group((3, 1))
    assert old_torch == [[0, 2, 5]]


@pytest.mark.parametrize("actor, critic", PAIRS)
def test_a_run_needs_no_order_but_the_sorted_one(old_torch, actor, critic):
    ranks = rank_map({"actor": L(actor), "critic": L(critic)})
    first = None
    for rank in range(ranks.size):
        maker, pairs = GroupMaker(), []
        for model, layout in (("actor", L(actor)), ("critic", L(critic))):
            grid = ModelGrid(ranks.pipelines(model), layout)
            maker.for_model(model, grid, rank)
            pairs += neighbour_pairs(grid.cells, layout)
        maker.for_model("generation", plain_grid(L(f"d{ranks.size}t1p1")), rank)
        made = maker.channels("pipeline", pairs)
        assert set(made) == set(pairs)
        lists = old_torch[:]
        assert all(list(asked) == sorted(asked) for asked in lists)
        old_torch.clear()
        first = first or lists
        assert lists == first, "all ranks make the same groups in the same order"


@pytest.mark.parametrize("actor, critic", PAIRS)
def test_pipelines_have_a_direction_though_their_groups_carry_nothing(old_torch, actor, critic):
    ranks = rank_map({"actor": L(actor), "critic": L(critic)})
    for model, layout in (("actor", L(actor)), ("critic", L(critic))):
        for rank in range(ranks.size):
            groups = GroupMaker().for_model(model, ModelGrid(ranks.pipelines(model), layout), rank)
            pipeline, place, tp_rank = ranks.locate(model, rank)
            assert (groups.pp.rank(), groups.pp.size()) == (place, layout.pp)
            assert (groups.tp_dp_cp.rank(), groups.tp_dp_cp.size()) == (
                pipeline * layout.tp + tp_rank,
                layout.dp * layout.tp,
            )
            assert [(group.rank(), group.size()) for group in (groups.cp, groups.ep)] == [(0, 1), (0, 1)]
            assert groups.tp == f"group {list(ranks.pipelines(model)[pipeline][place])}"


def test_both_directions_of_a_channel_have_their_own_group(old_torch):
    pairs = list(itertools.permutations(range(3), 2))
    GroupMaker().channels("pipeline", pairs)
    assert old_torch == [sorted(pair) for pair in pairs]


class Options(SimpleNamespace):
    """Has the two things that are set in NCCL's."""

    def __init__(self, is_high_priority_stream: bool):
        super().__init__(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace())


@pytest.mark.parametrize("backend, device", [("gloo", "cpu"), ("shared_gpu", "cuda:0")])
def test_channels_have_options_over_nccl_alone(backend, device):
    assert channel_options(Device(torch.device(device), backend)) == {}


def test_channels_over_nccl_take_few_thread_blocks_in_a_stream_that_goes_first(old_torch, monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    device = Device(torch.device("cuda", 0), "nccl")
    first, second = channel_options(device), channel_options(device)
    assert first["backend"] == "nccl" and first["pg_options"].is_high_priority_stream
    assert vars(first["pg_options"].config) == {"min_ctas": 1, "max_ctas": 4}
    assert first["pg_options"] is not second["pg_options"], "torch writes a group's timeout into them"
    GroupMaker().channels("pipeline", [(0, 1), (1, 0)], device)
    assert old_torch == [[0, 1], [0, 1]]


def test_groups_of_one_rank_are_the_same_group_whatever_they_are_for(old_torch):
    maker = GroupMaker()
    assert maker.own("tp", [(0,), (1,)], 1) == "group [1]"
    maker.for_model("actor", plain_grid(L("d2t1p1")), 1)
    assert old_torch.count([0]) == old_torch.count([1]) == 1
