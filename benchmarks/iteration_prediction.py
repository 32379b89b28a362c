"""Predicted and measured seconds of every phase of a real training run, and how far apart they are.

    python benchmarks/iteration_prediction.py --out prediction.json --markdown table.md --run-dir runs/prediction
    python benchmarks/iteration_prediction.py --quick    fewer and smaller iterations, to see that it runs

Trains the tiny models of examples/tiny with PPO and both fusions, two ranks with one thread each, as users do, with
torchrun and tools/train_ppo.py. Every iteration is predicted from the iterations before it, generation and inference
by simulation at the costs that the run has fitted to its last iterations (costs.json). Lengths are the iteration's own
in the first prediction, so that it shows the error of the costs alone, and those of the iterations before in the
second. The first iterations, which compile kernels and allocate, are left out.

`run-dir` keeps the run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from launched import end
from omegaconf import OmegaConf
from search_runs import console, counting, finish, machine

from rlhfuse.errors import InputError, run_program
from rlhfuse.files import write_text
from rlhfuse.monitor.report.forecast_table import ForecastTable
from rlhfuse.monitor.report.run_files import RunFiles

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
SKIPPED = 2  # iterations at the beginning
ERROR_GOAL = 0.10


def main() -> None:
    arguments = parse_arguments()
    if arguments.iterations <= SKIPPED:
        raise InputError(f"--iterations {arguments.iterations}: the first {SKIPPED} are left out; give some more")
    if arguments.run_dir and Path(arguments.run_dir).exists():
        raise InputError(f"--run-dir {arguments.run_dir} exists; give another name")
    screen = console()
    load, begun = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(arguments.run_dir or Path(folder) / "run").resolve()
        config = Path(folder) / "run.yaml"
        OmegaConf.save(OmegaConf.create(settings(arguments, run_dir)), config)
        train(config, arguments.timeout)
        table = ForecastTable.of(RunFiles.read(run_dir), SKIPPED)
    screen.print(table.text(), highlight=False)
    result = {
        "benchmark": "iteration_prediction",
        "machine": {**machine(), "ranks": RANKS, "threads": 1, "load_before": load},
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "seconds": time.monotonic() - begun,
        "quick": arguments.quick,
        "goals": [] if arguments.quick else [goal(table)],
        **table.to_dict(),
    }
    if arguments.markdown:
        write_text(arguments.markdown, table.markdown())
    finish(result, arguments.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--iterations", type=counting, default=12)
    parser.add_argument("--quick", action="store_true", help="small iterations")
    parser.add_argument("--run-dir", metavar="DIR", help="keep the run here")
    parser.add_argument("--timeout", type=counting, default=900, help="seconds that the training may take")
    parser.add_argument("--markdown", metavar="FILE", help="write the table here")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON object here")
    return parser.parse_args()


def settings(arguments: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """A run like examples/quickstart.yaml on two ranks."""
    prompts, tokens = (4, 64) if arguments.quick else (16, 384)
    return {
        "actor": {"path": str(ROOT / "examples/tiny/actor"), "optim": {"lr": 1e-4}},
        "reward": {"path": str(ROOT / "examples/tiny/reward")},
        "critic": {"optim": {"lr": 3e-4}},
        "data": {"train_files": [str(ROOT / "examples/prompts/quickstart.jsonl")], "max_prompt_tokens": 32},
        "rollout": {"prompts_per_iteration": prompts, "samples_per_prompt": 4, "max_response_tokens": tokens},
        "algorithm": {"minibatches": 2, "kl_coef": 0.05},
        "fusion": {"actor_microbatches": 4, "search_seconds": 1},
        "parallel": {"actor_train": "d1t1p2", "critic_train": "d1t1p2", "generation": "d2t1p1", "inference": "d2t1p1"},
        "trainer": {
            "iterations": arguments.iterations,
            "tensorboard": False,
            "export": False,
            "save_every": 0,
            "seed": 1,
            "trace_iterations": arguments.iterations,
            "output_dir": str(run_dir),
        },
    }


def train(config: Path, timeout: float) -> None:
    """Raises RuntimeError with the end of the output when the training fails or takes too long."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [str(ROOT / "tools/train_ppo.py"), "--config", str(config)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        if process.returncode:
            raise RuntimeError(f"the training ended with code {process.returncode}:\n{output[-4000:]}")
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the training took more than {timeout} s; give a longer --timeout") from None
    finally:
        end(process)


def goal(table: ForecastTable) -> dict[str, Any]:
    error, figure = table.mean_error, "mean error over the phases"
    return {"figure": figure, "goal": ERROR_GOAL, "measured": error, "reached": error <= ERROR_GOAL}


if __name__ == "__main__":
    run_program(main)
