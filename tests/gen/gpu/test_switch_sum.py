"""Sums by the switch: chosen where their memory is there and right; the engine writes products into it."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from testkit.gen_models import engine_of, tiny_spec

from rlhfuse.base.errors import InputError
from rlhfuse.gen import forward
from rlhfuse.gen.core.model_shard import TensorParallel
from rlhfuse.gen.engine import SamplingParams
from rlhfuse.gen.gpu.switch_sum import SwitchParallel, choose_parallel

POOL_RANKS = 2
CPU = torch.device("cpu")
SPEC = tiny_spec(qk_norm=True, head_dim=16)
PROMPTS = [[9, 10, 11], [12], list(range(20, 60)), [300, 299]]


class GlooMemory:
    """The sum of ranks where each has memory of its own; some ranks can be at fault."""

    def __init__(self, faulty: str = "", rank: int = 1) -> None:
        self._fault = faulty if dist.get_rank() == rank else ""
        self.sums = 0

    def buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        if self._fault == "memory":
            raise RuntimeError("these GPUs have no multicast addresses")
        return torch.full((elements,), float("nan"), dtype=dtype)

    def sum(self, part: torch.Tensor) -> None:
        self.sums += 1
        dist.all_reduce(part)
        if self._fault == "sums":
            part[0] += 1


def samples() -> list:
    sizes = dict(num_blocks=24, max_sequences=8, max_batched_tokens=32)
    engine = engine_of(SPEC, kernels="torch", tp_group=dist.group.WORLD, **sizes)
    found = engine.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True, seed=4))
    return [engine.lines[1], [result.tokens for result in found], [result.logprobs for result in found]]


def on_rank(rank: int) -> dict:
    group, found = dist.group.WORLD, {}
    sizes = CPU, 8, SPEC.hidden, torch.float32
    for fault in ("memory", "sums"):
        made, found[fault] = choose_parallel(group, "auto", *sizes, GlooMemory(fault))
        assert type(made) is TensorParallel
        with pytest.raises(InputError) as error:
            choose_parallel(group, "switch", *sizes, GlooMemory(fault))
        found[f"{fault} by name"] = str(error.value)
    found["plain"] = samples()
    memory = GlooMemory()
    with mock.patch.object(forward, "choose_parallel", partial(choose_parallel, memory=memory)):
        found["switch"] = samples()
    found["sums made"] = memory.sums
    parallel = SwitchParallel(group, memory, memory.buffer(2 * SPEC.hidden, torch.float32))
    x, weight = torch.rand(2, 5), torch.rand(SPEC.hidden, 5)
    first = parallel.product_sum(x, weight)
    assert torch.equal(first, TensorParallel(group).product_sum(x, weight))
    many = parallel.product_sum(torch.ones(3, 5), weight)  # more rows than the memory has
    assert many.data_ptr() != first.data_ptr() == parallel.product_sum(x, weight).data_ptr()
    return found


def test_two_ranks(workers):
    found, other = workers.run(on_rank)
    assert found == other, "ranks disagree"
    assert found["memory"].endswith("gloo (not by the switch: these GPUs have no multicast addresses)")
    assert "by the switch: its sums are off by" in found["sums"]
    assert found["memory by name"].startswith("rollout.all_reduce=switch: these GPUs have no multicast addresses; use")
    assert "its sums are off" in found["sums by name"]
    assert found["plain"][0] == "sums of tensor ranks: gloo (not by the switch: it needs a GPU for each rank)"
    assert found["switch"][0] == "sums of tensor ranks: by the NVLink switch"
    assert found["switch"][1:] == found["plain"][1:]  # of two ranks the order of a sum is one
    assert found["sums made"] == 1 + 2 * SPEC.layers * 11  # the first tokens come from steps with more rows


def test_one_rank_sums_nothing():
    made, line = choose_parallel(None, "auto", CPU, 8, 64, torch.float32)
    assert type(made) is TensorParallel and line == ""
