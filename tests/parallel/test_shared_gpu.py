"""The process group of ranks that share a GPU, with CPU tensors sent through its staging, against plain gloo."""

import datetime

import pytest
import torch
import torch.distributed as dist
from testkit.tiny import with_models
from torch.distributed import _coalescing_manager

from rlhfuse.base.errors import InputError
from rlhfuse.config.rules import check_config
from rlhfuse.config.settings import RunConfig
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.machine import Host, memory_limit
from rlhfuse.parallel import shared_gpu
from rlhfuse.parallel.device import choose_device
from rlhfuse.parallel.shared_gpu import SHARED_GPU
from rlhfuse.planning.job import Job
from rlhfuse.planning.settle import settle_but_layouts
from rlhfuse.run.launch import sharing_line
from rlhfuse.run.preflight import check_inputs, device_of

WORLD = 4
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)


def always(tensor):
    return True


def staged_group(ranks=None):
    if SHARED_GPU not in dist.Backend.backend_list:
        shared_gpu.register(stages=always)
    return dist.new_group(ranks, backend=SHARED_GPU)


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 3
    return (drawn if dtype.is_floating_point else drawn.abs()).to(dtype)


def every_collective(rank: int, group, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a rank has after each collective that the program and Megatron use."""
    found = []
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        reduced = numbers(rank, 7, dtype)
        dist.all_reduce(reduced, operation, group=group)
        found.append(reduced)
    across = numbers(rank, 12, dtype).view(4, 3).t()  # not in one stretch
    if dist.get_backend(group) == SHARED_GPU:
        dist.broadcast(across, 1, group=group)
    else:
        copy = across.contiguous()
        dist.broadcast(copy, 1, group=group)
        across = copy
    together = torch.empty(WORLD * 3, dtype=dtype)
    dist.all_gather_into_tensor(together, numbers(rank, 3, dtype), group=group)
    parts = [torch.empty(2, dtype=dtype) for _ in range(WORLD)]
    dist.all_gather(parts, numbers(rank, 2, dtype), group=group)
    share = torch.empty(2, dtype=dtype)
    dist.reduce_scatter_tensor(share, numbers(rank, 2 * WORLD, dtype), group=group)
    found += [across, together, *parts, share]
    for _ in range(2):  # as Megatron's gradient and parameter buffers do
        whole = numbers(rank, 3 * WORLD, dtype)
        shards = list(whole.view(WORLD, 3).unbind())
        with _coalescing_manager(group, async_ops=True) as handle:
            dist.reduce_scatter_tensor(shards[rank], whole, group=group, async_op=True)
        handle.wait()
        with _coalescing_manager(group, async_ops=True) as handle:
            dist.all_gather_into_tensor(whole, shards[rank], group=group, async_op=True)
        handle.wait()
        found.append(whole)
    first, second = numbers(rank, 5, dtype), numbers(rank, 2, dtype)
    with _coalescing_manager(group, async_ops=True) as handle:
        dist.all_reduce(first, group=group)
        dist.all_reduce(second, group=group)
    handle.wait()
    return [*found, first, second]


def both_ways(rank: int, dtype: torch.dtype) -> list[bool]:
    staged, plain = staged_group(), dist.new_group(backend="gloo")
    pairs = zip(every_collective(rank, staged, dtype), every_collective(rank, plain, dtype), strict=True)
    return [torch.equal(a, b) for a, b in pairs]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_give_what_gloo_gives(workers, dtype):
    for equal in workers.run(both_ways, dtype):
        assert len(equal) == 2 + 1 + 1 + WORLD + 1 + 2 + 2 and all(equal)


def without_gradients(rank: int) -> list[float]:
    """Tensors of inference mode, one of them waited for outside of it."""
    group = staged_group()
    with torch.inference_mode():
        first, second = torch.tensor([float(rank)]), torch.tensor([1.0])
        dist.all_reduce(first, group=group)
        work = dist.all_reduce(second, group=group, async_op=True)
    work.wait()
    return [*first.tolist(), *second.tolist()]


def test_tensors_of_inference_mode(workers):
    assert workers.run(without_gradients) == [[6.0, 4.0]] * WORLD


def crossing(rank: int) -> list[bool]:
    """Every rank sends 8 MB to every other before anyone receives, over directed channels and in one batch."""
    size, good = 2_000_000, []
    pairs = [(a, b) for a in range(WORLD) for b in range(WORLD) if a != b]
    channels = {pair: staged_group(list(pair)) for pair in pairs}
    sent = [dist.isend(torch.full((size,), 10.0 * rank + b), b, group=channels[a, b]) for a, b in pairs if a == rank]
    buffers = {a: torch.empty(size) for a, b in pairs if b == rank}
    works = {a: dist.irecv(buffer, a, group=channels[a, rank]) for a, buffer in buffers.items()}
    for a, work in works.items():
        work.wait()
        good.append(work.is_completed() and bool((buffers[a] == 10.0 * a + rank).all()))
    for work in sent:
        work.wait()
        good.append(work.is_completed())
    world, arrived = staged_group(), torch.empty(size, dtype=torch.bfloat16)
    mine = torch.full((size,), float(rank), dtype=torch.bfloat16)
    ops = [dist.P2POp(dist.isend, mine, (rank + 1) % WORLD, world)]
    ops.append(dist.P2POp(dist.irecv, arrived, (rank - 1) % WORLD, world))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [*good, bool((arrived == (rank - 1) % WORLD).all())]


def test_sends_that_cross_arrive(workers):
    for good in workers.run(crossing):
        assert len(good) == 7 and all(good)


def alternating(rank: int) -> tuple[list[float], list[int]]:
    """Sums of a staged tensor and of one that goes as it is, under way together."""
    group = staged_group()
    group._stages = torch.is_floating_point
    staged, plain = torch.tensor([1.5 + rank]), torch.tensor([rank])
    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in (staged, plain)]:
        work.wait()
    return staged.tolist(), plain.tolist()


def test_staged_and_plain_tensors_take_turns_in_one_group(workers):
    assert workers.run(alternating) == [([12.0], [6])] * WORLD


def late_receiver(rank: int) -> bool:
    """Rank 0 sends more than sockets hold and goes on, though rank 1 posts its receive later: else it ends never."""
    group, size = staged_group([0, 1]), 8_000_000
    if rank == 0:
        work = dist.isend(torch.ones(size), 1, group=group)
        went_on = not work.is_completed()
        dist.barrier()
        work.wait()
        return went_on
    dist.barrier()
    if rank > 1:
        return True
    buffer = torch.empty(size)
    dist.recv(buffer, 0, group=group)
    return bool((buffer == 1).all())


def test_who_sends_does_not_wait_for_who_receives(workers):
    assert all(workers.run(late_receiver))


def objects_and_order(rank: int) -> tuple:
    group = staged_group()
    told = [None] * WORLD
    dist.all_gather_object(told, {"rank": rank}, group=group)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=7), group)
    timeouts = {group._get_backend(torch.device(kind)).options._timeout.seconds for kind in ("cpu", "cuda")}
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    return [one["rank"] for one in told], timeouts


def test_objects_timeouts_and_the_end_of_a_group(workers):
    assert workers.run(objects_and_order) == [([0, 1, 2, 3], {7})] * WORLD


# the setting


def config(layout: str = "d4t1p1", **trainer) -> RunConfig:
    return with_models(parallel={"generation": layout}, trainer=trainer, fusion={"actor_microbatches": 1})


def settled(made: RunConfig) -> Job:
    return settle_but_layouts(Job(made, {}, 4, device=device_of(made.trainer)))


def test_a_device_is_shared_only_where_there_is_one(monkeypatch):
    with pytest.raises(InputError, match="trainer.share_gpu=true needs a GPU to share, and trainer.device=cpu"):
        check_config(config(share_gpu=True, device="cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    shared = choose_device("cuda", 3, 1, share_gpu=True)
    assert shared.torch_device == torch.device("cuda", 0) and shared.process_group == shared.backend == SHARED_GPU
    with pytest.raises(InputError, match="local rank 3 has no GPU .* use trainer.share_gpu=true or trainer.device=cpu"):
        choose_device("cuda", 3, 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(InputError, match="is for one GPU, and 8 are visible; set CUDA_VISIBLE_DEVICES"):
        choose_device("cuda", 3, 1, share_gpu=True)
    assert choose_device("cuda", 3, 1).process_group == "cpu:gloo,cuda:nccl"


def test_auto_that_finds_no_gpu_is_refused_as_cpu_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="needs a GPU to share"):
        check_inputs(config(share_gpu=True), 4)


def test_tensor_ranks_that_share_a_gpu_capture_no_graphs_and_the_log_says_so():
    sharing = dict(share_gpu=True, device="cuda", hardware="h100")
    alone, cut = (settled(config(layout, **sharing)).config for layout in ("d4t1p1", "d2t2p1"))
    assert alone.rollout.cuda_graphs and not cut.rollout.cuda_graphs
    assert "no time or rate means anything" in sharing_line(alone) and "cuda_graphs" not in sharing_line(alone)
    assert "rollout.cuda_graphs=false: t2 adds up over the host" in sharing_line(cut)
    assert sharing_line(config()) == ""


def test_ranks_that_share_a_gpu_share_its_memory(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    h100 = hardware_by_name("h100")
    assert memory_limit(config().trainer, h100, 4, Host.here())[0] == 80e9
    share, why = memory_limit(config(share_gpu=True).trainer, h100, 4, Host.here())
    assert share == 20e9 and why.endswith("/ 4 ranks")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    h100 = hardware_by_name("h100")
    assert memory_limit(config(share_gpu=True).trainer, h100, 4, Host.here())[0] == 40e9
    assert memory_limit(config(share_gpu=True, memory_limit_gb=30).trainer, h100, 4, Host.here())[0] == 30e9
