"""The engines of a run of generation.py: each a process, in the best of the configurations that a trial compares."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from processes import Worker, environment

from rlhfuse.config.spec import ModelSpec

OWN, LIMITS = "rlhfuse", "limits"  # the second is no engine: what the machine allows
SDPA_STATIC = {"attn_implementation": "sdpa", "cache_implementation": "static"}
OF_ENGINES = {  # configurations by name, arguments as the engine's class in generation_engines.py takes them
    OWN: {f"blocks of {n}": {"block_tokens": n, "max_batched_tokens": 2048} for n in (16, 32)},
    "transformers": {
        "sdpa, dynamic cache": {"attn_implementation": "sdpa"},
        "eager attention, dynamic cache": {"attn_implementation": "eager"},
        "sdpa, static cache": SDPA_STATIC,
        "sdpa, static cache, compiled": {**SDPA_STATIC, "compile": True},
    },
    LIMITS: {"torch": {}},
    "vllm": {
        "eager": {"enforce_eager": True},
        "eager, no prefix cache": {"enforce_eager": True, "enable_prefix_caching": False},
        "eager, blocks of 32 tokens": {"enforce_eager": True, "block_size": 32},
        "torch.compile": {"enforce_eager": False},
    },
}


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
        self.engines = [peer for peer in pythons if peer != LIMITS]
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
            if trial is None or peer == LIMITS:
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
