"""REAL's and ReaLHF's figures: published calls beside predicted ones, and the plans that a search finds."""

from __future__ import annotations

import time

from paper.calls import CallWork, ModelCall
from paper.llamas import llama
from paper.page import Content, Results, Row, claim_row
from paper.space import mesh_problem
from placements.exact_search import best_plan
from placements.mesh import Mesh
from placements.problem import Choice, MeshProblem

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.hardware import ASSUMED, data_sheets

CALLS = "ActorGen", "CriticInf", "RefInf", "RewInf", "ActorTrain", "CriticTrain"
OF_ACTOR = "ActorGen", "RefInf", "ActorTrain"
GPUS_OF_CALLS = {  # ReaLHF, Table 4: GPUs of the cluster and of each call of the plan found
    ("7B", "7B"): (8, (8, 8, 8, 8, 4, 4)),
    ("7B", "70B"): (64, (8, 56, 16, 56, 8, 56)),
    ("70B", "7B"): (64, (64,) * 6),
    ("70B", "70B"): (128, (64, 56, 24, 48, 64, 64)),
}
HEURISTIC_GAIN, HEURISTIC_MOST = 0.265, 0.80  # section 8: on average, and at most
PROMPT, MINIBATCHES, ITERATIONS = 128, 4, 4 * 400
OUTPUT, BATCH = 128, 512  # section 8, the shortest of three settings
LENGTHS = {128: 512, 384: 256, 896: 128}  # section 8: tokens of a response, and the batch
HOURS_SAVED = {"7B": (8, 5.39), "13B": (16, 10.34), "34B": (32, 6.62), "70B": (64, 6.80)}  # Table 5: actor, GPUs


def a100() -> HardwareSpec:
    return ASSUMED.reached(data_sheets()["a100"])


def first_table(_: Results) -> Content:
    """ReaLHF, Table 1: pipelines against tensor parallelism, of generation and of training."""
    seconds = {"generation": [], "training": []}
    for layout in (ParallelLayout(1, 1, 8), ParallelLayout(1, 8, 1)):
        calls = [ModelCall(AnalyticCost(llama("7B"), layout, a100(), 2, recompute=one)) for one in ("none", "full")]
        seconds["generation"].append(calls[0].generate_seconds(BATCH, PROMPT, OUTPUT))
        seconds["training"].append(calls[1].train_seconds(BATCH, PROMPT + OUTPUT, MINIBATCHES, 2 * layout.pp))
    rows = []
    for what, printed in (("generation", (29.82, 37.05)), ("training", (6.28, 5.50))):
        ratio, theirs = (one[0] / one[1] for one in (seconds[what], printed))
        ours = f"{ratio:.2f} ({seconds[what][0]:.1f} s over {seconds[what][1]:.1f} s)"
        both, holds = f"{theirs:.2f} ({printed[0]} s over {printed[1]} s)", (ratio < 1) == (theirs < 1)
        what = f"{what}: pipelines alone over tensor parallelism alone"
        rows.append(claim_row(what, "ReaLHF, Table 1", both, ours, holds))
    return Content(rows)


def placements(_: Results) -> Content:
    """ReaLHF, Table 4: how many GPUs each call gets."""
    rows = []
    for (actor, critic), (gpus, printed) in GPUS_OF_CALLS.items():
        plan = best_plan(problem_of(actor, critic, gpus, OUTPUT)).plan
        for name, count in zip(CALLS, printed):
            what = f"{actor} actor, {critic} critic, {gpus} GPUs: GPUs of {name}"
            rows.append(Row(what, "ReaLHF, Table 4", f"{count}", f"{plan[name].mesh.size} ({plan[name]})"))
        if (actor, critic) == ("7B", "70B"):
            few, many = (plan[name].mesh.size for name in ("ActorTrain", "CriticTrain"))
            what = "a small actor trains on few, its large critic on many"
            rows.append(claim_row(what, "ReaLHF, Table 4", "8, 56", f"{few}, {many}", few < many))
    return Content(rows)


def saved(_: Results) -> Content:
    """ReaLHF, sections 8.1 and 8.3: what a searched plan is worth, and how long it takes to find."""
    rows, gains, seconds = [], [], []
    for actor, (gpus, printed) in HOURS_SAVED.items():
        hours = []
        for output in LENGTHS:
            begun = time.process_time()
            problem = problem_of(actor, "7B", gpus, output)
            best = best_plan(problem).seconds
            seconds.append(time.process_time() - begun)
            heuristic = heuristic_seconds(problem)
            gains.append(heuristic / best - 1)
            hours.append((heuristic - best) * ITERATIONS / 3600)
        what = f"hours saved in {ITERATIONS} iterations, {actor} actor and 7B critic on {gpus} GPUs"
        rows.append(Row(what, "ReaLHF, Table 5", f"{printed}", ", ".join(f"{one:.1f}" for one in hours)))
    printed = f"{HEURISTIC_GAIN:+.1%} on average, at most {HEURISTIC_MOST:+.0%}"
    ours = f"{sum(gains) / len(gains):+.1%} on average, {min(gains):+.0%} to {max(gains):+.0%}"
    rows.append(Row("samples per second over the heuristic", "ReaLHF, 8.1", printed, ours))
    found = f"{min(seconds):.2f}-{max(seconds):.2f}, exact"
    rows.append(Row("seconds until the best plan is found", "ReaLHF, 8.3", "< 300", found))
    return Content(rows)


def problem_of(actor: str, critic: str, gpus: int, output: int) -> MeshProblem:
    """The six calls with responses of `output` tokens."""
    specs = {name: llama(actor if name in OF_ACTOR else critic) for name in CALLS}
    sizes = LENGTHS[output], PROMPT, output, MINIBATCHES, 1
    return mesh_problem({name: CallWork(name, spec, *sizes) for name, spec in specs.items()}, gpus, a100())


def heuristic_seconds(problem: MeshProblem) -> float:
    """Every call on all GPUs, tp 8, the pipeline degree of each model that makes the iteration fastest and fits."""
    whole = Mesh(0, problem.ranks)
    options = {
        name: {one.layout.pp: one for one in call.options[whole] if one.layout.tp == 8}
        for name, call in problem.calls.items()
    }
    plans = []
    for actor_pp in options["ActorTrain"]:
        for critic_pp in options["CriticTrain"]:
            degrees = {name: actor_pp if name in OF_ACTOR else critic_pp for name in CALLS}
            if all(degree in options[name] for name, degree in degrees.items()):
                plans.append({name: Choice(whole, options[name][degree]) for name, degree in degrees.items()})
    seconds = [problem.seconds(plan) for plan in plans if problem.fits(plan)]
    if not seconds:
        raise InputError(f"the heuristic's layouts do not fit on {problem.ranks} GPUs")
    return min(seconds)


SECTIONS = {
    "realhf-layouts": first_table,
    "realhf-meshes": placements,
    "realhf-gain": saved,
}
