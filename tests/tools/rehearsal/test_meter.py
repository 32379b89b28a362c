"""Storages that live are counted in the allocators' steps, and what held most is kept; what NCCL and kernels refuse."""

from inspect import signature

import pytest
import torch
from rehearsal.memory import DEVICE, PINNED, Meter
from rehearsal.stand_ins.others import OtherRanks
from rehearsal.tensors import refuse_bad_collective, refuse_bad_operands

from rlhfuse.fusion.inter.iteration_store import IterationStore

MM, COPY = torch.ops.aten.mm.default, torch.ops.aten.index_copy.default


def test_a_storage_counts_while_it_lives_and_the_peak_is_kept():
    meter = Meter()
    weight = torch.empty(1000, dtype=torch.bfloat16)
    meter.track(weight, "empty", DEVICE)
    meter.track(weight.view(10, 100), "view", DEVICE)  # the same storage
    assert meter.now[DEVICE] == 2048 and meter.name_of(weight) == "empty bfloat16 [1000]"

    def work():
        meter.track(gradient := torch.empty(3000), "empty", DEVICE)
        return gradient.shape

    assert meter.watched(work) == ((3000,), 12288, 0)
    assert (meter.now[DEVICE], meter.peak[DEVICE]) == (2048, 2048 + 12288)
    meter.pass_through(50_000, "a kernel")
    assert meter.peak[DEVICE] == 52_048 and meter.at_peak()["", "a kernel"] == 50_000
    meter.track(torch.empty(0), "nothing", PINNED)
    meter.track(pinned := torch.empty(3 << 20, dtype=torch.bfloat16), "empty", PINNED)
    assert (meter.host_bytes, meter.reserved_bytes) == (pinned.nbytes, 8 << 20)
    meter.resize(weight.untyped_storage()._cdata, 0)
    meter.reset()
    assert meter.now[DEVICE] == meter.peak[DEVICE] == 0


@pytest.mark.parametrize(
    "operator, arguments, message",
    [
        (MM, (torch.ones(2, 2), torch.ones(2, 2).half()), "mm of torch.float16 and torch.float32"),
        (COPY, (torch.ones(2), 0, torch.ones(1).int(), torch.ones(1)), "the index is torch.int32, not torch.int64"),
    ],
)
def test_operands_that_a_kernel_refuses(operator, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        refuse_bad_operands(operator, arguments)


def test_a_collective_of_a_tensor_on_the_cpu_is_refused():
    assert refuse_bad_collective("all_reduce", [torch.ones(4)]) == "all_reduce of a tensor on the CPU: [4]"


def test_the_other_ranks_store_is_asked_as_the_runs_own():
    shared = {name for name in vars(OtherRanks).keys() & vars(IterationStore).keys() if not name.startswith("_")}
    for name in {"clear", *shared}:
        ours, theirs = (list(signature(getattr(kind, name)).parameters) for kind in (OtherRanks, IterationStore))
        assert ours == theirs, name
