"""Does it learn? GRPO and PPO on a little story model with a sentiment reward, on several seeds, under torchrun.

    python benchmarks/learning.py [--model FOLDER] [--algorithms grpo --seeds 1]

Each run is examples/stories_grpo.yaml or examples/stories_ppo.yaml as it stands, with stories260K (260,032 parameters,
no part of this repository). The reward is VADER's compound of the continuation; the goal is a mean of 0.9 within 10
iterations on every seed. It counts glad words: the last samples, which are kept, show what the policy makes of that.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import DATA, Figure, Measurement, named, options
from processes import ROOT, train

from rlhfuse.base.errors import InputError, run_program
from rlhfuse.run.report.phase_times import whole_seconds

ALGORITHMS = ("grpo", "ppo")
REWARD_GOAL, ITERATIONS = 0.9, 10
KEPT_SAMPLES = 2


@dataclass(frozen=True)
class Learnt:
    """One run, by iteration."""

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


def main() -> None:
    parser = options(__doc__, seed=False)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="such as grpo,ppo")
    parser.add_argument("--seeds", default="1,2,3", help="such as 1,2,3")
    parser.add_argument("--model", metavar="FOLDER", help="stories260K in Hugging Face layout")
    arguments = parser.parse_args()
    algorithms = named("--algorithms", arguments.algorithms, {name: name for name in ALGORITHMS})
    if not all(word.isdigit() for word in arguments.seeds.split(",")):
        raise InputError(f"--seeds {arguments.seeds} is no list of numbers; give some like 1,2,3")
    model, count = story_model(arguments.model), 2 if arguments.quick else ITERATIONS
    measurement = Measurement("learning", arguments)
    runs: list[Learnt] = []
    for algorithm in algorithms:
        for seed in map(int, arguments.seeds.split(",")):
            runs.append(learn(algorithm, seed, model, count))
            measurement.say("  ".join(runs[-1].row()))
    columns = ["", "seed", *map(str, range(1, count + 1)), "0.9 at", "KL", "entropy", "s / iteration"]
    title = "Mean reward of each iteration; KL per token and entropy of the last"
    measurement.table("rewards", title, columns, [one.row() for one in runs])
    for algorithm in algorithms:
        reached = [one.reached or float("inf") for one in runs if one.algorithm == algorithm]
        if max(reached) < float("inf"):
            measurement.figure(f"{algorithm}.iterations", Figure.of(reached, "iterations").at_most(ITERATIONS))
    measurement.figure("reached", Figure(sum(one.reached is not None for one in runs), "runs").at_least(len(runs)))
    measurement.facts(runs=[asdict(one) for one in runs])
    measurement.finish()


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
