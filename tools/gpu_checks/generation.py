"""Attention in all its forms against its formula, and the engine on the device against the CPU and itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_checks.bench import DTYPES, Bench
from gpu_checks.result import TOLERANCE, relative, require

from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
from rlhfuse.models.attention.backends import choose_paged
from rlhfuse.models.attention.paged.cache import CacheShape, PagedQueries
from rlhfuse.models.attention.paged.flashinfer import obstacle as flashinfer_obstacle


def reference_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int) -> torch.Tensor:
    """Causal attention of one sequence by its formula in float64; query i stands at position offset + i."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    ahead = torch.arange(k.shape[0])[None] > torch.arange(q.shape[0])[:, None] + offset
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), v)


def check_paged(bench: Bench, kind: str, block_tokens: int, library: str | None = None) -> dict:
    """Attention over cache blocks, ours or flashinfer's, against its formula: padded decode, chunks after a prefix."""
    dtype, generator = DTYPES[kind], torch.Generator().manual_seed(3)
    heads, groups, dim = (32, 8, 128) if bench.on_gpu else (8, 2, 32)
    contexts = [1, 3000, 300, 17, 64, 1025] if bench.on_gpu else [1, 70, 17]
    rows, padding, width = len(contexts), 2, -(-max(contexts) // block_tokens) + 3
    shape = CacheShape(dtype, bench.where, heads, groups, dim, block_tokens, rows + padding)
    if library and (reason := flashinfer_obstacle(shape)):
        return {"skipped": reason}
    chosen, spare = choose_paged(shape, library or bench.attention), rows * width

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    keys, values = (random(spare + 1, block_tokens, groups, dim) for _ in range(2))
    tables = torch.full((rows + padding, width), spare, dtype=torch.int32)
    tables[:rows] = torch.randperm(spare, generator=generator).view(rows, width)
    there, sizes = tables.to(bench.where), torch.tensor(contexts + [1] * padding, dtype=torch.int32, device=bench.where)
    chunks = [min(context, 1 + 9 * number) for number, context in enumerate(contexts)]
    starts = [0, *torch.tensor(chunks).cumsum(0).tolist()]
    errors = {}
    for step, queries, padded, attend in (
        ("decode", [1] * rows, padding, chosen.kernels.decode(there, sizes)),
        ("mixed", chunks, 0, chosen.kernels.mixed(PagedQueries.of(there[:rows], starts, contexts))),
    ):
        q, wanted = random(sum(queries) + padded, heads, dim), []
        out = attend(*(x.to(bench.where) for x in (q, keys, values)))[: sum(queries)]
        for s, (count, context, own) in enumerate(zip(queries, contexts, q.split([*queries, padded]))):
            k, v = (x[tables[s].long()].flatten(0, 1)[:context] for x in (keys, values))
            wanted.append(reference_attention(own, k, v, context - count))
        errors[step] = relative(out, torch.cat(wanted))
    return require(max(errors.values()) < TOLERANCE[dtype], {"attention": chosen.line("generation"), **errors})


def greedy_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 200, (n,), generator=generator).tolist() for n in (1, 3, 7, 17, 30, 64, 5, 5)]


def greedy(model: Path, device: torch.device, dtype: torch.dtype, options: EngineOptions) -> list[dict[str, Any]]:
    """The likeliest tokens of some prompts, and their log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    return drawn(Engine.from_pretrained(model, options, device=device, dtype=dtype), greedy_prompts(), params)


def drawn(engine: Engine, prompts: list[list[int]], params: Any) -> list[dict[str, Any]]:
    """Tokens and log-probabilities of every prompt."""
    results = engine.generate(prompts, params)
    return [{"tokens": list(result.tokens), "logprobs": list(result.logprobs)} for result in results]


def engine_reference(bench: Bench, model: Path, kind: str) -> list[dict[str, Any]]:
    """What the CPU's engine says, or said where the file was written."""
    options = EngineOptions(num_blocks=1024, attention="auto")
    return bench.references.get(f"engine_{kind}", lambda: greedy(model, torch.device("cpu"), DTYPES[kind], options))


def agreement(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens that are equal up to each sample's first other one; the largest difference of their log-probabilities."""
    equal, total, difference = 0, 0, 0.0
    for a, b in zip(ours, theirs, strict=True):
        total += len(a["tokens"])
        same = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"])) if x != y), len(a["tokens"]))
        equal += same
        difference = max([difference, *(abs(x - y) for x, y in zip(a["logprobs"][:same], b["logprobs"][:same]))])
    return {"tokens": total, "equal_tokens": equal, "max_logprob_difference": difference}


def check_engine(bench: Bench, kind: str, block_tokens: int) -> dict:
    """Greedy tokens on the CPU and on the device. float32: equal. bfloat16: log-probabilities close where equal."""
    model, dtype = bench.tiny(), DTYPES[kind]
    options = EngineOptions(1024 * 16 // block_tokens, block_tokens, attention=bench.attention)
    ours = engine_reference(bench, model, kind)
    detail = agreement(ours, greedy(model, bench.where, dtype, replace(options, kernels="torch")))
    equal, total = detail["equal_tokens"], detail["tokens"]
    enough = equal == total if dtype == torch.float32 else equal >= total // 4  # after a near tie all differ
    good = enough and detail["max_logprob_difference"] < 2 * TOLERANCE[dtype]
    return require(good, detail | {"block_tokens": block_tokens})


def check_graphs(bench: Bench, kind: str) -> dict:
    """Samples with CUDA graphs against the same without, before and after the cache was given back."""
    model, dtype = bench.tiny(), DTYPES[kind]
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 200, (n,), generator=generator).tolist() for n in (1, 9, 30, 5, 64, 3, 3, 8, 2)]
    params = [SamplingParams(max_tokens=10 + 4 * i, ignore_eos=True) for i in range(len(prompts))]  # batches shrink
    graphs, eager = (
        Engine.from_pretrained(
            model,
            EngineOptions(64, 256, kernels="torch", cuda_graphs=on, attention=bench.attention),
            device=bench.where,
            dtype=dtype,
        )
        for on in (True, False)
    )
    wanted, again = drawn(eager, prompts, params), []
    for _ in range(2):
        again += drawn(graphs, prompts, params)
        graphs.pause()
        graphs.resume()
    detail = agreement(2 * wanted, again)
    detail["capture_seconds"] = graphs.forward.recording_seconds
    detail["captured_shapes"] = graphs.forward.recorded_shapes
    good = detail["equal_tokens"] >= detail["tokens"] * 0.9 and detail["max_logprob_difference"] < TOLERANCE[dtype]
    return require(good, detail)
