"""The processes that generation.py measures: how they are configured, started, asked in turns and ended.

Each engine runs in a process of its own (generation_worker.py), with the Python of its own environment, and all are
alive at the same time, so that a round can go from one to the next. One that is not asked must not take the
machine's cores: `Fleet.rounds` waits until the others are quiet, and notes the CPU time that they take even so.
Knows nothing of what is measured.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhfuse.config.spec import ModelSpec
from rlhfuse.errors import InputError

OWN = "rlhfuse"
LIMITS = "limits"  # not an engine: what the machine allows
END_SECONDS = 20.0  # what a process gets to end after its pipe was closed
QUIET_SECONDS, QUIET_WINDOW = 5.0, 0.1
LOG_LINES = 15  # shown of a process that failed


@dataclass(frozen=True)
class Configuration:
    """One way to run an engine."""

    name: str
    arguments: dict[str, Any]  # as the engine's class in generation_worker.py takes them
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A checkpoint in Hugging Face layout, and how much of it is to run at once."""

    folder: Path
    max_sequences: int
    cache_tokens: int  # in all sequences together

    @cached_property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_config(self.folder)


def candidates(peer: str, python: str, threads: int) -> list[Configuration]:
    """The configurations that are tried for an engine; the first is a good one without trial."""
    if peer == OWN:
        return [
            Configuration(f"blocks of {tokens} tokens", {"block_tokens": tokens, "max_batched_tokens": 2048})
            for tokens in (16, 32)
        ]
    if peer == "transformers":
        compiled = {"cache_implementation": "static", "compile": True}
        return [
            Configuration("sdpa, dynamic cache", {"attn_implementation": "sdpa"}),
            Configuration("eager attention, dynamic cache", {"attn_implementation": "eager"}),
            Configuration("sdpa, static cache", {"attn_implementation": "sdpa", "cache_implementation": "static"}),
            Configuration("sdpa, static cache, compiled", {"attn_implementation": "sdpa", **compiled}),
        ]
    if peer == "vllm":
        return _vllm_candidates(Path(python).parent.parent / "lib" / "libiomp5.so", threads)
    return [Configuration("torch", {})]


def _vllm_candidates(intel_openmp: Path, threads: int) -> list[Configuration]:
    eager = {"enforce_eager": True}
    within = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    found = [
        Configuration("eager", eager, within),
        Configuration("eager, no prefix cache", {**eager, "enable_prefix_caching": False}, within),
        Configuration("eager, blocks of 32 tokens", {**eager, "block_size": 32}, within),
        Configuration("torch.compile", {"enforce_eager": False}, within),
    ]
    if intel_openmp.exists():
        preload = {"LD_PRELOAD": str(intel_openmp)}
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        apart = {"VLLM_CPU_OMP_THREADS_BIND": cores, **preload}
        found += [
            Configuration("eager, Intel OpenMP", eager, {**within, **preload}),
            Configuration("torch.compile, Intel OpenMP", {"enforce_eager": False}, {**within, **preload}),
            Configuration(f"eager, engine process bound to cores {cores}, Intel OpenMP", eager, apart),
        ]
    return found


class Worker:
    """One engine in its process."""

    def __init__(self, python: str, asked: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        """Raises RuntimeError with the end of its log if the engine does not start."""
        self.configuration = asked["configuration"]
        self._log = log
        program = str(Path(__file__).resolve().parent / "generation_worker.py")
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [python, program, json.dumps(asked)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,  # so that Ctrl-C reaches this program alone, and the CPU time is found
            )
        try:
            self.facts = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: _answer says with what
        return self._answer()

    def cpu_seconds(self) -> float:
        """CPU time so far of the process and of those it started."""
        ticks = 0
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = file.read_text().rpartition(")")[2].split()  # from field 3 on; the session is field 6
            except OSError:  # it has just ended
                continue
            if int(fields[3]) == self._process.pid:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it ended with a request unread
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise RuntimeError(f"the process of {self.configuration} ended with code {code}:\n{tail}")
        return json.loads(line)


class Fleet:
    """The engines of one run, by name; a process is started when it is first asked for."""

    def __init__(self, pythons: dict[str, str], threads: int, rounds: int, folder: Path, screen: Console) -> None:
        self.pythons, self.threads, self.count, self.screen = pythons, threads, rounds, screen
        self.chosen: dict[str, dict[str, Configuration]] = {}  # peer -> kind of work -> configuration
        self.versions: dict[str, str] = {}
        self._idle: dict[str, list[float]] = {}  # peer -> [CPU seconds, seconds] while another one was measured
        self._folder = folder
        self._workers: dict[tuple[str, str, Path], Worker] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def engines(self) -> list[str]:
        return [peer for peer in self.pythons if peer != LIMITS]

    def idle_shares(self) -> dict[str, float]:
        """Of a core, on average, while the engine was alive and another one was measured."""
        return {peer: cpu / max(seconds, 1e-9) for peer, (cpu, seconds) in self._idle.items()}

    def worker(self, peer: str, model: Model, kind: str = "any") -> Worker:
        """The process of a peer in its best configuration for a kind of work: "many", "few" or "any"."""
        configuration = self.chosen[peer][kind]
        key = (peer, configuration.name, model.folder)
        if key not in self._workers:
            self._workers[key] = self.start(peer, model, configuration)
        return self._workers[key]

    def start(self, peer: str, model: Model, configuration: Configuration) -> Worker:
        asked = {
            "engine": peer,
            "model": str(model.folder),
            "context": model.spec.context,
            "max_sequences": model.max_sequences,
            "cache_tokens": model.cache_tokens,
            "configuration": configuration.arguments,
        }
        environment = {**self._environment(model), **configuration.environment}
        worker = Worker(self.pythons[peer], asked, environment, self._folder / f"{peer}.log")
        if worker.facts["torch_threads"] != self.threads:
            worker.close()
            raise RuntimeError(f"{peer} ({configuration.name}) runs {worker.facts['torch_threads']} threads")
        self.versions[peer] = worker.facts["version"]
        return worker

    def close(self) -> None:
        """End all processes; the next that is asked for starts anew."""
        while self._workers:
            self._workers.popitem()[1].close()

    def rounds(
        self,
        workers: dict[str, Worker],
        request: Callable[[str, int], dict[str, Any]],
        *,
        count: int | None = None,
        warm_up: bool = True,
    ) -> dict[str, list[dict[str, Any]]]:
        """Ask all in turns, another one first in each round; `request(peer, round)`. Round -1 only warms up."""
        answers: dict[str, list[dict[str, Any]]] = {peer: [] for peer in workers}
        names = list(workers)
        for number in range(-1 if warm_up else 0, count or self.count):
            turn = number % len(names)
            for peer in names[turn:] + names[:turn]:
                answer = self._watched(workers[peer], request(peer, number))
                if number >= 0:
                    answers[peer].append(answer)
        return answers

    def _watched(self, worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
        others = [(key[0], other) for key, other in self._workers.items() if other is not worker]
        wait_until_quiet([other for _, other in others])
        before, start = [other.cpu_seconds() for _, other in others], time.perf_counter()
        answer = worker.ask(**request)
        seconds = time.perf_counter() - start
        for (peer, other), cpu in zip(others, before):
            idle = self._idle.setdefault(peer, [0.0, 0.0])
            idle[0] += other.cpu_seconds() - cpu
            idle[1] += seconds
        return answer

    def _environment(self, model: Model) -> dict[str, str]:
        root = Path(__file__).resolve().parents[1]
        cache_bytes = model.cache_tokens * model.spec.kv_bytes_per_token(4)
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": str(self.threads),
            "NUMBA_NUM_THREADS": str(self.threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(cache_bytes / 2**30)),
        }


def wait_until_quiet(workers: list[Worker]) -> None:
    """Return when none of them takes CPU, or after QUIET_SECONDS: some engines spin on for a second after an answer."""
    end = time.monotonic() + QUIET_SECONDS
    before = [worker.cpu_seconds() for worker in workers]
    while workers and time.monotonic() < end:
        time.sleep(QUIET_WINDOW)
        now = [worker.cpu_seconds() for worker in workers]
        if all(after - cpu < 0.2 * QUIET_WINDOW for after, cpu in zip(now, before)):
            return
        before = now


def choose(fleet: Fleet, model: Model, trial: Callable[[str, int], dict[str, Any]] | None) -> dict[str, Any]:
    """Set each engine's best configuration for many sequences, for few, and for any number (both seconds multiplied).

    `trial(kind, round)` is the request for "many" and for "few"; None takes each engine's first configuration. Returns
    what was tried, by engine. A configuration that does not run is left out, and says why.
    """
    tried: dict[str, Any] = {}
    for peer in fleet.pythons:
        found = candidates(peer, fleet.pythons[peer], fleet.threads)
        if trial is None or peer == LIMITS:
            fleet.chosen[peer] = dict.fromkeys(("many", "few", "any"), found[0])
            tried[peer] = []
            continue
        tried[peer] = [_try(fleet, peer, model, configuration, trial) for configuration in found]
        ran = [(row, c) for row, c in zip(tried[peer], found) if "failed" not in row]
        if not ran:
            raise RuntimeError(f"no configuration of {peer} runs: {tried[peer][0]['failed']}")
        keys = {"many": lambda r: r["many"], "few": lambda r: r["few"], "any": lambda r: r["many"] * r["few"]}
        fleet.chosen[peer] = {kind: min(ran, key=lambda item: key(item[0]))[1] for kind, key in keys.items()}
    return tried


def _try(
    fleet: Fleet, peer: str, model: Model, configuration: Configuration, trial: Callable[[str, int], dict[str, Any]]
) -> dict[str, Any]:
    """Seconds of the trial with many and with few sequences: the best of three after one to warm up."""
    row: dict[str, Any] = {"configuration": configuration.name}
    try:
        worker = fleet.start(peer, model, configuration)
    except RuntimeError as error:
        row["failed"] = str(error)
    else:
        try:
            for kind in ("many", "few"):
                row[kind] = min([worker.ask(**trial(kind, number))["seconds"] for number in range(4)][1:])
        except RuntimeError as error:
            row["failed"] = str(error)
        finally:
            worker.close()
    said = row["failed"].splitlines()[-1] if "failed" in row else f"{row['many']:.3f} s many, {row['few']:.3f} s few"
    fleet.screen.print(f"  {peer}, {configuration.name}: {said}", highlight=False)
    return row


def medians(answers: dict[str, list[dict[str, Any]]], key: str) -> dict[str, float]:
    return {peer: statistics.median(answer[key] for answer in rows) for peer, rows in answers.items()}


def ratios(answers: dict[str, list[dict[str, Any]]], key: str) -> dict[str, dict[str, float]]:
    """How many times faster than each peer this project is: of the medians, and the least and most of a round."""
    middle, own = medians(answers, key), answers[OWN]
    found = {}
    for peer in answers:
        if peer not in (OWN, LIMITS):
            each = [theirs[key] / ours[key] for theirs, ours in zip(answers[peer], own)]
            found[peer] = {"ratio": middle[peer] / middle[OWN], "least": min(each), "most": max(each)}
    return found


def known_peers(names: Iterable[str], vllm_python: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """The Python of each process that can run, and why others cannot. Raises InputError for a name unknown."""
    pythons, left_out = {OWN: sys.executable}, {}
    for name in names:
        if name == "transformers":
            pythons[name] = sys.executable
        elif name != "vllm":
            raise InputError(f"--peers: {name!r} is unknown; give vllm, transformers or both")
        elif vllm_python is None:
            left_out[name] = "no --vllm-python; benchmarks/setup_peers.sh makes its environment"
        elif not Path(vllm_python).exists():
            raise InputError(f"--vllm-python {vllm_python} is not there; run benchmarks/setup_peers.sh")
        else:
            pythons[name] = vllm_python
    return {**pythons, LIMITS: sys.executable}, left_out
