"""Does it learn? A story model with a sentiment reward, and little sums in words, on several seeds, under torchrun.

    python benchmarks/learning.py [--model FOLDER] [--tasks grpo,ppo,sums,dapo,calculator] [--seeds 1]

grpo and ppo are the examples stories_*.yaml as they stand, with stories260K (260,032 parameters, no part of this
repository) and VADER's compound of the continuation as reward; the goal is a mean of 0.9 within 10 iterations on every
seed. sums is examples/sums_grpo.yaml; the goal is that the share of held-out sums that are right rises on every seed
by three standard errors of the difference, first and last evaluation taken as independent (they share their prompts).
dapo is sums with dynamic sampling (algorithm.filter_groups), calculator is examples/calculator_grpo.yaml, whose model
may call a tool; both have the same goal.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from harness import DATA, Figure, Measurement, named, options
from processes import ROOT, train

from rlhfuse.base.errors import InputError, run_program
from rlhfuse.monitor.phase_times import whole_seconds

TASKS = ("grpo", "ppo", "sums", "dapo", "calculator")
SUMS: dict[str, tuple[str, ...]] = {  # the example of each, and what is added to it
    "sums": ("sums_grpo",),
    "dapo": ("sums_grpo", "algorithm.filter_groups.enable=true"),
    "calculator": ("calculator_grpo",),
}
REWARD_GOAL, ITERATIONS, RISE_GOAL = 0.9, 10, 3.0
KEPT_SAMPLES = 2


@dataclass(frozen=True)
class Learnt:
    """One run on stories, by iteration."""

    algorithm: str
    seed: int
    rewards: list[float]  # mean of each iteration's samples, drawn before it learnt from them
    kl: list[float | None]  # mean per token to the model at the start; None without a reference
    entropy: list[float]
    seconds: list[float]
    samples: list[dict[str, Any]]  # the last ones: prompt, response, score

    @property
    def reached(self) -> int | None:
        """The first iteration, counted from 1, whose mean reward is the goal."""
        return next((number for number, reward in enumerate(self.rewards, start=1) if reward >= REWARD_GOAL), None)

    def row(self) -> list[str]:
        kl = "" if self.kl[-1] is None else f"{self.kl[-1]:.2f}"
        seconds = Figure.of(self.seconds[1:] or self.seconds).value
        ends = [str(self.reached or "not reached"), kl, f"{self.entropy[-1]:.2f}", f"{seconds:.2f}"]
        return [self.algorithm, str(self.seed), *(f"{reward:+.2f}" for reward in self.rewards), *ends]


@dataclass(frozen=True)
class Rise:
    """One run on sums, by evaluation: the mean held-out score, and its standard error."""

    task: str
    seed: int
    iterations: list[int]  # that each evaluation follows; -1 = before training
    scores: list[float]
    errors: list[float]

    @property
    def standard_errors(self) -> float:
        return (self.scores[-1] - self.scores[0]) / math.hypot(self.errors[0], self.errors[-1])

    def row(self) -> list[str]:
        return [self.task, str(self.seed), *(f"{score:.3f}" for score in self.scores), f"{self.standard_errors:.1f}"]


Run = TypeVar("Run", Learnt, Rise)


def main() -> None:
    parser = options(__doc__, seed=False)
    parser.add_argument("--tasks", default=",".join(TASKS), help="[%(default)s]")
    parser.add_argument("--seeds", default="1,2,3", help="[%(default)s]")
    parser.add_argument("--model", metavar="FOLDER", help="stories260K in Hugging Face layout")
    arguments = parser.parse_args()
    tasks = named("--tasks", arguments.tasks, {name: name for name in TASKS})
    if not all(word.isdigit() for word in arguments.seeds.split(",")):
        raise InputError(f"--seeds {arguments.seeds} is no list of numbers; give some like 1,2,3")
    seeds = [int(word) for word in arguments.seeds.split(",")]
    stories = [task for task in tasks if task not in SUMS]
    model = story_model(arguments.model) if stories else None
    measurement = Measurement("learning", arguments)
    if model:
        count = 2 if arguments.quick else ITERATIONS
        runs = (learn(task, seed, model, count) for task in stories for seed in seeds)
        report_stories(measurement, told(measurement, runs))
    if sums := [task for task in tasks if task in SUMS]:
        runs = (do_sums(task, seed, arguments.quick) for task in sums for seed in seeds)
        report_sums(measurement, told(measurement, runs))
    measurement.finish()


def told(measurement: Measurement, runs: Iterable[Run]) -> list[Run]:
    """All of them, with a line as each ends."""
    done = []
    for one in runs:
        done.append(one)
        measurement.say("  ".join(one.row()))
    return done


def report_stories(measurement: Measurement, runs: list[Learnt]) -> None:
    columns = ["", "seed", *map(str, range(1, len(runs[0].rewards) + 1)), "0.9 at", "KL", "entropy", "s / iteration"]
    title = "Mean reward of each iteration; KL per token and entropy of the last"
    measurement.table("rewards", title, columns, [one.row() for one in runs])
    for algorithm in dict.fromkeys(one.algorithm for one in runs):
        reached = [one.reached or float("inf") for one in runs if one.algorithm == algorithm]
        if max(reached) < float("inf"):
            measurement.figure(f"{algorithm}.iterations", Figure.of(reached, "iterations").at_most(ITERATIONS))
    measurement.figure("reached", Figure(sum(one.reached is not None for one in runs), "runs").at_least(len(runs)))
    measurement.facts(runs=[asdict(one) for one in runs])


def report_sums(measurement: Measurement, runs: list[Rise]) -> None:
    columns = ["", "seed", *("before" if i < 0 else str(i + 1) for i in runs[0].iterations), "standard errors"]
    measurement.table("sums", "Held-out sums right after so many iterations", columns, [one.row() for one in runs])
    for task in dict.fromkeys(one.task for one in runs):
        rises = [one.standard_errors for one in runs if one.task == task]
        least = Figure(min(rises), "standard errors", rounds=len(rises))
        measurement.figure(f"{task}.least_rise", least.at_least(RISE_GOAL))
    measurement.facts(sums=[asdict(one) for one in runs])


def learn(algorithm: str, seed: int, model: Path, iterations: int) -> Learnt:
    """One run in a folder that is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        rows = train(story_config(algorithm), out, story_settings(model, iterations, f"trainer.seed={seed}"))
        samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()][-KEPT_SAMPLES:]
    return Learnt(
        algorithm,
        seed,
        rewards=[row["critic/score/mean"] for row in rows],
        kl=[row.get("actor/ref_kl") for row in rows],
        entropy=[row["actor/entropy"] for row in rows],
        seconds=[whole_seconds(row) for row in rows],
        samples=[{key: sample[key] for key in ("prompt", "response", "score")} for sample in samples],
    )


def do_sums(task: str, seed: int, quick: bool) -> Rise:
    example, *more = SUMS[task]
    short = ["trainer.iterations=2"] if quick else []
    settings = [f"trainer.seed={seed}", "trainer.export=false", *more, *short]
    with tempfile.TemporaryDirectory() as folder:
        rows = train(ROOT / "examples" / f"{example}.yaml", Path(folder) / "run", settings)
    columns = ("iteration", "val/score/mean", "val/score/std_error")
    return Rise(task, seed, *([row[column] for row in rows if columns[1] in row] for column in columns))


def story_model(given: str | None) -> Path:
    """The model's folder. Raises InputError when it is not there."""
    folder = Path(given or DATA / "stories260K-hf").resolve()
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} holds no model; give --model the Hugging Face folder of stories260K")
    return folder


def story_config(algorithm: str) -> Path:
    return ROOT / "examples" / f"stories_{algorithm}.yaml"


def story_settings(model: Path, iterations: int, *more: str) -> Sequence[str]:
    return (f"actor.path={model}", f"trainer.iterations={iterations}", "trainer.export=false", *more)


if __name__ == "__main__":
    run_program(main)
