"""Speed of fused training of an actor and a critic beside serial training, on two ranks of one CPU machine.

    python benchmarks/intra_stage.py [--sizes 1:1] [--microbatches 2,4,samples,tokens] [--lengths FILE]

Two processes of one thread train two random Llamas over gloo, the actor's stages on ranks 0 and 1, the critic's on 1
and 0. Each side (intra_stage_sides.py) trains one mini-batch in turn, and all must leave the same gradients, bit for
bit. Schedules are made of action times profiled with both ranks busy; what they promise stands beside what is measured.
Micro-batches are so many equal ones, or cut of a trace's lengths by the product's MicrobatchCut, heaviest first and in
the order of the draw: by samples each has one, by tokens as many as fit into two of the longest.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from harness import DATA, Measurement, named, options, take_turns
from intra_stage_sides import (
    BACKWARDS,
    FUSED,
    MEGATRON,
    RANKS,
    SAME_GRADIENTS,
    SERIAL,
    SIDES,
    SORTED,
    SPLIT,
    UNSORTED,
    Case,
    Sizes,
    Times,
    Turns,
)
from intra_stage_speeds import Answers, EqualSpeeds, UnequalSpeeds
from processes import ALLOCATOR, Ranks

from rlhfuse.base.errors import InputError, run_program
from rlhfuse.decisions.microbatch_cut import MicrobatchCut
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.simulator.lengths import SampleLengths, load_lengths

PROFILE_CYCLES = 5
QUICK_ROUNDS = 2
FULL = (Sizes("1:1", (8, 8), 512, 1376, 512, 3, 96, 16, 192), Sizes("2.5:1", (10, 4), 512, 1376, 512, 3, 96, 16, 192))
QUICK = (Sizes("1:1", (2, 2), 128, 352, 256, 2, 32, 8, 64), Sizes("2.5:1", (5, 2), 128, 352, 256, 2, 32, 8, 64))
TRACE = DATA / "traces" / "sharegpt8k_llama2tok.csv"
LIMIT = 1024  # tokens of a prompt, and of a response, that the trace is cut to before it is scaled
BY_SAMPLES, BY_TOKENS = "samples", "tokens"
TOKENS = 2  # of the longest sample fit into a micro-batch by tokens

PROMISE = ("speedup", "predicted", "of it")
TABLES = {
    "speed": (
        "Fused beside serial training",
        ("M", "Megatron 1F1B", "serial", "no barrier", "fused", *PROMISE, "bound"),
    ),
    "split": (
        "Fused with split backwards",
        ("M", "split", *PROMISE, "bound", "over fused", "predicted", "bound", "B + W over whole"),
    ),
    "steps": (
        "With optimizer steps",
        ("M", "serial", "fused", *PROMISE, "of schedule", "split", *PROMISE, "of schedule"),
    ),
    "unequal": (
        "Fused beside serial training, unequal micro-batches of a real trace",
        ("cut by", "M", "order", "serial", "planned / priced", "fused", "planned / priced", *PROMISE),
    ),
    "order": (
        "Sorted beside unsorted micro-batches",
        ("cut by", "M", "serial: speedup", *PROMISE[1:], "fused: speedup", *PROMISE[1:]),
    ),
}

Lengths = Sequence[tuple[int, ...]]  # tokens of each sequence of each micro-batch


def main() -> None:
    arguments = parse_arguments()
    measurement = Measurement("intra_stage", arguments)
    rows: dict[str, list[list[str]]] = defaultdict(list)
    for sizes in named("--sizes", arguments.sizes, {one.name: one for one in (QUICK if arguments.quick else FULL)}):
        made = {"sizes": asdict(sizes), "seed": arguments.seed}
        with Ranks("intra_stage_rank:TrainingRank", RANKS, ALLOCATOR, **made) as ranks:
            for word in arguments.microbatches:
                for table, row in measure(sizes, word, ranks, measurement):
                    rows[table].append([sizes.name, *row])
    for name, (title, columns) in TABLES.items():
        if rows[name]:
            measurement.table(name, title, ("models", *columns), rows[name])
    measurement.finish()


def parse_arguments() -> argparse.Namespace:
    parser = options(__doc__, rounds=11)
    parser.add_argument("--sizes", default="1:1,2.5:1", help="layers of the actor over those of the critic")
    parser.add_argument("--microbatches", default="2,4,8,samples,tokens", help="so many, or cut by [%(default)s]")
    parser.add_argument("--lengths", default=TRACE, metavar="FILE", help="csv, jsonl or parquet, of prompts too")
    arguments = parser.parse_args()
    arguments.microbatches = [word.strip() for word in arguments.microbatches.split(",")]
    for word in arguments.microbatches:
        if word not in (BY_SAMPLES, BY_TOKENS) and not (word.isdigit() and int(word) > 1):
            told = f"{word!r} is not a number of at least 2, {BY_SAMPLES} or {BY_TOKENS}"
            raise InputError(f"--microbatches {','.join(arguments.microbatches)}: {told}")
    given = {BY_SAMPLES, BY_TOKENS} & set(arguments.microbatches)
    arguments.trace = load_lengths(arguments.lengths).lengths.clip(LIMIT, LIMIT) if given else None
    arguments.rounds = QUICK_ROUNDS if arguments.quick else arguments.rounds
    return arguments


def measure(sizes: Sizes, word: str, ranks: Ranks, measurement: Measurement) -> Iterator[tuple[str, list[str]]]:
    """Rows of the tables, each with its table's name, of a pair of models and a word of --microbatches.

    Profile, make the schedules, let the sides take turns.
    """
    name, arguments = sizes.name.replace(":", "to").replace(".", "_"), measurement.arguments
    if word.isdigit():
        lengths = [(sizes.tokens,) * sizes.sequences] * int(word)
        turns: Turns = {side: (side, range(int(word))) for side in SIDES}
        label, speeds, same, backwards, head = f"m{word}", EqualSpeeds, SAME_GRADIENTS, BACKWARDS, [word]
    else:
        (drawn,) = arguments.trace.draw(sizes.samples, 1, arguments.seed)
        lengths, unsorted = cut(sizes, word, drawn)
        orders = {SORTED: range(len(lengths)), UNSORTED: unsorted}
        same = [[f"{side}_{order}" for side in (SERIAL, FUSED)] for order in orders]
        turns = {f"{side}_{order}": (side, orders[order]) for order in orders for side in (SERIAL, FUSED)}
        label, speeds, backwards, head = word, UnequalSpeeds, BACKWARDS[:1], [word, str(len(lengths))]
    ranks.ask("load", lengths, {})
    case = Case.of(len(lengths), profiled(lengths, backwards, ranks), arguments.seed)
    rounds = run(case, turns, lengths, ranks, arguments.rounds, same)
    figures = measurement.part(f"{name}_{label}")
    for table, row in speeds(figures, case, turns, rounds).rows():
        yield table, [*head, *row]


def cut(sizes: Sizes, by: str, drawn: SampleLengths) -> tuple[Lengths, list[int]]:
    """A mini-batch of these lengths, scaled, as the product cuts it for one pipeline, the heaviest first; and its
    micro-batches in the order in which the first sample of each was drawn."""
    tokens = [math.ceil((p + o) * sizes.longest / (2 * LIMIT)) for p, o in zip(drawn.prompt, drawn.output)]
    batch = 1, sizes.samples, sizes.longest
    cuts = {
        BY_SAMPLES: MicrobatchCut.by_samples(sizes.samples, *batch),
        BY_TOKENS: MicrobatchCut.by_tokens(TOKENS * sizes.longest, *batch, least=RANKS),
    }
    parts = cuts[by].split(tokens)
    drawn_order = sorted(range(len(parts)), key=lambda number: parts[number][0])
    return [tuple(tokens[sample] for sample in part) for part in parts], drawn_order


def profiled(lengths: Lengths, backwards: Sequence[Sequence[str]], ranks: Ranks) -> Times:
    """Medians over cycles; where micro-batches are alike, of two of them together."""
    alike = len(set(lengths)) == 1
    found: dict[tuple[str, int, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for answer in ranks.ask("profile", PROFILE_CYCLES, 2 if alike else len(lengths), backwards):
        for (model, stage, what, microbatch), seconds in answer.items():
            found[model, stage, what][0 if alike else microbatch] += seconds
    return {key: [statistics.median(values[mb]) for mb in sorted(values)] for key, values in found.items()}


def run(
    case: Case, turns: Turns, lengths: Lengths, ranks: Ranks, rounds: int, same: Sequence[Sequence[str]]
) -> dict[str, list[Answers]]:
    """All ranks' answers of every round, by name. Groups in `same` must leave the same gradients, bit for bit."""
    texts = {
        side: [tuple(phase[rank].text() for rank in range(RANKS)) for phase in case.phases(side)]
        for side in {side for side, _ in turns.values()} - {MEGATRON}
    }
    ranks.ask("load", lengths, texts)
    digests: dict[str, Any] = {}

    def train(name: str, number: int) -> Answers:
        answers = ranks.ask("run", *turns[name])
        if number < 0:
            digests[name] = ranks.ask("digest")
        return answers

    made = take_turns({name: partial(train, name) for name in turns}, rounds, warm_up=True)
    for group in same:
        if not all(digests[name] == digests[group[0]] for name in group):
            raise RuntimeError(f"{', '.join(group)} left different gradients")
    for name, (side, _) in turns.items():
        if side in (FUSED, SPLIT):
            check_peaks(case.schedules[side], made[name])
    return made


def check_peaks(schedule: Schedule, rounds: Sequence[Answers]) -> None:
    """Live micro-batches must be as scheduled."""
    for rank, expected in enumerate(map(int, evaluate(schedule).node_peak_memory)):  # an activation counts 1
        live = max(answers[rank]["peak_live"] for answers in rounds)
        assert live == expected, f"rank {rank}: kept {live} micro-batches, not {expected}"


if __name__ == "__main__":
    run_program(main)
