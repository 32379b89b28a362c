"""Training without samples that have no gradient beside training with them, in turns, and what plans said of both.

    python benchmarks/zero_gradients.py [--model FOLDER] [--alike 0.4]

GRPO without a KL on stories260K (260,032 parameters, no part of this repository), two ranks of one thread: as two
pipelines, and as one of two stages. All samples of the prompts that --alike gives a share of score the same, the others
by their tokens. The learning rate is 0, so both sides draw the same samples. The plan of a side is for the lengths of
the first run that left samples out, by analytic costs: so shares are compared, not seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from harness import DATA, Figure, Measurement, counting, options, take_turns
from processes import ROOT, train

from rlhfuse.base.errors import run_program

SKIPPED = 2  # iterations at the beginning, which compile kernels
TOLERANCE = 0.10  # of the share that the plan says is saved
ALL, FEWER = "all samples", "those with a gradient"
LEFT_OUT = ("samples", "tokens")  # names of metrics
REWARD = """import zlib

def sums(prompts, completion_ids):
    return [sum(ids) * (zlib.crc32(prompt.encode()) % 1000 >= {}) for prompt, ids in zip(prompts, completion_ids)]
"""


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--model", metavar="FOLDER", default=DATA / "stories260K-hf", help="[%(default)s]")
    parser.add_argument("--alike", type=float, default=0.4, help="share of the prompts [%(default)s]")
    parser.add_argument("--iterations", type=counting, default=10, help="of a run [%(default)s]")
    arguments = parser.parse_args()
    measurement, rows = Measurement("zero_gradients", arguments), []
    with tempfile.TemporaryDirectory() as folder:
        reward = Path(folder) / "reward.py"
        reward.write_text(REWARD.format(round(1000 * arguments.alike)))
        iterations = SKIPPED + 1 if arguments.quick else SKIPPED + arguments.iterations
        for layout in ("d2t1p1", "d1t1p2"):
            own = [*settings(arguments.quick, iterations, arguments.seed), f"parallel.actor_train={layout}"]
            own += [f"actor.path={arguments.model}", f"reward.function={reward}:sums"]
            rows.append(beside(measurement, Path(folder), layout, own, 1 if arguments.quick else arguments.rounds))
    head = ("layout", "left out", "of the tokens", ALL, FEWER, "saved", "planned", "ratio")
    measurement.table("saved", "Seconds of training in an iteration", head, rows)
    measurement.finish()


def beside(measurement: Measurement, folder: Path, layout: str, own: Sequence[str], rounds: int) -> list[str]:
    """Measure both sides and ask for their plans; a row of the table."""

    def trained(side: str, number: int) -> Path:
        out = folder / f"{layout}-{len(side)}-{number}"
        train(ROOT / "examples" / "stories_grpo.yaml", out, [*own, skips(side)])
        return out

    runs = take_turns({side: partial(trained, side) for side in (ALL, FEWER)}, rounds)
    seconds = {side: [training_seconds(out) for out in made] for side, made in runs.items()}
    measured = Figure.of([1 - few / every for every, few in zip(seconds[ALL], seconds[FEWER])])
    plans = [planned_seconds([*own, skips(side)], runs[FEWER][0]) for side in (ALL, FEWER)]
    planned, part = 1 - plans[1] / plans[0], measurement.part(layout)
    left_out = {of: fmean(row[f"training/zero_gradient/{of}"] for row in kept(runs[FEWER][0])) for of in LEFT_OUT}
    for of, share in left_out.items():
        part.figure(f"left_out.{of}", share)
    part.figure("saved", measured)
    part.figure("planned", planned)
    ratio = part.figure("of_planned", Figure(measured.value / planned))
    part.figure("off_by", Figure(abs(ratio.value - 1)).at_most(TOLERANCE))
    times = [f"{Figure.of(seconds[side]).value:.3f} s" for side in (ALL, FEWER)]
    percents = [f"{share:.1%}" for share in (*left_out.values(), measured.value, planned)]
    return [layout, *percents[:2], *times, *percents[2:], f"{ratio.value:.2f}"]


def kept(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][SKIPPED:]


def training_seconds(out: Path) -> float:
    """Median of an iteration."""
    return Figure.of([row["timing_s/train"] for row in kept(out)]).value


def skips(side: str) -> str:
    return f"algorithm.skip_zero_gradients={str(side == FEWER).lower()}"


def planned_seconds(own: Sequence[str], lengths: Path) -> float:
    """Seconds of training in an iteration of a plan for the `lengths` of a run."""
    words = ["--json", "--world-size", "2", "--config", ROOT / "examples" / "stories_grpo.yaml", *own]
    plan = subprocess.run(
        [sys.executable, ROOT / "tools" / "plan.py", *words, f"parallel.lengths={lengths}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(plan.stdout)["seconds"]["training_fused"]


def settings(quick: bool, iterations: int, seed: int) -> list[str]:
    """What differs from examples/stories_grpo.yaml."""
    prompts, tokens = (8, 32) if quick else (20, 160)
    return [
        f"rollout.prompts_per_iteration={prompts}",
        f"rollout.max_response_tokens={tokens}",
        "actor.optim.lr=0",
        "algorithm.minibatches=2",
        "fusion.actor_microbatches=auto",
        f"fusion.microbatch_tokens={4 * (tokens + 32)}",
        "fusion.search_seconds=1",
        f"trainer.iterations={iterations}",
        f"trainer.seed={seed}",
        "trainer.tensorboard=false",
        "trainer.export=false",
    ]


if __name__ == "__main__":
    run_program(main)
