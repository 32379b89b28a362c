"""Speed of the generation engine beside vLLM and transformers on one CPU machine, taken in turns.

    benchmarks/setup_peers.sh vllm .venv-vllm                makes vLLM's environment, apart from this one
    python benchmarks/generation.py --vllm-python .venv-vllm/bin/python

The same random Llama, threads, prompts, forced lengths and sampling (temperature 1, whole vocabulary) for all; each
engine is a process of its own, stopped while another is measured, in the best of the configurations that a short trial
compares. Prompts are new in each round, so no prefix cache answers for a model.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from generation_engines import SPARE
from generation_fleet import LIMITS, OWN, Fleet, Model
from harness import (
    TRACE,
    Figure,
    Measurement,
    counting,
    named,
    options,
    peer_python,
    take_turns,
    trace_lengths,
)
from random_models import write_llama

from rlhfuse.base.errors import run_program
from rlhfuse.config.spec import ModelSpec

HEAD_DIM = 64
# 4.5M and 100M parameters
SMALL = dict(hidden_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2)
SMALL |= dict(intermediate_size=688, vocab_size=512)
WORDS = dict(vocab_size=32_000)
LARGE = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4)
LARGE |= dict(intermediate_size=2048, vocab_size=16384)
GOALS = {("A", "vllm"): 1.2, ("A", "transformers"): 1.7, ("B", "vllm"): 1.5, ("B", "transformers"): 5.0}
GOALS |= {("A.vocabulary", "vllm"): 1.7, ("A.greedy", "vllm"): 1.7, ("B", "vllm_ngrams"): 2.2}
SPECULATION = {  # vLLM's own, without a draft model
    "speculative_config": dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=2)
}
GUESSING = "vllm_ngrams"  # vLLM with it, in its best configuration for any sequences
LIMIT_GOAL = 0.6  # of the machine's limit reached by one sequence of the large model

LONG_ROUNDS = 3  # of B at most: static batches of long sequences take minutes

Asked = Callable[[int], dict[str, Any]]  # the request of a round


@dataclass(frozen=True)
class Sizes:
    """How large the cases are."""

    sequences: int = 64
    prompt_tokens: int = 16
    response_tokens: int = 128
    requests: int = 256  # of the long-tailed lengths
    context: int = 1024
    decode_steps: int = 32  # timed, at each point of E
    limit_batches: tuple[int, ...] = (1, 16, 64)
    limit_context: int = 128
    bandwidth_bytes: int = 2**31
    gemm_size: int = 2048


QUICK = Sizes(16, 16, 16, 32, 96, 8, (1, 4), 32, 2**26, 512)


@dataclass(frozen=True)
class Bench:
    """What every case is given; a case adds its figures and tables to the measurement."""

    fleet: Fleet
    sizes: Sizes
    seed: int
    models: dict[str, Model]  # small, words, large
    lengths: list[int]  # long-tailed, of B
    measurement: Measurement

    def prompts(self, count: int, tokens: int, number: int) -> list[list[int]]:
        draw = random.Random(f"{self.seed} {count} {tokens} {number}")
        return [[draw.randrange(8, 500) for _ in range(tokens)] for _ in range(count)]

    def generate(self, lengths: Sequence[int], number: int) -> dict[str, Any]:
        """The request of a whole generation: short prompts, these response lengths."""
        prompts, seed = self.prompts(len(lengths), self.sizes.prompt_tokens, number), self.seed + number + 1
        return dict(do="generate", prompts=prompts, lengths=lengths, at_once=self.sizes.sequences, seed=seed)

    def decode(self, batch: int, context: int, number: int) -> dict[str, Any]:
        """The request of decode steps that begin at a context."""
        prompts, seed = self.prompts(batch, context, number), self.seed + number + 1
        return dict(do="decode", prompts=prompts, steps=self.sizes.decode_steps, seed=seed)

    def trial(self, kind: str, number: int) -> dict[str, Any]:
        """The request by which configurations are compared: half of the throughput case, or of a small batch."""
        count = self.sizes.sequences if kind == "many" else 2
        return self.generate([self.sizes.response_tokens // 2] * count, number)

    def turns(
        self, model: str, kind: str, request: Asked, rounds: int, warm_up: bool = True, guessing: bool = False
    ) -> dict[str, list[float]]:
        """Seconds of every engine, by round; of decode steps those of one. `guessing`: of vLLM with n-grams too."""

        def side(peer: str, kind: str) -> Callable[[int], float]:
            return lambda number: self.fleet.ask(peer, self.models[model], kind, **request(number))["seconds"]

        sides = {peer: side(peer, kind) for peer in self.fleet.engines}
        if guessing and "vllm" in sides:
            plain = self.fleet.chosen["vllm"][kind]
            guesses = replace(plain, name=f"{plain.name}, n-grams", arguments={**plain.arguments, **SPECULATION})
            self.fleet.chosen["vllm"]["guessing"] = guesses
            sides[GUESSING] = side("vllm", "guessing")
        return take_turns(sides, rounds, warm_up)

    def compare(self, case: str, seconds: dict[str, list[float]], scale: float, unit: str) -> list[str]:
        """Figures of every engine and of the ratios; cells of a table: medians, then ratios."""
        own, cells, ratios = seconds[OWN], [], []
        for peer, each in seconds.items():
            values = [scale / one if unit == "tokens/s" else scale * one for one in each]
            figure = self.measurement.figure(f"{case.lower()}.{peer}", Figure.of(values, unit))
            cells.append(f"{figure.value:,.4g}")
            if peer != OWN:
                ratio, goal = Figure.ratio(each, own), GOALS.get((case, peer))
                self.measurement.figure(f"{case.lower()}.over_{peer}", ratio.at_least(goal) if goal else ratio)
                ratios.append(ratio.text())
        return [*cells, *ratios]

    def heads(self, engines: Iterable[str] = ()) -> list[str]:
        engines = [*(engines or self.fleet.engines)]
        return [*engines, *(f"over {peer}" for peer in engines if peer != OWN)]


def throughput(bench: Bench) -> None:
    """A: 64 sequences of one length at once, beside the matrix products of the same steps alone; a large vocabulary"""
    sizes, rows = bench.sizes, []
    lengths, tokens = [sizes.response_tokens] * sizes.sequences, sizes.response_tokens * sizes.sequences
    for case, model, greedy in (("A", "small", False), ("A.vocabulary", "words", False), ("A.greedy", "words", True)):
        spec = bench.models[model].spec
        request = lambda i: bench.generate(lengths, i) | {"greedy": greedy}  # noqa: E731
        seconds = bench.turns(model, "many", request, bench.fleet.rounds)
        products = dict(shapes=product_shapes(spec), rows=sizes.sequences, repeats=4 * sizes.decode_steps)
        step = bench.fleet.ask(LIMITS, bench.models[model], "any", "products", **products, seed=1)["step_seconds"]
        row = bench.compare(case, seconds, tokens, "tokens/s")
        limit = bench.measurement.figure(f"{case.lower()}.gemm_only", sizes.sequences / step, "tokens/s").value
        share = tokens / statistics.median(seconds[OWN]) / limit
        bench.measurement.figure(f"{case.lower()}.of_gemm_only", share)
        name = f"{sizes.sequences} x {lengths[0]}, {spec.vocab:,} words{', greedy' if greedy else ''}"
        rows.append([name, *row, f"{limit:,.4g}", f"{share:.0%}"])
    head = ["tokens/s of", *bench.heads(), "products alone", "of it"]
    bench.measurement.table("a", "A: throughput", head, rows)


def long_tail(bench: Bench) -> None:
    """B: 256 requests with real long-tailed lengths, 64 at a time; transformers in static batches"""
    lengths, rounds = bench.lengths, min(LONG_ROUNDS, bench.fleet.rounds)
    model = "policy" if "policy" in bench.models else "small"
    seconds = bench.turns(model, "any", lambda i: bench.generate(lengths, i), rounds, guessing=True)
    row, ordered = bench.compare("B", seconds, sum(lengths), "tokens/s"), sorted(lengths)
    p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    name = f"{model}, p50 {p50}, p99 {p99}, max {ordered[-1]}"
    bench.measurement.table("b", "B: long-tailed lengths", ["tokens/s of", *bench.heads(seconds)], [[name, *row]])


def machine_limit(bench: Bench) -> None:
    """E: decode steps of a 100M-parameter model against max(bytes / memory bandwidth, operations / GEMM rate)"""
    model, sizes, rows = bench.models["large"], bench.sizes, []
    spec, context = model.spec, sizes.limit_context + sizes.decode_steps // 2
    # a buffer as large as the weights may lie in a cache: so may the weights, and the higher bandwidth counts
    buffers = [sizes.bandwidth_bytes, step_bytes(spec, 0, 0)]
    machine = bench.fleet.ask(LIMITS, model, "any", "machine", buffers=buffers, gemm_size=sizes.gemm_size, repeats=9)
    bandwidth, rate = max(machine["bytes_per_second"]), machine["flops_per_second"]
    bench.measurement.figure("e.bandwidth", bandwidth / 1e9, "GB/s")
    bench.measurement.figure("e.gemm", rate / 1e9, "GFLOP/s")
    for batch in sizes.limit_batches:
        steps = bench.turns("large", "any", lambda i: bench.decode(batch, sizes.limit_context, i), bench.fleet.rounds)
        memory, arithmetic = step_bytes(spec, batch, context) / bandwidth, step_flops(spec, batch, context) / rate
        limit = max(memory, arithmetic)
        for peer, each in steps.items():
            share = Figure.of([limit / one for one in each])
            goal = peer == OWN and batch == 1
            bench.measurement.figure(f"e.batch{batch}.{peer}.of_limit", share.at_least(LIMIT_GOAL) if goal else share)
        bound = f"{1e3 * limit:.2f} ms ({'memory' if memory >= arithmetic else 'arithmetic'})"
        shares = [f"{limit / statistics.median(each):.0%}" for each in steps.values()]
        rows.append([str(batch), bound, *bench.compare(f"E.batch{batch}", steps, 1e3, "ms"), *shares])
    head = ["batch", "limit", *bench.heads(), *(f"{peer} of the limit" for peer in bench.fleet.engines)]
    bench.measurement.table("e", "E: milliseconds of a step beside the machine's limit", head, rows)


CASES = {"A": throughput, "B": long_tail, "E": machine_limit}


def main() -> None:
    arguments = parse_arguments()
    cases, sizes = arguments.cases, QUICK if arguments.quick else Sizes()
    measurement = Measurement("generation", arguments)
    pythons = {OWN: sys.executable}
    if arguments.vllm_python is None:
        measurement.say("vllm is left out: no --vllm-python; benchmarks/setup_peers.sh makes its environment")
    else:
        pythons["vllm"] = peer_python("--vllm-python", arguments.vllm_python, "vllm")
    pythons |= {"transformers": sys.executable, LIMITS: sys.executable}
    lengths: list[int] = []
    if "B" in cases and arguments.trace is None and not TRACE.exists():
        cases.remove("B")
        measurement.say(f"B is left out: no --trace, and {TRACE.name} is not beside the repository")
    elif "B" in cases:
        context = ModelSpec.from_config(Path(arguments.policy)).context if arguments.policy else sizes.context
        longest = sizes.prompt_tokens, min(context, sizes.context) - sizes.prompt_tokens
        lengths = list(trace_lengths(arguments.trace or TRACE, sizes.requests, *longest, arguments.seed).output)
    rounds = 1 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory() as name:
        models = write_models(Path(name), sizes, arguments.quick, arguments.seed)
        if arguments.policy:
            policy = Path(arguments.policy).resolve()
            models["policy"] = replace(models["small"], folder=policy, spec=ModelSpec.from_config(policy))
        with Fleet(pythons, arguments.threads, rounds, Path(name)) as fleet:
            bench = Bench(fleet, sizes, arguments.seed, models, lengths, measurement)
            tried = fleet.choose(models["small"], None if arguments.quick else bench.trial, measurement.say)
            measurement.table("trial", "Configurations", ("engine", "configuration", "many", "few"), tried)
            for case in cases:
                measurement.say(CASES[case].__doc__ or case)
                if case == "E":
                    fleet.close()  # another model: the processes of the last one need their memory no more
                CASES[case](bench)
            chosen = {peer: {kind: one.name for kind, one in kinds.items()} for peer, kinds in fleet.chosen.items()}
            measurement.facts(threads=arguments.threads, versions=fleet.versions, configurations=chosen)
    measurement.finish()


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, rounds=5)
    parser.add_argument("--cases", default=",".join(CASES), help="[%(default)s]")
    parser.add_argument("--vllm-python", metavar="FILE", help="Python of vLLM's environment; none leaves vLLM out")
    parser.add_argument("--threads", type=counting, default=os.cpu_count(), help="of each engine")
    parser.add_argument("--trace", metavar="FILE", help=f"requests' lengths, for B [{TRACE.name}]")
    parser.add_argument("--policy", metavar="FOLDER", help="a trained model for B, as speculation.py keeps [random]")
    arguments = parser.parse_args()
    arguments.cases = named("--cases", arguments.cases.upper(), {name: name for name in CASES})
    return arguments


def write_models(folder: Path, sizes: Sizes, quick: bool, seed: int) -> dict[str, Model]:
    """Random checkpoints in Hugging Face layout: small for A and B, large for E."""
    limit, most = sizes.limit_context + sizes.decode_steps + SPARE, max(sizes.limit_batches)
    models = {}
    for name, shape, context, max_sequences in (
        ("small", SMALL, sizes.context, sizes.sequences),
        ("words", SMALL | WORDS, sizes.context, sizes.sequences),
        ("large", SMALL if quick else LARGE, limit, most),
    ):
        made = write_llama(folder / name, seed, **shape, head_dim=HEAD_DIM, max_position_embeddings=context)
        models[name] = Model(made, ModelSpec.from_config(made), max_sequences, max_sequences * context)
    return models


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


if __name__ == "__main__":
    run_program(main)
