"""The cases that generation.py measures: each is a workload, what is asked of the engines, and the figures that come
of the answers. A case is a function (Bench) -> its part of the JSON object; seconds and bytes unless said.

Prompts are new in every round, the same for all engines, so that no prefix cache answers for the model.
Knows nothing of processes: it asks workers of the Fleet.
"""

from __future__ import annotations

import csv
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generation_peers import LIMITS, OWN, Fleet, Model, medians, ratios
from rich.console import Console

from rlhfuse.config.spec import ModelSpec
from rlhfuse.errors import InputError

TRACE = Path(__file__).resolve().parents[1] / "../shared/data/traces/arxiv_llama2tok.csv"
PROFILE_ROWS = 12
LONG_ROUNDS = 3  # of B at most: static batches of long sequences take minutes
DEAR_TOKENS = 2**14  # in the prompts of a point of F

Rows = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How large the cases are: FULL is the measurement, QUICK shows in a minute that it runs."""

    sequences: int = 64
    prompt_tokens: int = 16
    response_tokens: int = 128
    requests: int = 256  # of the long-tailed lengths
    context: int = 1024
    small_batches: tuple[int, ...] = (1, 2, 4, 8)
    decode_steps: int = 32  # timed, at each point of E and F
    limit_batches: tuple[int, ...] = (1, 16, 64)
    limit_context: int = 128
    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    context_batch: int = 8
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    batch_context: int = 64
    bandwidth_bytes: int = 2**31
    gemm_size: int = 2048


FULL = Sizes()
QUICK = Sizes(
    sequences=16,
    response_tokens=16,
    requests=32,
    context=96,
    small_batches=(1, 2),
    decode_steps=8,
    limit_batches=(1, 4),
    limit_context=32,
    contexts=(32, 128),
    context_batch=2,
    batches=(1, 8),
    batch_context=16,
    bandwidth_bytes=2**26,
    gemm_size=512,
)


@dataclass(frozen=True)
class Bench:
    """What every case is given."""

    fleet: Fleet
    sizes: Sizes
    seed: int
    models: dict[str, Model]  # small, large, long
    trace: Path
    screen: Console

    def prompts(self, count: int, tokens: int, number: int) -> list[list[int]]:
        draw = random.Random(f"{self.seed} {count} {tokens} {number}")
        return [[draw.randrange(8, 500) for _ in range(tokens)] for _ in range(count)]

    def generate(self, lengths: list[int], number: int) -> dict[str, Any]:
        """The request of a whole generation: short prompts, these response lengths."""
        prompts = self.prompts(len(lengths), self.sizes.prompt_tokens, number)
        seed = self.seed + number + 1
        return {"do": "generate", "prompts": prompts, "lengths": lengths, "at_once": self.sizes.sequences, "seed": seed}

    def decode(self, batch: int, context: int, number: int) -> dict[str, Any]:
        """The request of decode steps that begin at a context."""
        prompts = self.prompts(batch, context, number)
        return {"do": "decode", "prompts": prompts, "steps": self.sizes.decode_steps, "seed": self.seed + number + 1}

    def trial(self, kind: str, number: int) -> dict[str, Any]:
        """The request by which configurations are compared: half of the throughput case, or of a small batch."""
        count = self.sizes.sequences if kind == "many" else 2
        return self.generate([self.sizes.response_tokens // 2] * count, number)


def throughput(bench: Bench) -> Rows:
    """A: all sequences of one length at once, beside the matrix products of the same steps alone."""
    sizes, model = bench.sizes, bench.models["small"]
    lengths = [sizes.response_tokens] * sizes.sequences
    products = {"do": "products", "shapes": product_shapes(model.spec), "rows": sizes.sequences}

    def request(peer: str, number: int) -> dict[str, Any]:
        if peer == LIMITS:
            return {**products, "repeats": 4 * sizes.decode_steps, "seed": bench.seed}
        return bench.generate(lengths, number)

    workers = {peer: bench.fleet.worker(peer, model, "many") for peer in bench.fleet.pythons}
    answers = bench.fleet.rounds(workers, request)
    step = medians({LIMITS: answers.pop(LIMITS)}, "step_seconds")[LIMITS]
    result = _generated(bench, answers, sum(lengths))
    limit = sizes.sequences / step
    result["gemm_only"] = {
        "step_seconds": step,
        "tokens_per_second": limit,
        "flops_per_second": 2 * sum(n * k for n, k in product_shapes(model.spec)) * limit,
        "fraction_reached": {peer: row["tokens_per_second"] / limit for peer, row in result["engines"].items()},
    }
    return {"sequences": sizes.sequences, "prompt_tokens": sizes.prompt_tokens, "response_tokens": lengths[0], **result}


def long_tail(bench: Bench) -> Rows:
    """B: many requests with real lengths, so many at a time."""
    sizes = bench.sizes
    lengths = trace_lengths(bench.trace, sizes.requests, sizes.context - sizes.prompt_tokens, bench.seed)
    rounds = min(LONG_ROUNDS, bench.fleet.count)
    answers = bench.fleet.rounds(
        _engines(bench, "small", "any"), lambda _, number: bench.generate(lengths, number), count=rounds
    )
    ordered = sorted(lengths)
    facts = {
        "trace": f"{bench.trace.name}:num_decode_tokens, {len(lengths)} drawn, the longest scaled to the context",
        "requests": len(lengths),
        "at_once": bench.sizes.sequences,
        "lengths": {"p50": ordered[len(ordered) // 2], "p99": ordered[len(ordered) * 99 // 100], "max": ordered[-1]},
    }
    return {**facts, **_generated(bench, answers, sum(lengths))}


def small_batches(bench: Bench) -> Rows:
    """C: seconds per token of each sequence when few run."""
    rows = []
    for batch in bench.sizes.small_batches:
        lengths = [bench.sizes.response_tokens] * batch
        answers = bench.fleet.rounds(_engines(bench, "small", "few"), lambda _, number: bench.generate(lengths, number))
        for answer in (answer for each in answers.values() for answer in each):
            answer["step_milliseconds"] = 1e3 * answer["seconds"] / bench.sizes.response_tokens
        found = medians(answers, "step_milliseconds")
        rows.append({"batch": batch, "step_milliseconds": found, "ratios": ratios(answers, "step_milliseconds")})
        bench.screen.print(f"  batch {batch}: {_listed(found, 'ms/step')}", highlight=False)
    return {"rows": rows}


def overhead(bench: Bench) -> Rows:
    """D: the part of a decode step that is not the model's forward pass, and the functions that take the time."""
    model, sizes = bench.models["small"], bench.sizes
    rows = []
    for batch, kind in ((sizes.sequences, "many"), (1, "few")):
        worker = {OWN: bench.fleet.worker(OWN, model, kind)}
        asked = {"do": "share", "steps": 2 * sizes.decode_steps, "seed": bench.seed}
        answers = bench.fleet.rounds(
            worker, lambda _, number: {**asked, "prompts": bench.prompts(batch, sizes.prompt_tokens, number)}
        )[OWN]
        row = {key: statistics.median(answer[key] for answer in answers) for key in answers[0]}
        prompts = bench.prompts(batch, sizes.prompt_tokens, len(answers))
        profile = worker[OWN].ask(**{**asked, "do": "profile", "prompts": prompts, "top": PROFILE_ROWS})
        rows.append({"batch": batch, **row, "profile": profile["functions"]})
        bench.screen.print(
            f"  batch {batch}: {1e3 * row['step_seconds']:.2f} ms/step, {row['share_outside']:.1%} of it outside the "
            "forward pass; by themselves, under the profiler:",
            highlight=False,
        )
        for entry in profile["functions"]:
            said = f"{entry['microseconds']:9.1f} us  {entry['calls']:7.1f} calls  {entry['function']}"
            bench.screen.print(f"    {said}", highlight=False, markup=False)
    return {"rows": rows}


def machine_limit(bench: Bench) -> Rows:
    """E: decode steps of a larger model against max(bytes / bandwidth, operations / GEMM rate)."""
    model, sizes = bench.models["large"], bench.sizes
    spec, context = model.spec, sizes.limit_context + sizes.decode_steps // 2
    # A buffer as large as the weights may lie in a cache: so may the weights, and the higher bandwidth counts.
    buffers = [sizes.bandwidth_bytes, step_bytes(spec, 0, 0)]
    machine = {"do": "machine", "buffers": buffers, "gemm_size": sizes.gemm_size, "repeats": 5}
    workers = {**_engines(bench, "large", "any"), LIMITS: bench.fleet.worker(LIMITS, model)}
    seen, rows = [], []
    for batch in sizes.limit_batches:
        answers = bench.fleet.rounds(
            workers,
            lambda peer, number: machine if peer == LIMITS else bench.decode(batch, sizes.limit_context, number),
        )
        seen += answers.pop(LIMITS)
        products = {"do": "products", "shapes": product_shapes(spec), "rows": batch, "repeats": 10, "seed": bench.seed}
        rows.append(
            {
                "batch": batch,
                "context": context,
                "bytes": step_bytes(spec, batch, context),
                "operations": step_flops(spec, batch, context),
                "gemm_only_seconds": workers[LIMITS].ask(**products)["step_seconds"],
                "step_seconds": medians(answers, "step_seconds"),
                "ratios": ratios(answers, "step_seconds"),
            }
        )
    bandwidths = [max(rates) for rates in zip(*(answer["bytes_per_second"] for answer in seen))]
    rate = max(answer["flops_per_second"] for answer in seen)
    bench.screen.print(f"  {max(bandwidths) / 1e9:.1f} GB/s, {rate / 1e9:.0f} GFLOP/s", highlight=False)
    for row in rows:
        row |= _against(row, max(bandwidths), rate)
        reached = ", ".join(f"{peer} {part:.0%}" for peer, part in row["fraction_of_limit"].items())
        said = f"  batch {row['batch']}: limit {1e3 * row['limit_seconds']:.2f} ms ({row['bound']}), reached: {reached}"
        bench.screen.print(said, highlight=False)
    return {
        "parameters": spec.parameters(),
        "bandwidth": [{"buffer_bytes": size, "bytes_per_second": found} for size, found in zip(buffers, bandwidths)],
        "gemm": {"size": sizes.gemm_size, "flops_per_second": rate},
        "rows": rows,
    }


def _against(row: Rows, bandwidth: float, rate: float) -> Rows:
    """A step beside the machine's limit, in bytes per second and operations per second."""
    memory, arithmetic = row["bytes"] / bandwidth, row["operations"] / rate
    limit = max(memory, arithmetic)
    return {
        "bound": "memory" if memory >= arithmetic else "arithmetic",
        "limit_seconds": limit,
        "fraction_of_limit": {peer: limit / seconds for peer, seconds in row["step_seconds"].items()},
    }


def curves(bench: Bench) -> Rows:
    """F: seconds of a decode step as the context grows, and as the batch grows."""
    sizes = bench.sizes
    by_context = [(sizes.context_batch, context) for context in sizes.contexts]
    by_batch = [(batch, sizes.batch_context) for batch in sizes.batches]
    return {
        "by_context": [_point(bench, batch, context) for batch, context in by_context],
        "by_batch": [_point(bench, batch, context) for batch, context in by_batch],
    }


CASES = {
    "A": throughput,
    "B": long_tail,
    "C": small_batches,
    "D": overhead,
    "E": machine_limit,
    "F": curves,
}


def product_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """(outputs, inputs) of each matrix product of a step, in order."""
    heads_dim = spec.heads * spec.head_dim
    qkv = heads_dim + 2 * spec.kv_heads * spec.head_dim
    layer = [(qkv, spec.hidden), (spec.hidden, heads_dim), (2 * spec.mlp, spec.hidden), (spec.hidden, spec.mlp)]
    return layer * spec.layers + [(spec.vocab, spec.hidden)]


def step_bytes(spec: ModelSpec, batch: int, context: int) -> int:
    """That a float32 decode step must move: weights once (of the embedding only the rows looked up), KV once."""
    weights = spec.layers * spec.layer_parameters + spec.hidden + spec.embedding_parameters + batch * spec.hidden
    return 4 * weights + batch * (context + 1) * spec.kv_bytes_per_token(4)


def step_flops(spec: ModelSpec, batch: int, context: int) -> int:
    attention = 4 * spec.layers * spec.heads * spec.head_dim * context
    return batch * (2 * sum(n * k for n, k in product_shapes(spec)) + attention)


def trace_lengths(path: Path, count: int, longest: int, seed: int) -> list[int]:
    """`count` response lengths drawn from a trace, scaled so that the longest of them is `longest`."""
    if not path.exists():
        raise InputError(f"--trace {path} is not there; give a CSV file with a column num_decode_tokens")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    try:
        known = [int(row["num_decode_tokens"]) for row in rows]
    except (KeyError, ValueError) as error:
        raise InputError(f"--trace {path}: num_decode_tokens is not a column of whole numbers ({error})") from None
    if len(known) < count:
        raise InputError(f"--trace {path} holds {len(known)} requests, {count} are needed; give a longer one")
    drawn = random.Random(seed).sample(known, count)
    return [max(1, round(length * longest / max(drawn))) for length in drawn]


def _engines(bench: Bench, model: str, kind: str) -> dict[str, Any]:
    return {peer: bench.fleet.worker(peer, bench.models[model], kind) for peer in bench.fleet.engines}


def _generated(bench: Bench, answers: dict[str, list[dict[str, Any]]], tokens: int) -> Rows:
    for peer, rows in answers.items():
        for answer in rows:
            assert answer["tokens"] == tokens, f"{peer} made {answer['tokens']} tokens of {tokens}"
    engines = {
        peer: {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "round_seconds": [answer["seconds"] for answer in answers[peer]],
        }
        for peer, seconds in medians(answers, "seconds").items()
    }
    rates = {peer: row["tokens_per_second"] for peer, row in engines.items()}
    bench.screen.print(f"  {_listed(rates, 'tokens/s')}", highlight=False)
    return {"tokens": tokens, "engines": engines, "ratios": ratios(answers, "seconds")}


def _point(bench: Bench, batch: int, context: int) -> Rows:
    """One point of a curve. Long prompts make it dear: then one round, which they themselves warm up for."""
    dear = batch * context > DEAR_TOKENS
    count = 1 if dear else min(bench.fleet.count, 3)
    answers = bench.fleet.rounds(
        _engines(bench, "long", "any"),
        lambda _, number: bench.decode(batch, context, number),
        count=count,
        warm_up=not dear,
    )
    found = {peer: 1e3 * seconds for peer, seconds in medians(answers, "step_seconds").items()}
    bench.screen.print(f"  batch {batch}, context {context}: {_listed(found, 'ms/step')}", highlight=False)
    return {"batch": batch, "context": context, "rounds": count, "step_milliseconds": found}


def _listed(figures: dict[str, float], unit: str) -> str:
    return ", ".join(f"{peer} {figure:,.4g}" for peer, figure in figures.items()) + f" {unit}"
