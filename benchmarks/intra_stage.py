"""Speed of fused training of an actor and a critic beside serial training, on two ranks of one CPU machine.

    python benchmarks/intra_stage.py --out fused.json --trace trace.json --markdown table.md
    python benchmarks/intra_stage.py --quick             the same in small, to see that it runs: no measurement

Two processes with one thread each train two random Llamas with Megatron-core stages over gloo: the actor's two stages
on ranks 0 and 1, the critic's on ranks 1 and 0. The sides take turns in one run, in the opposite order every other
round:

    megatron_1f1b      Megatron's forward_backward_pipelining_without_interleaving, actor, barrier, critic
    serial             this project's executor with the 1F1B schedule of the actor, barrier, of the critic
    serial_no_barrier  the same without the barrier
    fused              the executor with a searched schedule
    serial_step        serial and fused with the optimizer steps in it: reduction, norm, clipping, update; the first
    fused_step         model of a fused step keeps an undo copy

Of the first four one mini-batch is timed from a barrier to the last gradient; the barrier between models stands for the
optimizer step. The headline is fused against the faster of the first two. Before each case every action is timed while
both ranks are busy; the schedules are made of these times, and what they promise (serial makespan / fused makespan)
stands beside what is measured. `bound` is that ratio for the best schedule that could exist. All sides must leave the
same gradients, bit for bit, Megatron's own loop included.

`cpu_share` is the processor time that the computing thread got of the time its actions took: below 1 something else
ran on the machine, and the figures are not to be trusted. `executor` is the time between the return of one instruction
and the start of the next, without the calls that send and receive, which stand beside it.

Nothing else should run meanwhile. Progress goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from intra_stage_cases import (
    FULL,
    FUSED,
    FUSED_STEP,
    MICROBATCHES,
    MODELS,
    NO_BARRIER,
    QUICK,
    SAME_GRADIENTS,
    SERIAL,
    SERIAL_STEP,
    SIDES,
    Case,
    Schedules,
    Times,
    problem_of,
    rank_layout,
)
from intra_stage_figures import case_figures, goals, markdown, trace_spans
from intra_stage_ranks import Round
from rank_processes import ALLOCATOR, Ranks, warn_of_company
from search_runs import console, counting, finish, machine, named

from rlhfuse.errors import InputError, run_program
from rlhfuse.files import write_text
from rlhfuse.monitor.trace import save_trace
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Program, Programs

PROFILE_CYCLES = 8
QUICK_ROUNDS = 2


def main() -> None:
    arguments = parse_arguments()
    cases = chosen_cases(arguments)
    screen = console()
    load = os.getloadavg()[0]
    allocator = {} if arguments.default_malloc else ALLOCATOR
    rounds = QUICK_ROUNDS if arguments.quick else arguments.rounds
    found: list[dict[str, Any]] = []
    spans: list[Any] = []
    begun = time.monotonic()
    with Ranks("intra_stage_worker:TrainingRank", {"OMP_NUM_THREADS": "1", **allocator}) as ranks:
        built = None
        for case in cases:
            if case.sizes is not built:
                ranks.ask("build", case.sizes, arguments.seed)
                built = case.sizes
            figures, drawn = measure(case, ranks, rounds, arguments.seed, spans)
            found.append(figures)
            spans = drawn
            screen.print(line(figures), highlight=False)
            warn_of_company(screen, figures["cpu_share"])
    result = {
        "benchmark": "intra_stage",
        "machine": {**machine(), "ranks": 2, "threads": 1, "load_before": load},
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "seconds": time.monotonic() - begun,
        "rounds": rounds,
        "seed": arguments.seed,
        "quick": arguments.quick,
        "allocator": allocator,
        "goals": [] if arguments.quick else goals(found),
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
    parser.add_argument("--sizes", default=",".join(sizes.name for sizes in FULL), help="such as 1:1")
    parser.add_argument("--microbatches", default=",".join(map(str, MICROBATCHES)), help="such as 2,4")
    parser.add_argument("--rounds", type=counting, default=11, help="in which the sides take turns")
    parser.add_argument("--seed", type=counting, default=1)
    parser.add_argument("--default-malloc", action="store_true", help="leave glibc's allocator as it is")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of tiny models")
    parser.add_argument("--trace", metavar="FILE", help="Chrome trace: predicted above, measured below")
    parser.add_argument("--markdown", metavar="FILE", help="write the table here")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON object here")
    return parser.parse_args()


def chosen_cases(arguments: argparse.Namespace) -> list[Case]:
    """Raises InputError for sizes that are not there, and for a number of micro-batches below 2."""
    known = {sizes.name: sizes for sizes in (QUICK if arguments.quick else FULL)}
    counts = []
    for word in arguments.microbatches.split(","):
        if not word.strip().isdigit() or int(word) < 2:
            raise InputError(f"--microbatches {arguments.microbatches}: {word!r} is not a number of at least 2")
        counts.append(int(word))
    return [Case(sizes, count) for sizes in named("--sizes", arguments.sizes, known) for count in counts]


def measure(case: Case, ranks: Ranks, rounds: int, seed: int, spans: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    """Profile, make the schedules, let the sides take turns; figures, and `spans` with this case's added."""
    ranks.ask("load", case, {})
    times = profiled(ranks.ask("profile", PROFILE_CYCLES))
    schedules = Schedules.of(problem_of(case, times), seed)
    ranks.ask("load", case, side_programs(schedules))
    digests = {}
    for side in SIDES:
        ranks.ask("run", side)  # once unmeasured
        digests[side] = ranks.ask("digest")
    runs: dict[str, list[Round]] = {side: [] for side in SIDES}
    for number in range(rounds):
        turn = SIDES if number % 2 == 0 else tuple(reversed(SIDES))
        for side in turn:
            runs[side].append(Round.of(ranks.ask("run", side)))
    figures = case_figures(case, schedules, times, runs)
    figures["same_gradients"] = all(digests[side] == digests[sides[0]] for sides in SAME_GRADIENTS for side in sides)
    figures["transfer"] = ranks.ask("transfer")[0]
    begin = max((span.end_seconds for span in spans), default=0.0)
    return figures, spans + trace_spans(case, schedules, runs, begin)


def profiled(answers: list[dict]) -> Times:
    return Times({key: statistics.median(values) for answer in answers for key, values in answer.items()})


def side_programs(schedules: Schedules) -> dict[str, tuple[tuple[str, ...], ...]]:
    """What each rank runs in each phase of each side that our executor runs."""
    layout = rank_layout()
    serial, fused = lower(schedules.serial, layout), lower(schedules.fused, layout)

    def texts(programs: Programs, models: Sequence[str], weights: bool) -> tuple[str, ...]:
        return tuple(part_of(programs[rank], models, weights).text() for rank in programs)

    return {
        SERIAL: tuple(texts(serial, [model], False) for model in MODELS),
        NO_BARRIER: (texts(serial, MODELS, False),),
        FUSED: (texts(fused, MODELS, False),),
        SERIAL_STEP: tuple(texts(serial, [model], True) for model in MODELS),
        FUSED_STEP: (texts(fused, MODELS, True),),
    }


def part_of(program: Program, models: Sequence[str], weights: bool) -> Program:
    """The instructions of `models`; without `weights` only what has a micro-batch."""
    chosen = [
        instruction
        for instruction in program.instructions
        if instruction.action.pipeline in models and (weights or instruction.action.microbatch is not None)
    ]
    return Program(program.rank, tuple(chosen))


def line(figures: dict[str, Any]) -> str:
    head, seconds = figures["headline"], figures["seconds"]
    shown = ", ".join(f"{side} {row['median']:.3f} s" for side, row in seconds.items())
    return (
        f"{figures['case']}: {shown}; {head['speedup']:.3f} ({head['least']:.2f}-{head['most']:.2f}) against "
        f"{head['baseline']}, predicted {head['predicted']:.3f}, {head['of_predicted']:.3f} of it"
    )


if __name__ == "__main__":
    run_program(main)
