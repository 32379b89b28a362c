"""Samples accepted a second where groups of equal scores are drawn again: as they are judged, beside in rounds.

    python benchmarks/group_filtering.py [--rounds 5] [--iterations 40]

Trains examples/sums_grpo.yaml with algorithm.filter_groups on two ranks, streaming and in rounds in turns. Both take
the same groups, so every iteration has the same samples; seconds are those of generation with scoring. The run
without filtering trains on all that it generates: its rate over the groups begun for one taken is the limit where a
sample costs the same whatever runs beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import Figure, Measurement, counting, options, take_turns
from processes import ROOT, train

from rlhfuse.base.errors import InputError, run_program
from rlhfuse.decisions.group_selection import BEGUN

SKIPPED = 4  # iterations at the beginning
GOAL = 1.2
FILTERED = "algorithm.filter_groups.enable=true"
SIDES: Mapping[str, Sequence[str]] = {
    "streaming": (FILTERED,),
    "rounds": (FILTERED, "algorithm.filter_groups.streaming=false"),
    "unfiltered": (),
}


def main() -> None:
    parser = options(__doc__, rounds=5)
    parser.add_argument("--iterations", type=counting, default=40)
    arguments = parser.parse_args()
    count = SKIPPED + 2 if arguments.quick else arguments.iterations
    if count <= SKIPPED:
        raise InputError(f"--iterations {count}: the first {SKIPPED} are left out; give some more")
    measurement = Measurement("group_filtering", arguments)
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: partial(iterations, Path(folder), count, arguments.seed, more) for name, more in SIDES.items()}
        made = take_turns(sides, 1 if arguments.quick else arguments.rounds)
    for streamed, in_rounds in zip(made["streaming"], made["rounds"]):
        if [row["rollout/digest"] for row in streamed] != [row["rollout/digest"] for row in in_rounds]:
            raise RuntimeError("streaming and rounds took different groups")
    rates = {name: [samples_a_second(rows) for rows in runs] for name, runs in made.items()}
    gains = [one / other for one, other in zip(rates["streaming"], rates["rounds"])]
    gain = measurement.figure("over_rounds", Figure.of(gains, "x").at_least(GOAL))
    rows = []
    for name, each in rates.items():
        begun = [fmean(row.get(BEGUN, 1.0) for row in run) for run in made[name]]
        shares = [one * groups / most for one, groups, most in zip(each, begun, rates["unfiltered"])]
        figures = Figure.of(each, "samples/s"), Figure.of(begun), Figure.of(shares)
        for key, figure in zip((name, f"{name}.begun", f"{name}.of_limit"), figures):
            measurement.figure(key, figure)
        rows.append([name, *(f"{figure.value:{form}}" for figure, form in zip(figures, (".0f", ".2f", ".0%")))])
    columns = ("", "samples taken a second", "groups begun for one taken", "of the limit")
    measurement.table("rates", f"Streaming over rounds: {gain.value:.2f}", columns, rows)
    measurement.facts(iterations=count - SKIPPED)
    measurement.finish()


def iterations(folder: Path, count: int, seed: int, settings: Sequence[str], number: int) -> list[dict[str, Any]]:
    """Metrics of a run without its first iterations."""
    plain = (f"trainer.iterations={count}", f"trainer.seed={seed}", "trainer.export=false")
    still = ("trainer.eval_every=0", "trainer.eval_before_train=false")
    out = Path(tempfile.mkdtemp(dir=folder))
    return train(ROOT / "examples" / "sums_grpo.yaml", out / "run", (*plain, *still, *settings))[SKIPPED:]


def samples_a_second(rows: Sequence[Mapping[str, Any]]) -> float:
    """Those that are trained on, over seconds of generation with scoring."""
    return sum(len(row["lengths/output"]) for row in rows) / sum(row["fusion/gen_infer_seconds"] for row in rows)


if __name__ == "__main__":
    run_program(main)
