"""Scheduling problems under a memory cap, 33 in each of two sets, made by rule.

Table 3's settings with backwards whole (`w`) and split in halves (`s`), random groups of pipelines, and what a planner
states for Llama 3 on H100s. A name ends in its level of cap: from 0, the least possible, to 4, the uncapped peak. The
search was made with the first set at hand; the problems of `fresh` are as many more of the same kind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from harness import ROOT
from paper.llamas import llama
from paper.table3 import SETTINGS
from schedule_search import halved

from rlhfuse.config.load import load_config
from rlhfuse.planning.draft import draft_plan
from rlhfuse.planning.job import Job
from rlhfuse.planning.settle import settle
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, Number, Pipeline
from rlhfuse.schedule.rules.builders import min_memory, serial_1f1b
from rlhfuse.simulator.lengths import SampleLengths

LEVELS = (0.0, 0.15, 0.35, 0.6, 1.0)  # of the way from the least possible cap to the uncapped peak
PEAKS = (15.60, 15.90, 17.95, 15.60, 16.95, 18.65, 26.24, 30.76, 39.68, 26.24, 30.24, 34.00)  # of Table 3, uncapped
OPTIMA: Mapping[str, Number] = {  # proved: by a bound that is met, or by CP-SAT
    **{"r01w1": 1728, "r06s4": 2124, "r07w1": 3336, "r09s1": 339, "r10w2": 891, "r11w1": 1226, "t01s1": 390},
    **{"t01w2": 383, "t04w0": 1022, "t05w2": 720, "t08w4": 330, "t09s3": 590, "t12s1": 1410},
}
TOKENS = 1024  # of every prompt and every response that a planned problem is for


@dataclass(frozen=True)
class ProblemSet:
    """How the problems of a set differ: (row of Table 3, level) of whole backwards, of split ones; levels of random
    problems and the seed that draws them; layouts of the planned ones."""

    whole: tuple[tuple[int, int], ...]
    split: tuple[tuple[int, int], ...]
    random_levels: tuple[int, ...]
    seed: int
    planned: Mapping[str, str]

    def problems(self) -> dict[str, Callable[[], FusionProblem]]:
        """Each by its name, made when it is asked for."""
        made: dict[str, Callable[[], FusionProblem]] = {name: partial(planned, name, self) for name in self.planned}
        drawn = random_problems(self.seed, self.random_levels)
        made |= {name: partial(drawn.__getitem__, name) for name in drawn}
        for kind, rows in (("w", self.whole), ("s", self.split)):
            made |= {f"t{row:02d}{kind}{level}": partial(of_table_3, row, level, kind == "s") for row, level in rows}
        return made


def of_table_3(row: int, level: int, split: bool) -> FusionProblem:
    """The setting of a row, counted from 1."""
    problem = SETTINGS[row - 1].problem()
    return capped(halved(problem, 0.5) if split else problem, level, PEAKS[row - 1])


def capped(problem: FusionProblem, level: int, peak: Number) -> FusionProblem:
    """With a cap of each node: so far from the node's least to the peak."""
    caps = (round(least + LEVELS[level] * max(0, peak - least), 6) for least in min_memory(problem))
    return replace(problem, memory_cap=tuple(caps))


def random_problems(seed: int, levels: tuple[int, ...]) -> dict[str, FusionProblem]:
    """Eight of 4 to 8 nodes, four of 2 to 4; every third is split, an actor of a fourth shape visits nodes twice."""
    rng, made = random.Random(seed), {}
    for number, level in enumerate(levels):
        shape, large = number % 4, number < 8
        nodes = ((4, 8, 6, 8) if large else (2, 3, 4, 4))[shape]
        groups = {2: (1, 2), 3: (1, 3), 4: (1, 2), 6: (2, 3), 8: (1, 4)}[nodes]
        base = rng.choice((6, 8, 12))
        if not large:
            base = rng.choice((3, 4))
        pipelines: list[Pipeline] = []
        for which, (model, count) in enumerate(zip(("actor", "critic"), groups)):
            chunks = 2 if shape == 3 and model == "actor" else 1
            microbatches = base * groups[0] * groups[1] // count
            pipelines += _random_model(rng, model, which, nodes, count, chunks, microbatches)
        problem = FusionProblem(nodes, tuple(pipelines), transfer=rng.choice((0, 0, 1)))
        split = number % 3 == 2
        problem = halved(problem, 0.5) if split else problem
        peak = max(evaluate(serial_1f1b(problem)).node_peak_memory)
        made[f"r{number + 1:02d}{'s' if split else 'w'}{level}"] = capped(problem, level, peak)
    return made


def _random_model(
    rng: random.Random, model: str, which: int, nodes: int, count: int, chunks: int, microbatches: int
) -> list[Pipeline]:
    """`count` pipelines over `nodes` nodes; those of the second model, `which` 1, run in the other direction."""
    depth = nodes // count
    forward = []
    for _ in range(depth * chunks):
        forward.append(rng.randint(8, 12) * (rng.choice((1, 1, 1, 1)) if which else 1))  # the choice moves on the draws
    scale = rng.choice((1, 1, 2)) if which else 2
    activation = tuple(rng.randint(16, 22) / 10 * scale / 2 for _ in range(depth * chunks))
    made = []
    for k in range(count):
        block = tuple(range(k * depth, (k + 1) * depth))[:: -1 if which else 1]
        times = tuple(forward), tuple(2 * time for time in forward)
        made.append(Pipeline(f"{model}.{k}", model, block * chunks, microbatches, *times, activation))
    return made


def planned(name: str, of: ProblemSet) -> FusionProblem:
    """What training of an example's run asks for in these layouts, where all samples are as long as they can be."""
    large = name.startswith("llama70b")
    file, ranks = ("llama3_70b_64gpus", 64) if large else ("llama3_8b_8gpus", 8)
    config = load_config(str(ROOT / "examples" / f"{file}.yaml"), of.planned[name].split())
    shapes = {"actor": "70B", "critic": "70B", "reference": "70B", "reward": "Llama 3 8B"}
    specs = {role: llama(shapes[role] if large else "Llama 3 8B", vocab=128256) for role in config.roles()}
    run = settle(Job(config, specs, ranks))
    return draft_plan(run, SampleLengths((TOKENS,), (TOKENS,))).training.problem


def _layouts(actor: str, critic: str, microbatches: int, *more: str) -> str:
    rows = f"parallel.actor_train={actor} parallel.critic_train={critic} fusion.actor_microbatches={microbatches}"
    return " ".join((rows, *more))


SETS = {
    "review": ProblemSet(
        whole=tuple(enumerate((2, 1, 3, 0, 2, 1, 3, 4, 2, 1, 4, 3), start=1)),
        split=((1, 1), (3, 2), (5, 3), (7, 1), (9, 3), (11, 2), (12, 1)),
        random_levels=(1, 2, 3, 2, 0, 4, 1, 2, 1, 2, 1, 1),
        seed=7,
        planned={
            "llama70b": _layouts("d1t4p16v2", "d1t4p16v2", 64),
            "llama8b": _layouts("d4t1p2", "d1t1p8", 24, "parallel.inference=d8t1p1"),
        },
    ),
    "fresh": ProblemSet(
        whole=tuple(enumerate((0, 3, 1, 2, 4, 3, 1, 2, 0, 3, 1, 2), start=1)),
        split=((2, 2), (4, 1), (6, 3), (8, 2), (10, 1), (3, 4), (9, 1)),
        random_levels=(2, 1, 1, 3, 2, 2, 0, 1, 2, 1, 3, 2),
        seed=8,
        planned={
            "llama70b-flat": _layouts("d1t4p16", "d1t4p16", 96),
            "llama8b-halves": _layouts("d4t1p2", "d2t1p4", 48, "parallel.inference=d8t1p1"),
        },
    ),
}
