"""Predicted beside measured seconds of every phase of a real training on two ranks, in one table.

    python benchmarks/iteration_prediction.py --iterations 16 [--reward 50: with a function of 50 ms a sample]

Trains a run like examples/quickstart.yaml with both fusions, then tools/show_forecast.py predicts every iteration from
the iterations before it. Lengths are the iteration's own in the first prediction, so that it shows the error of the
costs alone, and those of the iterations before in the second. The first ones, which compile kernels, are left out.
A second table has the seconds that a plan gives the same lengths before anything was measured, by analytic costs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from harness import Figure, Measurement, counting, options
from processes import ROOT, run, train

from rlhfuse.base.errors import InputError, run_program

SKIPPED = 2  # iterations at the beginning
ERROR_GOAL = 0.10
REWARD = "import time\ndef wait(completions):\n    time.sleep({})\n    return [0.0] * len(completions)\n"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--iterations", type=counting, default=16)
    parser.add_argument("--reward", type=float, default=0.0, metavar="MILLISECONDS", help="of a reward function")
    arguments = parser.parse_args()
    if arguments.iterations <= SKIPPED:
        raise InputError(f"--iterations {arguments.iterations}: the first {SKIPPED} are left out; give some more")
    measurement = Measurement("iteration_prediction", arguments)
    with tempfile.TemporaryDirectory() as folder:
        out, file = Path(folder) / "run", Path(folder) / "reward.py"
        file.write_text(REWARD.format(arguments.reward / 1e3))
        changes = settings(arguments.iterations, arguments.quick, arguments.seed)
        changes += [f"reward.function={file}:wait", "reward.signature=trl"] if arguments.reward else []
        metrics = train(ROOT / "examples" / "quickstart.yaml", out, changes)[SKIPPED:]
        run([sys.executable, ROOT / "tools" / "show_forecast.py", out, "--skip", str(SKIPPED)])
        found, before = json.loads((out / "forecast.json").read_text()), planned(out)
    count, rows = len(found["iterations"]), []
    for row in found["phases"]:
        error, has_goal = Figure(row["error"]), arguments.reward and row["phase"] == "step"
        measurement.figure(f"{row['phase']}.error", error.at_most(ERROR_GOAL) if has_goal else error)
        seconds = [f"{row[key] / count:.3f} s" for key in ("measured", "predicted", "blind")]
        rows.append([row["phase"], *seconds[:2], f"{row['error']:.1%}", seconds[2], f"{row['blind_error']:.1%}"])
    if arguments.reward:
        measurement.figure("reward.waited", Figure.of([row["timing_s/reward"] for row in metrics], "s"))
    mean = measurement.figure("mean_error", Figure(found["mean_error"]).at_most(ERROR_GOAL))
    blind = measurement.figure("blind_mean_error", found["blind_mean_error"])
    rows.append(["mean over the phases", "", "", f"{mean.value:.1%}", "", f"{blind.value:.1%}"])
    head = ("phase", "measured", "predicted", "off by", "lengths unknown", "off by")
    measurement.table("phases", f"Seconds of an iteration, mean of {count}", head, rows)
    rows = []
    for phase, (keys, seconds) in before.items():
        clock = fmean(sum(row[f"timing_s/{key}"] for key in keys) for row in metrics)
        ratio = measurement.figure(f"planned.{phase}", seconds / clock)
        rows.append([phase, f"{clock:.3f} s", f"{seconds:.3f} s", f"{ratio.value:.2f}"])
    measurement.table("planned", "Before anything was measured", ("phase", "measured", "planned", "ratio"), rows)
    measurement.facts(iterations=count)
    measurement.finish()


def planned(out: Path) -> Mapping[str, tuple[Sequence[str], float]]:
    """Phases of metrics, and the seconds of an iteration that a plan gives them for the lengths of the run in `out`."""
    plan = [sys.executable, ROOT / "tools" / "plan.py", "--json", "--world-size", "2", "--config", out / "config.yaml"]
    text = subprocess.run([*plan, f"parallel.lengths={out}"], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds = json.loads(text.stdout)["seconds"]
    parts = {"generation and inference": (("gen", "infer"), seconds["gen_infer_fused"])}
    parts |= {"training": (("train",), seconds["training_fused"])}
    every = seconds["weight_moves"] + sum(part for _, part in parts.values())
    return parts | {"iteration": (("step",), every)}


def settings(iterations: int, quick: bool, seed: int) -> list[str]:
    """What differs from examples/quickstart.yaml."""
    prompts, tokens = (4, 64) if quick else (16, 384)
    return [
        f"rollout.prompts_per_iteration={prompts}",
        f"rollout.max_response_tokens={tokens}",
        "algorithm.minibatches=2",
        "fusion.actor_microbatches=4",
        "fusion.search_seconds=1",
        "fusion.least_threshold=0",
        "fusion.bs_max=0",
        *(f"parallel.{role}_train=d1t1p2" for role in ("actor", "critic")),
        *(f"parallel.{task}=d2t1p1" for task in ("generation", "inference")),
        f"trainer.iterations={iterations}",
        f"trainer.trace_iterations={iterations}",
        f"trainer.seed={seed}",
        "trainer.tensorboard=false",
        "trainer.export=false",
        "trainer.save_every=0",
    ]


if __name__ == "__main__":
    run_program(main)
