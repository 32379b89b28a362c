"""CPU time of the simulator: 512 samples on 256 GPUs, 32 generation instances of tp 8.

    python benchmarks/simulator_speed.py [--lengths FILE[:COLUMN]]

One iteration, serial and fused, is asked to take under 50 ms; the sweep is 20 values of R_t over 5 batches. Costs are
analytic (33B actor, 13B critic and reward model); lengths are lognormal, or drawn from a file and clipped to 1024.
"""

from __future__ import annotations

import time

from harness import Figure, Measurement, options, take_turns, timed
from paper_settings import BS_MAX, INSTANCES, KV_BYTES, MAX_PROMPT, SAMPLES, SCORE_TOKENS, TP, cost_of, draw_lengths

from rlhfuse.base.errors import run_program
from rlhfuse.config.spec import ParallelLayout
from rlhfuse.costs.analytic import JobCost
from rlhfuse.simulator.instances import InstanceLimits
from rlhfuse.simulator.iteration import simulate_gen_infer, simulate_iteration
from rlhfuse.simulator.lengths import load_lengths
from rlhfuse.simulator.threshold import sweep_threshold

MAX_LENGTH, DRAWS, ASKED_MS = 1024, 5, 50.0


def main() -> None:
    parser = options(__doc__, rounds=20, seed=False)
    parser.add_argument("--lengths", metavar="FILE[:COLUMN]", help="lengths to draw from instead of lognormal ones")
    arguments = parser.parse_args()
    batches = draw_lengths(MAX_LENGTH, DRAWS)
    if arguments.lengths:
        seen = load_lengths(arguments.lengths, default_prompt=MAX_PROMPT).lengths.clip(MAX_PROMPT, MAX_LENGTH)
        batches = seen.draw(SAMPLES, DRAWS, seed=0)
    measurement = Measurement("simulator_speed", arguments)
    layout = ParallelLayout(1, TP, 1)
    actor, critic = cost_of("33B", False, layout), cost_of("13B", True, layout)
    costs = JobCost(actor, (actor, critic, critic), cross_node=True)
    limits = InstanceLimits(
        256, KV_BYTES, actor.spec.kv_bytes_per_token(2), 16, BS_MAX, MAX_PROMPT, MAX_LENGTH, SCORE_TOKENS
    )
    setting, threshold = (INSTANCES, costs, limits), SAMPLES // 5
    works = {
        "serial": lambda: simulate_gen_infer(batches[0], *setting, 0),
        "fused": lambda: simulate_gen_infer(batches[0], *setting, threshold),
        "iteration": lambda: simulate_iteration(batches[0], *setting, threshold, (1.0, 1.0), 8, 0.0),
    }
    rounds = 2 if arguments.quick else arguments.rounds
    clock = time.process_time
    taken = take_turns({name: timed(work, clock) for name, work in works.items()}, rounds)
    taken |= take_turns({"sweep": timed(lambda: sweep_threshold(batches, *setting), clock)}, max(1, rounds // 10))
    rows = []
    for name, seconds in taken.items():
        figure = Figure.of([1e3 * value for value in seconds], "ms")
        measurement.figure(name, figure if name == "sweep" else figure.at_most(ASKED_MS))
        rows.append([name, figure.text(".1f")])
    measurement.table("speed", "CPU milliseconds of the simulator", ("work", "ms"), rows)
    measurement.facts(samples=SAMPLES, instances=INSTANCES, lengths=arguments.lengths or "lognormal")
    measurement.finish()


if __name__ == "__main__":
    run_program(main)
