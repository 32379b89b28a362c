"""Generation and inference of one iteration, fused beside serial, on two instances of one CPU machine.

    python benchmarks/inter_stage.py --out fused.json --trace trace.json --markdown table.md
    python benchmarks/inter_stage.py --quick             the same in small, to see that it runs: no measurement

Two processes with one thread each hold a generation instance and an inference worker each, made of random Llamas: the
product's engine, scorer and inter-stage runtime. The actor and the reference are of one shape, critic and reward model
of another (1:2 and 2:1, as in the paper's pairs of models). Prompts are random tokens; prompt and output lengths are
those of requests of a real trace, scaled to the longest allowed, and are forced.

First decode steps, prefills, scoring and loading are profiled on each rank while the other one is idle, decodes and
scores, and the moving of keys and values between the ranks; what lies between the points is interpolated. The simulator
predicts every R_t with these costs and chooses one. Then serial (R_t = 0) and every other R_t run in turns, in the
opposite order every other round, and all must give the same tokens, log-probabilities, values and rewards, bit for bit.
The fastest of so many is fast by luck too, so the R_t chosen and the fastest one run in turn once more, and these runs
alone say how far the choice lies behind the best.

`bound` is 1 + T_inf / T_gen. `ideal` is the best that this n and m allow: migration and loading free, scoring cut as
finely as one likes. `cpu_share` is the processor time that the computing threads got of the time that their work took:
below 1 something else ran on the machine, and the figures are not to be trusted.

Nothing else should run meanwhile. Progress goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from typing import Any

from inter_stage_cases import (
    FULL,
    INSTANCES,
    PERCENTS,
    QUICK,
    QUICK_PERCENTS,
    ROLES,
    TRACE,
    Sizes,
    batch_lengths,
    context_batches,
    packs,
    thresholds,
)
from inter_stage_figures import Point, figures, goals, trace_spans
from inter_stage_profile import Profile
from inter_stage_runs import Run
from inter_stage_tables import line, markdown
from rank_processes import ALLOCATOR, Ranks, warn_of_company
from rich.console import Console
from search_runs import console, counting, finish, machine, named

from rlhfuse.costs.analytic import NEIGHBOURS
from rlhfuse.costs.grid import Grid
from rlhfuse.costs.profiled import ProfiledCost
from rlhfuse.errors import run_program
from rlhfuse.files import write_text
from rlhfuse.monitor.trace import Span, save_trace
from rlhfuse.simulator.instances import InstanceLimits
from rlhfuse.simulator.iteration import GenInferTimeline, move_cost, simulate_gen_infer
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.threshold import sweep_threshold

QUICK_ROUNDS = 2
REPEATS, QUICK_REPEATS = 3, 2  # of each piece of work in the profile
MORE_ROUNDS = 1  # for serial and the chosen R_t, for each round of the sweep
FINAL_ROUNDS = 7  # of the chosen R_t and the fastest of the sweep
WORKER = "inter_stage_worker:FusionRank"


def main() -> None:
    arguments = parse_arguments()
    cases = named("--sizes", arguments.sizes, {sizes.name: sizes for sizes in (QUICK if arguments.quick else FULL)})
    lengths = {sizes.name: batch_lengths(arguments.lengths, sizes, arguments.seed) for sizes in cases}
    screen = console()
    load = os.getloadavg()[0]
    rounds = QUICK_ROUNDS if arguments.quick else arguments.rounds
    found: list[dict[str, Any]] = []
    spans: list[Span] = []
    begun = time.monotonic()
    with Ranks(WORKER, {"OMP_NUM_THREADS": "1", **ALLOCATOR}) as ranks:
        for sizes in cases:
            ranks.ask("build", sizes, arguments.seed)
            case, drawn = measure(sizes, lengths[sizes.name], ranks, rounds, arguments, spans, screen)
            found.append(case)
            spans += drawn
            screen.print(line(case), highlight=False)
            warn_of_company(screen, case["cpu_share"])
    result = {
        "benchmark": "inter_stage",
        "machine": {**machine(), "ranks": INSTANCES, "threads": 1, "load_before": load},
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "seconds": time.monotonic() - begun,
        "rounds": rounds,
        "seed": arguments.seed,
        "trace": str(arguments.lengths),
        "quick": arguments.quick,
        "goals": [] if arguments.quick else [goal for case in found for goal in goals(case["case"], case)],
        "cases": found,
    }
    if arguments.trace:
        save_trace(spans, arguments.trace)
    if arguments.markdown:
        write_text(arguments.markdown, markdown(found))
    finish(result, arguments.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--sizes", default=FULL[0].name, help=f"some of {', '.join(sizes.name for sizes in FULL)}")
    parser.add_argument("--lengths", default=TRACE, metavar="FILE", help="csv, jsonl or parquet with both lengths")
    parser.add_argument("--rounds", type=counting, default=3, help="in which all R_t take turns")
    parser.add_argument("--seed", type=counting, default=1)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of tiny models and three R_t")
    parser.add_argument("--trace", metavar="FILE", help="Chrome trace: predicted above, measured below")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables here")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON object here")
    return parser.parse_args()


def measure(
    sizes: Sizes,
    lengths: SampleLengths,
    ranks: Ranks,
    rounds: int,
    arguments: argparse.Namespace,
    before: list[Span],
    screen: Console,
) -> tuple[dict[str, Any], list[Span]]:
    """Profile, predict, let all R_t take turns; figures, and the spans of the median runs behind those `before`."""
    ranks.ask("load", lengths, arguments.seed)
    screen.print(f"{sizes.name}: profiling work beside {', '.join(NEIGHBOURS)} instances", highlight=False)
    profile = profiled(sizes, ranks, QUICK_REPEATS if arguments.quick else REPEATS)
    costs = profile.fit()
    limits = sizes.limits(costs, lengths)
    chosen = sweep_threshold(lengths, INSTANCES, costs, limits, max_triggers=1).threshold
    percents = QUICK_PERCENTS if arguments.quick else PERCENTS
    swept = tuple(sorted({*thresholds(sizes.samples, percents), chosen}))
    turns = Turns(ranks, limits, costs, screen)
    runs = turns.sweep(swept, chosen, rounds)
    best = min(swept, key=lambda threshold: statistics.median(run.seconds for run in runs[threshold]))
    final = turns.final(chosen, best, QUICK_ROUNDS if arguments.quick else FINAL_ROUNDS)
    free = replace(costs, move=Grid(((1.0,),), (0.0,)), swap_in=0.0)
    points = [
        Point(r, simulated(lengths, costs, limits, r), simulated(lengths, free, limits, r), tuple(runs[r]))
        for r in swept
    ]
    case = {
        "case": sizes.name,
        "parameters": {role: sizes.parameters(role) for role in ROLES},
        "samples": sizes.samples,
        "lengths": lengths.percentiles(),
        "prompt_tokens": sum(lengths.prompt),
        "output_tokens": sum(lengths.output),
        "bs_max": limits.bs_max,
        "step_of_8_over_1": profile.step_ratio(8),
        **figures(points, chosen, final, len(turns.digests) == 1),
        "profile": profile.table(costs),
        "costs": costs.to_dict(),
    }
    begin = max((span.end_seconds for span in before), default=0.0)
    return case, trace_spans(points, chosen, begin, sizes.name)


def profiled(sizes: Sizes, ranks: Ranks, repeats: int) -> Profile:
    """Each rank in turn beside each neighbour, after one unmeasured turn that loads all kernels."""
    ranks.ask("profile", 0, "idle", ((1, 1),), ((1, 2),), 1)
    ranks.ask("profile", 1, "idle", ((1, 1),), ((1, 2),), 1)
    answers = [
        (neighbour, ranks.ask("profile", rank, neighbour, context_batches(sizes), packs(sizes), repeats)[rank])
        for neighbour in NEIGHBOURS
        for rank in range(INSTANCES)
    ]
    contexts = (1, sizes.max_prompt, sizes.max_output // 2)
    return Profile.of(answers, ranks.ask("migration", contexts, repeats)[0])


class Turns:
    """Runs of generation and inference at one R_t after another, the order turned round every other time."""

    def __init__(self, ranks: Ranks, limits: InstanceLimits, costs: ProfiledCost, screen: Console) -> None:
        self._ranks, self._limits, self._screen = ranks, limits, screen
        self._moving = move_cost(costs, limits)
        self.digests: set[str] = set()  # of everything that came out

    def sweep(self, swept: tuple[int, ...], chosen: int, rounds: int) -> dict[int, list[Run]]:
        """Runs by R_t, in the order of rounds; serial and the chosen one have more of them."""
        for threshold in (0, chosen):
            self._run(threshold, "warm-up")
        return self._rounds((*swept, *(0, chosen) * MORE_ROUNDS), rounds, "sweep")

    def final(self, chosen: int, best: int, rounds: int) -> dict[int, list[Run]]:
        """Runs of the R_t chosen and of the fastest of the sweep; none where they are the same."""
        return self._rounds((chosen, best), rounds, "choice against best") if chosen != best else {}

    def _rounds(self, turn: tuple[int, ...], rounds: int, name: str) -> dict[int, list[Run]]:
        runs: dict[int, list[Run]] = {threshold: [] for threshold in turn}
        for number in range(rounds):
            for threshold in turn if number % 2 == 0 else reversed(turn):
                runs[threshold].append(self._run(threshold, f"{name}, round {number + 1} of {rounds}"))
        return runs

    def _run(self, threshold: int, name: str) -> Run:
        run = Run.of(self._ranks.ask("run", (threshold,) if threshold else (), self._limits, self._moving))
        self._screen.print(f"{name}: R_t {threshold}: {run.seconds:.2f} s", highlight=False)
        self.digests |= {rank.digest for rank in run.ranks}
        return run


def simulated(lengths: SampleLengths, costs: ProfiledCost, limits: InstanceLimits, threshold: int) -> GenInferTimeline:
    return simulate_gen_infer(lengths, INSTANCES, costs, limits, (threshold,) if threshold else ())


if __name__ == "__main__":
    run_program(main)
