"""Samples accepted a second where groups of equal scores are drawn again: as they are judged, beside in rounds.

    python benchmarks/group_filtering.py [--rounds 5] [--iterations 40]

Trains examples/sums_grpo.yaml with algorithm.filter_groups on two ranks, streaming and in rounds in turns. Both take
the same groups, so every iteration has the same samples; seconds are those of generation with scoring. The limit is
the same run without filtering: what it generates a second, times the share of samples that were begun and accepted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import Figure, Measurement, counting, options, take_turns
from processes import ROOT, train

from rlhfuse.base.errors import InputError, run_program

SKIPPED = 4  # iterations at the beginning
GOAL = 1.2
FILTERED = "algorithm.filter_groups.enable=true"
SIDES: Mapping[str, Sequence[str]] = {
    "streaming": (FILTERED,),
    "rounds": (FILTERED, "algorithm.filter_groups.streaming=false"),
    "unfiltered": (),
}
BEGUN = "training/filter_groups/num_gen_batches"


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
    shares = [sum(row[BEGUN] for row in rows) / len(rows) for rows in made["streaming"]]
    limits = [rate / share for rate, share in zip(rates["unfiltered"], shares)]
    reached = [one / limit for one, limit in zip(rates["streaming"], limits)]
    share = measurement.figure("of_limit", Figure.of(reached))
    figures = {name: Figure.of(each, "samples/s") for name, each in {**rates, "limit": limits}.items()}
    rows = [[name, f"{measurement.figure(name, figure).value:.0f}"] for name, figure in figures.items()]
    begun = measurement.figure("begun", Figure.of(shares))
    measurement.table("rates", "Samples accepted a second", ("", "samples/s"), rows)
    measurement.say(f"streaming over rounds {gain}, of the limit {share}; groups begun for one accepted {begun}")
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
