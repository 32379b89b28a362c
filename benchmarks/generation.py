"""Speed of the generation engine beside vLLM and transformers on one CPU machine, taken in turns.

    benchmarks/setup_peers.sh vllm .venv-vllm                makes vLLM's environment, apart from this one
    python benchmarks/generation.py --vllm-python .venv-vllm/bin/python

The same random Llama, threads, prompts, forced lengths and sampling (temperature 1, whole vocabulary) for all; each
engine is a process of its own, stopped while another is measured, in the best of the configurations that a short trial
compares. Prompts are new in each round, so no prefix cache answers for a model.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import TRACE, Figure, Measurement, counting, named, options, peer_python, take_turns, trace_lengths
from processes import Worker, environment
from random_models import write_llama

from rlhfuse.config.spec import ModelSpec
from rlhfuse.tools.program import run_program

OWN = "rlhfuse"
SDPA_STATIC = {"attn_implementation": "sdpa", "cache_implementation": "static"}
OF_ENGINES = {  # configurations by name, arguments as the engine's class in generation_engines.py takes them
    OWN: {f"blocks of {n}": {"block_tokens": n, "max_batched_tokens": 2048} for n in (16, 32)},
    "transformers": {
        "sdpa, dynamic cache": {"attn_implementation": "sdpa"},
        "eager attention, dynamic cache": {"attn_implementation": "eager"},
        "sdpa, static cache": SDPA_STATIC,
        "sdpa, static cache, compiled": {**SDPA_STATIC, "compile": True},
    },
    "vllm": {
        "eager": {"enforce_eager": True},
        "eager, no prefix cache": {"enforce_eager": True, "enable_prefix_caching": False},
        "eager, blocks of 32 tokens": {"enforce_eager": True, "block_size": 32},
        "torch.compile": {"enforce_eager": False},
    },
}
HEAD_DIM = 64
# 4.5M parameters
SMALL = dict(hidden_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2)
SMALL |= dict(intermediate_size=688, vocab_size=512)
WORDS = dict(vocab_size=32_000)
GOALS = {("A", "vllm"): 1.2, ("A", "transformers"): 1.7, ("B", "vllm"): 1.5, ("B", "transformers"): 5.0}
GOALS |= {("A.vocabulary", "vllm"): 1.7, ("A.greedy", "vllm"): 1.7, ("B", "vllm_ngrams"): 2.2}
SPECULATION = {  # vLLM's own, without a draft model
    "speculative_config": dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=2)
}
GUESSING = "vllm_ngrams"  # vLLM with it, in its best configuration for any sequences

LONG_ROUNDS = 3  # of B at most: static batches of long sequences take minutes

Asked = Callable[[int], dict[str, Any]]  # the request of a round


@dataclass(frozen=True)
class Configuration:
    """One way to run an engine."""

    name: str
    arguments: dict[str, Any]  # as the engine's class in generation_engines.py takes them
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A checkpoint in Hugging Face layout, and how much of it is to run at once."""

    folder: Path
    spec: ModelSpec
    max_sequences: int
    cache_tokens: int  # in all sequences together


def candidates(peer: str, python: str, threads: int) -> list[Configuration]:
    """The configurations that are tried for an engine; the first is a good one without trial."""
    if peer != "vllm":
        return [Configuration(name, arguments) for name, arguments in OF_ENGINES[peer].items()]
    within = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    found = [Configuration(name, arguments, within) for name, arguments in OF_ENGINES[peer].items()]
    intel_openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    if intel_openmp.exists():
        preload = {"LD_PRELOAD": str(intel_openmp)}
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        apart = {"VLLM_CPU_OMP_THREADS_BIND": cores, **preload}
        plain = [one for one in found if one.name in ("eager", "torch.compile")]
        found += [replace(one, name=f"{one.name}, Intel OpenMP", environment={**within, **preload}) for one in plain]
        name = f"eager, engine process bound to cores {cores}, Intel OpenMP"
        found.append(replace(plain[0], name=name, environment=apart))
    return found


class Fleet:
    """The engines of one run, by name; a process is started when it is first asked for."""

    def __init__(self, pythons: dict[str, str], threads: int, rounds: int, folder: Path) -> None:
        self.pythons, self.threads, self.rounds = pythons, threads, rounds
        self.chosen: dict[str, dict[str, Configuration]] = {}  # peer -> "many", "few", "any" sequences
        self.versions: dict[str, str] = {}
        self._folder = folder
        self._workers: dict[tuple[str, str, Path], Worker] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; the next that is asked for starts anew."""
        while self._workers:
            self._workers.popitem()[1].close()

    def ask(self, peer: str, model: Model, kind: str, do: str, **request: Any) -> dict[str, Any]:
        """One request to a peer in its best configuration for "many", "few" or "any" sequences."""
        configuration = self.chosen[peer][kind]
        key = (peer, configuration.name, model.folder)
        if key not in self._workers:
            self._workers[key] = self._start(peer, model, configuration)
        worker = self._workers[key]
        worker.go_on()
        answer = worker.ask(do, **request)
        worker.put_aside()
        return answer

    def _start(self, peer: str, model: Model, configuration: Configuration) -> Worker:
        """Raises RuntimeError where the engine does not start, or with other threads."""
        cache_bytes = model.cache_tokens * model.spec.kv_bytes_per_token(4)
        more = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(cache_bytes / 2**30))}
        worker = Worker(
            f"generation_engines:{peer.capitalize()}",
            self._folder / f"{peer}.log",
            environment(self.threads, {**more, **configuration.environment}),
            self.pythons[peer],
            model=str(model.folder),
            context=model.spec.context,
            max_sequences=model.max_sequences,
            cache_tokens=model.cache_tokens,
            configuration=configuration.arguments,
        )
        try:
            worker.ready()
            self.versions[peer], threads = worker.ask("facts")
            if threads != self.threads:
                raise RuntimeError(f"{peer} ({configuration.name}) runs {threads} threads")
        except BaseException:
            worker.close()
            raise
        worker.put_aside()
        return worker

    def choose(
        self, model: Model, trial: Callable[[str, int], dict[str, Any]] | None, say: Callable
    ) -> list[list[str]]:
        """Set each engine's best configuration for many sequences, for few, and for any (both seconds multiplied).

        `trial(kind, round)` is the request for "many" and for "few"; None takes each engine's first configuration.
        Returns a row of each that was tried; one that does not run is left out and says why.
        """
        rows = []
        for peer, python in self.pythons.items():
            found = candidates(peer, python, self.threads)
            self.chosen[peer] = dict.fromkeys(("many", "few", "any"), found[0])
            if trial is None:
                continue
            seconds: dict[str, tuple[float, float]] = {}
            for configuration in found:
                self.chosen[peer] = dict.fromkeys(("many", "few", "any"), configuration)
                try:
                    seconds[configuration.name] = tuple(
                        min([self.ask(peer, model, kind, **trial(kind, i))["seconds"] for i in range(4)][1:])
                        for kind in ("many", "few")
                    )
                    cells = [f"{value:.3f} s" for value in seconds[configuration.name]]
                except RuntimeError as error:
                    cells = ["failed", str(error).strip().splitlines()[-1][:60]]
                self.close()
                rows.append([peer, configuration.name, *cells])
                say(", ".join(rows[-1]))
            ran = [configuration for configuration in found if configuration.name in seconds]
            if not ran:
                raise RuntimeError(f"no configuration of {peer} runs: {rows[-1][-1]}")
            keys = {"many": lambda one: one[0], "few": lambda one: one[1], "any": lambda one: one[0] * one[1]}
            self.chosen[peer] = {kind: min(ran, key=lambda one: key(seconds[one.name])) for kind, key in keys.items()}
        return rows


@dataclass(frozen=True)
class Sizes:
    """How large the cases are."""

    sequences: int = 64
    prompt_tokens: int = 16
    response_tokens: int = 128
    requests: int = 256  # of the long-tailed lengths
    context: int = 1024


QUICK = Sizes(16, 16, 16, 32, 96)


@dataclass(frozen=True)
class Bench:
    """What every case is given; a case adds its figures and tables to the measurement."""

    fleet: Fleet
    sizes: Sizes
    seed: int
    models: dict[str, Model]  # small, words
    lengths: list[int]  # long-tailed, of B
    measurement: Measurement

    def prompts(self, count: int, tokens: int, number: int) -> list[list[int]]:
        draw = random.Random(f"{self.seed} {count} {tokens} {number}")
        return [[draw.randrange(8, 500) for _ in range(tokens)] for _ in range(count)]

    def generate(self, lengths: Sequence[int], number: int) -> dict[str, Any]:
        """The request of a whole generation: short prompts, these response lengths."""
        prompts, seed = self.prompts(len(lengths), self.sizes.prompt_tokens, number), self.seed + number + 1
        return dict(do="generate", prompts=prompts, lengths=lengths, at_once=self.sizes.sequences, seed=seed)

    def trial(self, kind: str, number: int) -> dict[str, Any]:
        """The request by which configurations are compared: half of the throughput case, or of a small batch."""
        count = self.sizes.sequences if kind == "many" else 2
        return self.generate([self.sizes.response_tokens // 2] * count, number)

    def turns(
        self, model: str, kind: str, request: Asked, rounds: int, warm_up: bool = True, guessing: bool = False
    ) -> dict[str, list[float]]:
        """Seconds of every engine, by round. `guessing`: of vLLM with n-grams too."""

        def side(peer: str, kind: str) -> Callable[[int], float]:
            return lambda number: self.fleet.ask(peer, self.models[model], kind, **request(number))["seconds"]

        sides = {peer: side(peer, kind) for peer in self.fleet.pythons}
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
        engines = [*(engines or self.fleet.pythons)]
        return [*engines, *(f"over {peer}" for peer in engines if peer != OWN)]


def throughput(bench: Bench) -> None:
    """A: 64 sequences of one length at once; a large vocabulary, sampled and greedy"""
    sizes, rows = bench.sizes, []
    lengths, tokens = [sizes.response_tokens] * sizes.sequences, sizes.response_tokens * sizes.sequences
    for case, model, greedy in (("A", "small", False), ("A.vocabulary", "words", False), ("A.greedy", "words", True)):
        spec = bench.models[model].spec
        request = lambda i: bench.generate(lengths, i) | {"greedy": greedy}  # noqa: E731
        seconds = bench.turns(model, "many", request, bench.fleet.rounds)
        row = bench.compare(case, seconds, tokens, "tokens/s")
        name = f"{sizes.sequences} x {lengths[0]}, {spec.vocab:,} words{', greedy' if greedy else ''}"
        rows.append([name, *row])
    bench.measurement.table("a", "A: throughput", ["tokens/s of", *bench.heads()], rows)


def long_tail(bench: Bench) -> None:
    """B: 256 requests with real long-tailed lengths, 64 at a time; transformers in static batches"""
    lengths, rounds = bench.lengths, min(LONG_ROUNDS, bench.fleet.rounds)
    model = "policy" if "policy" in bench.models else "small"
    seconds = bench.turns(model, "any", lambda i: bench.generate(lengths, i), rounds, guessing=True)
    row, ordered = bench.compare("B", seconds, sum(lengths), "tokens/s"), sorted(lengths)
    p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    name = f"{model}, p50 {p50}, p99 {p99}, max {ordered[-1]}"
    bench.measurement.table("b", "B: long-tailed lengths", ["tokens/s of", *bench.heads(seconds)], [[name, *row]])


CASES = {"A": throughput, "B": long_tail}


def main() -> None:
    arguments = parse_arguments()
    cases, sizes = arguments.cases, QUICK if arguments.quick else Sizes()
    measurement = Measurement("generation", arguments)
    pythons = {OWN: sys.executable}
    if arguments.vllm_python is None:
        measurement.say("vllm is left out: no --vllm-python; benchmarks/setup_peers.sh makes its environment")
    else:
        pythons["vllm"] = peer_python("--vllm-python", arguments.vllm_python, "vllm")
    pythons["transformers"] = sys.executable
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
        models = write_models(Path(name), sizes, arguments.seed)
        if arguments.policy:
            policy = Path(arguments.policy).resolve()
            models["policy"] = replace(models["small"], folder=policy, spec=ModelSpec.from_config(policy))
        with Fleet(pythons, arguments.threads, rounds, Path(name)) as fleet:
            bench = Bench(fleet, sizes, arguments.seed, models, lengths, measurement)
            tried = fleet.choose(models["small"], None if arguments.quick else bench.trial, measurement.say)
            measurement.table("trial", "Configurations", ("engine", "configuration", "many", "few"), tried)
            for case in cases:
                measurement.say(CASES[case].__doc__ or case)
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


def write_models(folder: Path, sizes: Sizes, seed: int) -> dict[str, Model]:
    """Random checkpoints in Hugging Face layout."""
    models, longest = {}, sizes.context
    for name, shape in (("small", SMALL), ("words", SMALL | WORDS)):
        made = write_llama(folder / name, seed, **shape, head_dim=HEAD_DIM, max_position_embeddings=longest)
        models[name] = Model(made, ModelSpec.from_config(made), sizes.sequences, sizes.sequences * longest)
    return models


if __name__ == "__main__":
    run_program(main)
