"""Samples per second of whole GRPO training beside TRL's, on the same task in the same run.

    benchmarks/setup_peers.sh trl .venv-trl                       makes TRL's environment, apart from this one
    python benchmarks/end_to_end.py --trl-python .venv-trl/bin/python --out speed.json --markdown speed.md
    python benchmarks/end_to_end.py --quick --trl-python ...      the same in small, to see that it runs

The task is that of examples/stories_grpo.yaml: the stories260K model in float32, 8 prompts x 8 samples in an
iteration, up to 64 new tokens each at temperature 1 over the whole vocabulary, VADER's sentiment as the reward, one
optimizer step on all 64 samples, the same learning rate, no reference. Both use two cores: this project as two ranks
of one thread under torchrun; TRL as one process of two threads or as two processes of one thread under torchrun,
whichever a short trial of both finds to be faster. Where TRL has a slower default for a CPU (bfloat16, gradient
checkpointing) the faster choice is made for it; see end_to_end_trl.py. Both call the same reward function, write
their logs and no checkpoints.

They run in turns, one at a time and each in a start of its own, another one first in each round. Start-up, loading of
the model and the first steps are left out of both: an iteration's seconds are those from its start (TRL: the end of
the one before) to the start of the next, and a run's speed is that of its median iteration. The ratio is of the
medians over rounds, with the least and the most of a single round. `reward` and `tokens` show that both did the same
work: samples of the same length, and a policy that learns.

Nothing else should run meanwhile: on a busy machine threads that wait for each other lose more than processes do.
Progress goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from search_runs import console, counting, finish, machine
from stories_runs import config_file, model_folder, prompts_file, run_program_of, seconds_of, train

from rlhfuse.config.load import load_config
from rlhfuse.config.settings import RunConfig
from rlhfuse.errors import InputError, run_program
from rlhfuse.files import write_text
from rlhfuse.monitor.report.phase_times import phase_times

OWN, TRL = "rlhfuse", "trl"
GOAL = 2.0
WARM_UP = 2  # iterations of each start that are not measured: kernels, first allocations, the first choice of R_t
WORKER = Path(__file__).with_name("end_to_end_trl.py")


@dataclass(frozen=True)
class Speed:
    """One start of one engine: its measured iterations."""

    engine: str
    way: str  # processes x threads
    iteration_seconds: list[float]
    samples: int  # in each iteration
    reward: list[float]  # mean of every iteration, those not measured included
    tokens: float  # mean response
    total_seconds: float  # start-up included
    phases: dict[str, float]  # mean seconds of each, where the engine tells them

    @property
    def samples_per_second(self) -> float:
        return self.samples / statistics.median(self.iteration_seconds)


@dataclass(frozen=True)
class Way:
    """How TRL takes two cores."""

    processes: int
    threads: int

    def __str__(self) -> str:
        return f"{self.processes} process{'es' if self.processes > 1 else ''} x {self.threads} thread" + (
            "s" if self.threads > 1 else ""
        )


WAYS = (Way(1, 2), Way(2, 1))


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running engine is ended too
    arguments = parse_arguments()
    model = model_folder(arguments.model)
    config = load_config(config_file("grpo"))
    rounds, iterations = (1, WARM_UP + 2) if arguments.quick else (arguments.rounds, WARM_UP + arguments.iterations)
    screen = console()
    load = os.getloadavg()[0]
    versions: dict[str, str] = {}

    def own() -> Speed:
        return told(screen, run_own(model, iterations))

    def peer(way: Way, count: int) -> Speed:
        return told(screen, run_trl(arguments.trl_python, way, model, config, count, versions))

    ways = [way for way in WAYS if arguments.trl_way in ("trial", f"{way.processes}x{way.threads}")]
    trial: dict[Way, Speed] = {}
    if len(ways) > 1:
        screen.print("Trial of TRL's two ways:")
        trial = {way: peer(way, WARM_UP + (2 if arguments.quick else arguments.iterations // 2)) for way in ways}
        ways.sort(key=lambda one: -trial[one].samples_per_second)
    way = ways[0]
    screen.print(f"TRL runs as {way}", highlight=False)
    found: list[Speed] = []
    for number in range(rounds):
        turns = [own, lambda: peer(way, iterations)]
        found += [turn() for turn in (turns if number % 2 == 0 else turns[::-1])]
    ratio = ratio_of(found)
    screen.print(table(found, ratio))
    if arguments.markdown:
        write_text(arguments.markdown, markdown(found, ratio))
    finish(
        {
            "benchmark": "end_to_end",
            "machine": {**machine(), "load_before": load, "load_after": os.getloadavg()[0]},
            "quick": arguments.quick,
            "versions": versions,
            "trial": {str(one): speed.samples_per_second for one, speed in trial.items()},
            "trl_way": str(way),
            "ratio": ratio,
            "goal": {"ratio": GOAL, "reached": None if arguments.quick else ratio["ratio"] >= GOAL},
            "runs": [{**asdict(one), "samples_per_second": one.samples_per_second} for one in found],
        },
        arguments.out,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--trl-python", metavar="FILE", required=True, help="Python of TRL's environment")
    parser.add_argument("--model", metavar="FOLDER", help="stories260K; default: ../shared/data/stories260K-hf")
    choices = ("trial", "1x2", "2x1")
    parser.add_argument("--trl-way", choices=choices, default="trial", help="processes x threads of TRL [%(default)s]")
    parser.add_argument("--rounds", type=counting, default=4, help="in which the engines run in turns")
    parser.add_argument("--iterations", type=counting, default=16, help="measured in each start")
    parser.add_argument("--quick", action="store_true", help="one round of a few iterations: no measurement")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON object here")
    parser.add_argument("--markdown", metavar="FILE", help="write the table here")
    arguments = parser.parse_args()
    if not Path(arguments.trl_python).exists():
        raise InputError(f"--trl-python {arguments.trl_python} is not there; run benchmarks/setup_peers.sh trl")
    return arguments


def run_own(model: Path, iterations: int) -> Speed:
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        settings = (f"trainer.iterations={iterations}", "trainer.export=false", "trainer.tensorboard=false")
        rows = train(config_file("grpo"), model, Path(folder) / "run", settings)
        kept = rows[WARM_UP:]
        return Speed(
            OWN,
            "2 ranks x 1 thread",
            seconds_of(kept),
            len(rows[0]["lengths/output"]),
            [row["critic/score/mean"] for row in rows],
            statistics.mean(row["response_length/mean"] for row in kept),
            time.monotonic() - begin,
            {one.name: one.seconds for one in phase_times(kept)},
        )


def run_trl(python: str, way: Way, model: Path, config: RunConfig, iterations: int, versions: dict[str, str]) -> Speed:
    rollout = config.rollout
    with tempfile.TemporaryDirectory() as folder:
        begin, out = time.monotonic(), Path(folder) / "trl.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(way.processes)]
        settings = {
            "model": model,
            "prompts": prompts_file(),
            "out": out,
            "folder": Path(folder) / "trl",
            "steps": iterations + 1,  # the first has no end before it to count from
            "prompts-per-step": rollout.prompts_per_iteration,
            "generations": rollout.samples_per_prompt,
            "tokens": rollout.max_response_tokens,
            "lr": config.actor.optim.lr,
            "threads": way.threads,
            "seed": config.trainer.seed,
        }
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        program = [*(launcher if way.processes > 1 else []), str(WORKER), *words]
        run_program_of([python, *program], threads=way.threads)
        said = json.loads(out.read_text())
        versions |= said["versions"]
        return Speed(
            TRL,
            str(way),
            said["step_seconds"][WARM_UP:],
            config.samples_per_iteration,
            said["reward"],
            statistics.mean(said["tokens"]),
            time.monotonic() - begin,
            {},
        )


def told(screen: Any, one: Speed) -> Speed:
    screen.print(
        f"  {one.engine}, {one.way}: {one.samples_per_second:.1f} samples/s, reward {one.reward[0]:+.2f} -> "
        f"{one.reward[-1]:+.2f} in {len(one.reward)} iterations, {one.total_seconds:.0f} s with its start-up",
        highlight=False,
    )
    return one


def speeds(found: Sequence[Speed], engine: str) -> list[float]:
    return [one.samples_per_second for one in found if one.engine == engine]


def ratio_of(found: Sequence[Speed]) -> dict[str, float]:
    """How many times more samples per second than TRL: of the medians, and the least and most of a round."""
    ours, theirs = speeds(found, OWN), speeds(found, TRL)
    each = [mine / its for mine, its in zip(ours, theirs)]
    return {"ratio": statistics.median(ours) / statistics.median(theirs), "least": min(each), "most": max(each)}


HEAD = ["engine", "cores taken as", "samples/s", "least", "most", "tokens per response"]


def rows_of(found: Sequence[Speed]) -> list[list[str]]:
    rows = []
    for engine in (OWN, TRL):
        runs, each = [one for one in found if one.engine == engine], speeds(found, engine)
        numbers = (statistics.median(each), min(each), max(each), statistics.mean(one.tokens for one in runs))
        rows.append([engine, runs[0].way, *(f"{number:.1f}" for number in numbers)])
    return rows


def summary(ratio: dict[str, float]) -> str:
    return f"{ratio['ratio']:.2f} x (least {ratio['least']:.2f}, most {ratio['most']:.2f} of a round)"


def table(found: Sequence[Speed], ratio: dict[str, float]) -> Table:
    made = Table(*HEAD, title=f"End to end: {summary(ratio)}")
    for row in rows_of(found):
        made.add_row(*row)
    return made


def markdown(found: Sequence[Speed], ratio: dict[str, float]) -> str:
    """The table for a page, and the ratio."""
    rows = [HEAD, ["---"] * len(HEAD), *rows_of(found)]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows) + f"\nRatio: {summary(ratio)}\n"


if __name__ == "__main__":
    run_program(main)
