"""Triton kernels on the device against their formulas; on a CPU they are interpreted."""

from __future__ import annotations

from typing import Any

import torch
from gpu_checks.bench import DTYPES, Bench
from gpu_checks.generation import reference_attention
from gpu_checks.result import TOLERANCE, relative, require


def check_paged_attention(bench: Bench, kind: str, block_tokens: int) -> dict:
    """Decode and mixed steps: short and long contexts, blocks in any order, chunks after a prefix."""
    from rlhfuse.models.gpu import paged_attention as kernels

    dtype, generator = DTYPES[kind], torch.Generator().manual_seed(8)
    heads, groups, dim = (32, 8, 128) if bench.on_gpu else (8, 2, 32)
    contexts = [1, 3000, 300, 17, 64, 1025] if bench.on_gpu else [1, 70, 17]
    width = -(-max(contexts) // block_tokens)
    blocks = len(contexts) * width
    keys, values = (torch.randn(blocks, block_tokens, groups, dim, generator=generator).to(dtype) for _ in range(2))
    tables = torch.randperm(blocks, generator=generator).view(len(contexts), width).to(torch.int32)
    processors = torch.cuda.get_device_properties(0).multi_processor_count if bench.on_gpu else 4
    counters = kernels.DecodeCounters(bench.where, 64 * groups)
    errors, chunks = {}, [min(context, 1 + 9 * number) for number, context in enumerate(contexts)]
    for name, queries in (("decode", [1] * len(contexts)), ("mixed", chunks)):
        starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        q = torch.randn(sum(queries), heads, dim, generator=generator).to(dtype)
        sizes = torch.tensor(contexts, dtype=torch.int32)
        there = [x.to(bench.where) for x in (q, keys, values, tables, sizes, starts)]
        common: dict[str, Any] = dict(zip(("q", "keys", "values", "tables", "contexts"), there))
        common |= {"counters": counters, "processors": processors}
        if name == "decode":
            out = kernels.decode(**common)
        else:
            out = kernels.mixed(**common, starts=there[-1], most_queries=max(queries))
        wanted = []
        for s, context in enumerate(contexts):
            k, v = (x[tables[s].long()].flatten(0, 1)[:context] for x in (keys, values))
            wanted.append(reference_attention(q[starts[s] : starts[s + 1]], k, v, context - queries[s]))
        errors[name] = relative(out, torch.cat(wanted))
    return require(max(errors.values()) < TOLERANCE[dtype], errors)


def check_linear_logprobs(bench: Bench, kind: str) -> dict:
    """Log-probability, entropy and gradients over tiles of logits against the whole matrix in float64."""
    import torch.distributed as dist

    from rlhfuse.models.linear_logprobs import TileLimits, VocabularyShard, linear_logprobs

    dtype, generator = DTYPES[kind], torch.Generator().manual_seed(9)
    rows, hidden, vocab, padded = (700, 512, 32000, 32064) if bench.on_gpu else (20, 32, 180, 192)
    x = torch.randn(rows, hidden, generator=generator).to(dtype)
    weight = (torch.randn(padded, hidden, generator=generator) * hidden**-0.5).to(dtype)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    here = [t.double().requires_grad_(True) for t in (x, weight)]
    there = [t.to(bench.where).detach().requires_grad_(True) for t in (x, weight)]
    logs = (here[0] @ here[1][:vocab].t() / 0.7).log_softmax(-1)
    wanted = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    with bench.one_rank():
        assert dist.group.WORLD is not None, "a process group has just been made"
        shard = VocabularyShard.of(there[1], vocab, dist.group.WORLD)
        limits = TileLimits(4 << 20, 1 << 20) if bench.on_gpu else TileLimits(8 << 10, 4 << 10)
        found = linear_logprobs(there[0], there[1], targets.to(bench.where), shard, 0.7, True, limits)
        for logprobs, entropy in (wanted, found):
            (logprobs.sum() + 0.1 * entropy.sum()).backward()
    errors = {name: relative(a, b) for name, a, b in zip(("logprobs", "entropy"), found, wanted)}
    errors |= {name: relative(a.grad, b.grad) for name, a, b in zip(("dx", "dweight"), there, here)}
    return require(max(errors.values()) < TOLERANCE[dtype], errors)
