"""How long the simulator takes: 512 samples on 256 GPUs, 32 generation instances of tp 8.

    python benchmarks/simulator_speed.py [--rounds 20] [--lengths FILE[:COLUMN]]

One iteration, serial and fused, is asked to take under 50 ms; the sweep is 20 values of R_t over 5 batches. Costs
are analytic (33B actor, 13B critic and reward model). Lengths are lognormal, or drawn from a file and clipped to 1024.
Times are this process's CPU time, the median of the rounds. One JSON object goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from paper_settings import BS_MAX, INSTANCES, KV_BYTES, MAX_PROMPT, SAMPLES, SCORE_TOKENS, TP, cost_of, draw_lengths

from rlhfuse.config.spec import ParallelLayout
from rlhfuse.costs.analytic import JobCost
from rlhfuse.errors import InputError, run_program
from rlhfuse.simulator.instances import InstanceLimits
from rlhfuse.simulator.iteration import simulate_gen_infer, simulate_iteration
from rlhfuse.simulator.lengths import load_lengths
from rlhfuse.simulator.threshold import sweep_threshold

MAX_LENGTH, DRAWS, ASKED_MS = 1024, 5, 50.0


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """Median CPU time of `work`."""
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        taken.append((time.process_time() - start) * 1e3)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of the simulator.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lengths", metavar="FILE[:COLUMN]", help="lengths to draw from instead of lognormal ones")
    args = parser.parse_args()
    if args.rounds < 1:
        raise InputError(f"--rounds {args.rounds} must be at least 1")
    batches = draw_lengths(MAX_LENGTH, DRAWS)
    if args.lengths:
        seen = load_lengths(args.lengths, default_prompt=MAX_PROMPT).lengths.clip(MAX_PROMPT, MAX_LENGTH)
        batches = seen.draw(SAMPLES, DRAWS, seed=0)
    layout = ParallelLayout(1, TP, 1)
    actor, critic = cost_of("33B", False, layout), cost_of("13B", True, layout)
    costs = JobCost(actor, (actor, critic, critic), cross_node=True)
    limits = InstanceLimits(
        256, KV_BYTES, actor.spec.kv_bytes_per_token(2), 16, BS_MAX, MAX_PROMPT, MAX_LENGTH, SCORE_TOKENS
    )
    setting, triggers = (INSTANCES, costs, limits), (SAMPLES // 5,)
    result = {
        "serial_ms": milliseconds(lambda: simulate_gen_infer(batches[0], *setting, ()), args.rounds),
        "fused_ms": milliseconds(lambda: simulate_gen_infer(batches[0], *setting, triggers), args.rounds),
        "iteration_ms": milliseconds(
            lambda: simulate_iteration(batches[0], *setting, triggers, (1.0, 1.0), 8, 0.0), args.rounds
        ),
        "sweep_ms": milliseconds(lambda: sweep_threshold(batches, *setting), max(1, args.rounds // 10)),
        "asked_iteration_ms": ASKED_MS,
        "samples": SAMPLES,
        "instances": INSTANCES,
        "lengths": args.lengths or "lognormal",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    run_program(main)
