"""Ranks on a GPU each: links and their rates, collectives that CUDA graphs hold, sums by the switch, moved samples.

The groups, channels and transfers are those of a run. On a CPU the same runs over gloo.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_checks.bench import Bench
from gpu_checks.figures import Figure, Timed, timed, told
from gpu_checks.migration import SAMPLES, STEPS, add_samples, compared, engines, finish
from gpu_checks.ranks import on_ranks
from gpu_checks.result import TOLERANCE, require
from gpu_checks.speed import random_prompts, random_weights, spec_of

from rlhfuse.fusion.intra.p2p import Channels
from rlhfuse.gen.core.model_shard import TensorParallel
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
from rlhfuse.gen.gpu.decode_graphs import CudaRecorder
from rlhfuse.gen.gpu.switch_sum import SwitchMemory, choose_parallel
from rlhfuse.gen.migration.peer_transfer import HeadPlan, receive_sequences, send_sequences
from rlhfuse.parallel.connect import GroupUse, connect
from rlhfuse.parallel.groups import GroupMaker

ROWS = 192  # of a decode step
REPEATS = 10


def check_links(bench: Bench, ranks: int) -> dict:
    """All-reduce, all-gather, sends to a neighbour and to both at once; every number arrives."""
    return on_ranks(bench, ranks, _links)[0]


def _links(bench: Bench, ranks: int) -> dict:
    rank, where, groups = bench.rank, bench.where, GroupMaker(60.0)
    group = groups.group("links", tuple(range(ranks)))
    large, small = (256 << 20, 4096) if bench.on_gpu else (64 << 10, 64)
    operations: Any = ("all_reduce", "all_gather")
    connect([GroupUse(group, operation, large // 2, torch.bfloat16) for operation in operations], where)
    figures, part = [], (ranks - 1) / ranks
    for name, size in (("all-reduce large", large), ("all-reduce small", small)):
        x = torch.full((size // 2,), rank + 1.0, dtype=torch.bfloat16, device=where)
        dist.all_reduce(x, group=group)
        require(bool((x == ranks * (ranks + 1) / 2).all()), f"{name}: wrong sums")
        x.zero_()
        seconds = _each(bench, lambda: dist.all_reduce(x, group=group)).seconds  # noqa: B023
        figures.append(Figure(name, seconds, ("all_reduce", ranks, size), bytes=2 * part * size, over="node_link"))
    whole, mine = (torch.zeros(n, dtype=torch.bfloat16, device=where) for n in (large // 2, large // 2 // ranks))
    seconds = _each(bench, lambda: dist.all_gather_into_tensor(whole, mine, group=group)).seconds
    figures.append(Figure("all-gather", seconds, ("gather", ranks, large), bytes=part * large, over="node_link"))
    pairs = [pair for one in range(ranks) for other in [(one + 1) % ranks] for pair in ((one, other), (other, one))]
    channels = Channels(rank, groups.channels("links", pairs, bench.device), where)
    channels.connect(large)
    x = torch.full((large // 2,), rank + 1.0, dtype=torch.bfloat16, device=where)

    def exchange(to: set[int], sources: set[int]) -> list[tuple[int, torch.Tensor]]:
        posted = [(source, *channels.post_receive(x.shape, x.dtype, source)) for source in sorted(sources)]
        for peer in sorted(to):
            channels.send(x, peer)
        for _, work, _ in posted:
            work.wait()
        channels.drain(lambda left: None)
        return [(source, got) for source, _, got in posted]

    both, wrong = {(rank + 1) % ranks, (rank - 1) % ranks}, 0
    ways = {
        "send to a neighbour": ({1} if rank == 0 else set(), {0} if rank == 1 else set()),
        "both ways, both neighbours": (both, both),
    }
    for name, (to, sources) in ways.items():
        wrong += sum(int((got != source + 1).sum()) for source, got in exchange(to, sources))
        seconds = timed(bench, lambda: exchange(to, sources)).seconds  # noqa: B023
        moved = max(len(to), 1) * large
        figures.append(Figure(name, seconds, ("send", moved), bytes=moved, over="node_link"))
    groups.close()
    return require(not wrong, told(*figures, wrong_numbers=wrong))


def _each(bench: Bench, work: Callable[[], Any]) -> Timed:
    return timed(bench, lambda: [work() for _ in range(REPEATS)], count=REPEATS)


def check_captured(bench: Bench, ranks: int) -> dict:
    """Sums and gathers of tensor ranks as a CUDA graph replays them: the bits of those launched one by one."""
    return on_ranks(bench, ranks, _captured, NCCL_GRAPH_REGISTER="0")[0]


def _recorded(bench: Bench, work: Callable[[], Any]) -> Callable[[], Any]:
    return CudaRecorder(bench.where).record(work) if bench.on_gpu else work


def _captured(bench: Bench, ranks: int) -> dict:
    hidden, different = 4096 if bench.on_gpu else 64, 0
    parallel = TensorParallel(GroupMaker(60.0).group("tp", tuple(range(ranks))))
    x, y = (torch.zeros(ROWS, hidden, dtype=torch.bfloat16, device=bench.where) for _ in range(2))
    whole = torch.zeros(ROWS, hidden * ranks, dtype=torch.bfloat16, device=bench.where)

    def work() -> None:
        y.copy_(x)
        whole.copy_(parallel.gather(parallel.sum(y)))

    replay = _recorded(bench, work)
    for seed in range(4):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(10 * seed + bench.rank)))
        work()
        wanted = whole.clone(), y.clone()
        whole.zero_()
        replay()
        different += sum(int((a != b).sum()) for a, b in zip((whole, y), wanted))
    sums = _recorded(bench, lambda: [parallel.sum(y) for _ in range(REPEATS)])
    seconds, moved = timed(bench, sums, count=REPEATS).seconds, 2 * (ranks - 1) / ranks * y.nbytes
    figure = Figure("recorded sum", seconds, ("step_sum", ranks, ROWS, False), bytes=moved, over="node_link")
    detail = told(figure, different=different, graph_register=os.environ.get("NCCL_GRAPH_REGISTER"))
    return require(not different, detail)


def check_switch(bench: Bench, ranks: int) -> dict:
    """Sums by the NVLink switch, recorded, against NCCL's; or why there are none."""
    return on_ranks(bench, ranks, _switch)[0]


def _switch(bench: Bench, ranks: int) -> dict:
    hidden, dtype = 4096 if bench.on_gpu else 64, torch.bfloat16
    group = GroupMaker(60.0).group("tp", tuple(range(ranks)))
    parallel, line = choose_parallel(group, "auto", bench.where, ROWS, hidden, dtype)
    if "by the NVLink switch" not in line or "not by" in line:
        return {"skipped": line}
    generator = torch.Generator().manual_seed(bench.rank)
    x, weight = (torch.randn(n, 64, generator=generator).to(dtype).to(bench.where) for n in (ROWS, hidden))
    found, wanted = parallel.product_sum(x, weight).clone(), TensorParallel(group).product_sum(x, weight)
    error = float((found - wanted).abs().max() / wanted.abs().max())
    memory = SwitchMemory(group, bench.where)
    part = memory.buffer(ROWS * hidden, dtype).zero_()
    seconds = timed(bench, _recorded(bench, lambda: [memory.sum(part) for _ in range(REPEATS)]), count=REPEATS).seconds
    moved = (1 + 1 / ranks) * part.nbytes
    figure = Figure("switch sum", seconds, ("step_sum", ranks, ROWS, True), bytes=moved, over="node_link")
    return require(error < TOLERANCE[dtype], told(figure, lines=[line], error=error))


def check_moved(bench: Bench) -> dict:
    """Half of the samples move to another GPU's engine with their cache, and end as on one that none left."""
    return on_ranks(bench, 2, _moved, bench.tiny())[0]


def _moved(bench: Bench, ranks: int, model: Any) -> dict:
    alone, engine = engines(bench, model, "float32", 2)
    wanted: dict[int, Any] = {}
    found: dict[int, Any] = {}
    for one in (alone, engine) if bench.rank == 0 else (alone,):
        add_samples(one)
    finish(alone, wanted)
    finish(engine, found, STEPS)
    moving = [seq.sample_id for seq in engine.unfinished()][: SAMPLES // 2]
    _move(bench, engine, moving)
    finish(engine, found)
    engine.scheduler.check_integrity()
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, found)
    detail = compared(wanted, everyone[0] | everyone[1], "float32") | {"moved": len(everyone[1])}
    seconds, size = _moving_seconds(bench)
    figure = Figure("migration", seconds, ("migration", size), bytes=size, over="node_link")
    return require(detail["moved"] == SAMPLES // 2, told(figure, **detail))


def _move(bench: Bench, engine: Engine, samples: list[int]) -> int:
    """From rank 0 to rank 1; bytes of keys and values on rank 0."""
    plan = HeadPlan.between((0,), (1,), engine.spec.kv_heads)
    if bench.rank == 1:
        receive_sequences(engine, plan, 1)
        return 0
    with engine.export_sequences(samples, "kv") as transfer:
        return send_sequences(transfer, plan, 0)


def _moving_seconds(bench: Bench) -> tuple[float, int]:
    """Seconds and bytes of moving the second half of long samples of four layers of 8B; the first half warms up."""
    size, samples, tokens = ("8b", 64, 1000) if bench.on_gpu else ("tiny", 4, 100)
    spec = spec_of(size, num_hidden_layers=4)
    options = EngineOptions(
        samples * (tokens // 16 + 4), max_batched_tokens=8192, kernels="torch", attention=bench.attention
    )
    weights = random_weights(spec, bench.where, torch.bfloat16)
    engine = Engine(spec, weights, options, device=bench.where, dtype=torch.bfloat16)
    if bench.rank == 0:
        for sample, prompt in enumerate(random_prompts(spec, samples, tokens, 1)):
            engine.add(sample, prompt, SamplingParams(max_tokens=40, ignore_eos=True))
        while any(seq.kv_tokens < tokens for seq in engine.unfinished()):
            engine.step()
    seconds, moved = 0.0, 0
    for half in (range(samples // 2), range(samples // 2, samples)):
        dist.barrier()
        bench.synchronize()
        start = time.perf_counter()
        moved = _move(bench, engine, list(half))
        bench.synchronize()
        seconds = time.perf_counter() - start
    return seconds, moved
