"""Does it learn? Little sums in words on several seeds, under torchrun.

    python benchmarks/learning.py [--tasks sums,dapo,calculator] [--seeds 1]

sums is examples/sums_grpo.yaml, dapo the same with dynamic sampling (algorithm.filter_groups), calculator is
examples/calculator_grpo.yaml, whose model may call a tool. The goal is that the share of held-out sums that are right
rises on every seed by three standard errors of the difference, first and last evaluation taken as independent (they
share their prompts).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import DATA, Figure, Measurement, named, options
from processes import ROOT, train

from rlhfuse.base.errors import InputError
from rlhfuse.tools.program import run_program

SUMS: dict[str, tuple[str, ...]] = {  # the example of each, and what is added to it
    "sums": ("sums_grpo",),
    "dapo": ("sums_grpo", "algorithm.filter_groups.enable=true"),
    "calculator": ("calculator_grpo",),
}
RISE_GOAL = 3.0


@dataclass(frozen=True)
class Rise:
    """One run, by evaluation: the mean held-out score, and its standard error."""

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


def main() -> None:
    parser = options(__doc__, seed=False)
    parser.add_argument("--tasks", default=",".join(SUMS), help="[%(default)s]")
    parser.add_argument("--seeds", default="1,2,3", help="[%(default)s]")
    arguments = parser.parse_args()
    tasks = named("--tasks", arguments.tasks, {name: name for name in SUMS})
    if not all(word.isdigit() for word in arguments.seeds.split(",")):
        raise InputError(f"--seeds {arguments.seeds} is no list of numbers; give some like 1,2,3")
    measurement, runs = Measurement("learning", arguments), []
    for task in tasks:
        for seed in map(int, arguments.seeds.split(",")):
            runs.append(do_sums(task, seed, arguments.quick))
            measurement.say("  ".join(runs[-1].row()))
    report(measurement, runs)
    measurement.finish()


def report(measurement: Measurement, runs: list[Rise]) -> None:
    columns = ["", "seed", *("before" if i < 0 else str(i + 1) for i in runs[0].iterations), "standard errors"]
    measurement.table("sums", "Held-out sums right after so many iterations", columns, [one.row() for one in runs])
    for task in dict.fromkeys(one.task for one in runs):
        rises = [one.standard_errors for one in runs if one.task == task]
        least = Figure(min(rises), "standard errors", rounds=len(rises))
        measurement.figure(f"{task}.least_rise", least.at_least(RISE_GOAL))
    measurement.facts(sums=[asdict(one) for one in runs])


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
