"""Does it learn? GRPO and PPO on a little story model with a sentiment reward, on several seeds, under torchrun.

    python benchmarks/learning.py --out learning.json --markdown learning.md
    python benchmarks/learning.py --algorithms grpo --seeds 1                   one run

Each run is examples/stories_grpo.yaml or examples/stories_ppo.yaml as it stands, the same settings for all seeds: the
prompts are openings of stories, the reward is VADER's compound of the continuation, between -1 and 1. The mean reward
of an iteration is that of the samples it drew, before it learnt from them; iterations count from 1. The goal is a mean
of 0.9 within 10 iterations on every seed. Rewards are the same on every machine of one kind; seconds are not, and are
those of this machine with whatever else ran on it.

Nothing here says that the stories get better: the reward counts glad words, and the last samples, which are printed,
show what the policy makes of that. Progress goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
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
from search_runs import console, finish, machine
from stories_runs import config_file, model_folder, samples_of, seconds_of, train

from rlhfuse.errors import InputError, run_program
from rlhfuse.files import write_text

ALGORITHMS = ("grpo", "ppo")
GOAL = 0.9
ITERATIONS = 10
TEXTS = 2


@dataclass(frozen=True)
class Learnt:
    """One run: what each of its iterations scored, and how far it went from where it began."""

    algorithm: str
    seed: int
    rewards: list[float]  # mean of each iteration
    kl: list[float | None]  # mean per token to the model at the start; None without a reference
    entropy: list[float]
    seconds: float  # start-up included
    iteration_seconds: float  # the median iteration
    texts: list[dict[str, Any]]

    @property
    def reached(self) -> int | None:
        """The first iteration, counted from 1, whose mean reward is the goal."""
        return next((number for number, reward in enumerate(self.rewards, start=1) if reward >= GOAL), None)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running job is ended too
    arguments = parse_arguments()
    runs = [(name, seed) for name in algorithms(arguments.algorithms) for seed in seeds(arguments.seeds)]
    model = model_folder(arguments.model)
    screen = console()
    load = os.getloadavg()[0]
    found = []
    for algorithm, seed in runs:
        found.append(learn(algorithm, seed, model))
        screen.print(told(found[-1]), highlight=False)
    screen.print(table(found))
    if arguments.markdown:
        write_text(arguments.markdown, markdown(found))
    finish(
        {
            "benchmark": "learning",
            "machine": {**machine(), "load_before": load},
            "goal": {"reward": GOAL, "iterations": ITERATIONS},
            "runs": [{**asdict(one), "reached": one.reached} for one in found],
            "reached": all(one.reached is not None for one in found),
        },
        arguments.out,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="such as grpo,ppo")
    parser.add_argument("--seeds", default="1,2,3", help="such as 1,2,3")
    parser.add_argument("--model", metavar="FOLDER", help="stories260K; default: ../shared/data/stories260K-hf")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON object here")
    parser.add_argument("--markdown", metavar="FILE", help="write the table here")
    return parser.parse_args()


def algorithms(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in ALGORITHMS]:
        raise InputError(f"--algorithms {text}: {unknown[0]!r} has no example; give some of {','.join(ALGORITHMS)}")
    return names


def seeds(text: str) -> list[int]:
    if not all(word.isdigit() for word in text.split(",")):
        raise InputError(f"--seeds {text} is no list of numbers; give some like 1,2,3")
    return [int(word) for word in text.split(",")]


def learn(algorithm: str, seed: int, model: Path) -> Learnt:
    """One run in a folder that is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        out, begin = Path(folder) / "run", time.monotonic()
        settings = (f"trainer.seed={seed}", f"trainer.iterations={ITERATIONS}", "trainer.export=false")
        rows = train(config_file(algorithm), model, out, settings)
        return Learnt(
            algorithm,
            seed,
            rewards=[row["critic/score/mean"] for row in rows],
            kl=[row.get("actor/ref_kl") for row in rows],
            entropy=[row["actor/entropy"] for row in rows],
            seconds=time.monotonic() - begin,
            iteration_seconds=statistics.median(seconds_of(rows)[1:]),
            texts=[{key: one[key] for key in ("prompt", "response", "score")} for one in samples_of(out, TEXTS)],
        )


def told(one: Learnt) -> str:
    """A run in a few lines, its last samples included."""
    rewards = " ".join(f"{reward:+.2f}" for reward in one.rewards)
    lines = [f"{one.algorithm} seed {one.seed}: {rewards} ({one.seconds:.0f} s)"]
    return "\n".join(lines + [f"    {text['score']:+.2f}  {text['prompt']} | {text['response']}" for text in one.texts])


def columns(one: Learnt) -> list[str]:
    reached = "not reached" if one.reached is None else str(one.reached)
    kl = "" if one.kl[-1] is None else f"{one.kl[-1]:.2f}"
    rewards = [f"{reward:+.2f}" for reward in one.rewards]
    ends = [reached, kl, f"{one.entropy[-1]:.2f}", f"{one.iteration_seconds:.2f}"]
    return [one.algorithm, str(one.seed), *rewards, *ends]


HEAD = ["", "seed", *map(str, range(1, ITERATIONS + 1)), "0.9 at", "KL", "entropy", "s / iteration"]


def table(found: Sequence[Learnt]) -> Table:
    made = Table(*HEAD, title="Mean reward of each iteration; KL per token and entropy of the last")
    for one in found:
        made.add_row(*columns(one))
    return made


def markdown(found: Sequence[Learnt]) -> str:
    """The table for a page."""
    rows = [HEAD, ["---"] * len(HEAD), *map(columns, found)]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


if __name__ == "__main__":
    run_program(main)
