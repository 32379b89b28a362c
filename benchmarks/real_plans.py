"""REAL's tables as judge of a choice of placements: its plans beside the fastest ones by the fitted constants.

    python benchmarks/real_plans.py [--steps 20000] [--seeds 3]

Searched: aligned meshes from half a machine up and every layout of powers of two, for each of the six calls. Held as
published: the number of passes of each call, which the fit made proportional to seconds of generation, so that a
search would exploit it. Memory and the space are those of real/space.py. No row was published that trains with tp 1 or
generates with tp 1 or 4: a plan that does so is outside of what the constants were fitted to.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness import Figure, Measurement, counting, options
from placements.mesh import Mesh, aligned_meshes
from placements.problem import Choice, MeshPlan, MeshProblem, Option
from placements.search import best_plan
from placements.walk import greedy_plan, walk
from real.space import CallWork, mesh_problem
from real.tables import BATCH, END_TO_END, RealRow, real_rows
from real_tables import end_to_end_seconds, fit_calibration

from rlhfuse.base.errors import InputError, run_program
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.costs.hardware import REAL_H100, Calibration, data_sheets

MACHINE_RANKS = 8
LEAST_MESH = MACHINE_RANKS // 2
CASES = {"T4": "T5", "T2": "T3"}  # the table of REAL's plan: that of its heuristic


def main() -> None:
    parser = options(__doc__, seed=False)
    parser.add_argument("--steps", type=counting, default=20_000, help="of a random walk [%(default)s]")
    parser.add_argument("--seeds", type=counting, default=3, help="random walks from the greedy start [%(default)s]")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.seeds = 200, 1
    measurement = Measurement("real_plans", arguments, timed=False)
    rows = real_rows()
    held_out = {table: fit_calibration(without(rows, table), f"without {table}") for table in BATCH}
    summary, plans, regrets, walks = [], [], [], []
    for table, heuristic in CASES.items():
        judged = judge(measurement, table, heuristic, rows)
        summary.append(judged[0])
        plans += judged[1]
        for left_out, calibration in held_out.items():
            regrets.append([table, left_out, *regret(measurement, table, rows, left_out, calibration)])
        walks.append([table, *random_walks(measurement, table, rows, arguments.steps, arguments.seeds)])
    head = ("REAL's plan", "printed", "predicted", "heuristic", "predicted", "ratio printed", "predicted", "off by")
    measurement.table("ratios", "The heuristic over REAL's searched plan, seconds of an iteration", head, summary)
    head = ("table", "call", "REAL's plan", "predicted s", "fastest plan", "predicted s", "outside of published")
    measurement.table("plans", "REAL's plans and the fastest, by call", head, plans)
    head = ("table", "fitted without", "seconds of its plan", "of the best", "regret")
    measurement.table("regrets", "Plans chosen with other constants, priced with the shipped ones", head, regrets)
    head = ("table", "steps", "walks", "that fit", "over the best", "seconds", "on all meshes, from the best")
    measurement.table("walks", "ReaLHF's random walk from its greedy start, which does not fit itself", head, walks)
    measurement.figure("regret", Figure(max(float(row[-1].rstrip("%")) / 100 for row in regrets)).at_most(0.02))
    measurement.finish()


def judge(
    measurement: Measurement, table: str, heuristic: str, rows: Sequence[RealRow]
) -> tuple[list[str], list[list[str]]]:
    """A line about REAL's plan and its heuristic, and lines of calls: published beside the fastest."""
    begun = time.process_time()
    problem = problem_of(table, rows, REAL_H100)
    priced = time.process_time()
    found = best_plan(problem)
    measurement.figure(
        f"{table}.options",
        sum(len(one) for call in problem.calls.values() for mesh, one in call.options.items() if mesh.first == 0),
    )
    measurement.figure(f"{table}.price_seconds", priced - begun, "s")
    measurement.figure(f"{table}.search_seconds", Figure(time.process_time() - priced, "s").at_most(5))
    measurement.figure(f"{table}.placements", found.placements)
    measurement.figure(f"{table}.priced", found.priced)
    measurement.figure(f"{table}.best", found.seconds, "s")
    published = published_plan(problem, table, rows)
    if not problem.fits(published):
        need = problem.need_bytes(published) / 1e9
        raise InputError(f"{table}: the published plan needs {need:.1f} GB of a rank; the memory rule cannot be theirs")
    seconds = {name: end_to_end_seconds(of_table(rows, name), REAL_H100) for name in (table, heuristic)}
    printed = END_TO_END[heuristic] / END_TO_END[table]
    ratio = measurement.figure(f"{table}.heuristic_over_searched", seconds[heuristic] / seconds[table], "x").value
    measurement.figure(f"{table}.heuristic_over_searched.off", Figure(abs(ratio / printed - 1)).at_most(0.05))
    over = problem.seconds(published) / found.seconds
    measurement.figure(f"{table}.published_over_best", Figure(over, "x").at_most(1.35))
    measurement.figure(f"{table}.heuristic_over_best", Figure(seconds[heuristic] / found.seconds, "x").at_least(1.5))
    inside = best_plan(with_published_degrees(problem, rows))
    measurement.figure(
        f"{table}.published_over_best_of_published_degrees", problem.seconds(published) / inside.seconds, "x"
    )
    apart = [("CriticTrain", "ActorTrain"), ("RewInf", "RefInf")]
    disjoint = all(not found.plan[one].mesh.overlaps(found.plan[other].mesh) for one, other in apart)
    theirs = all(not published[one].mesh.overlaps(published[other].mesh) for one, other in apart)
    measurement.figure(f"{table}.apart_as_published", Figure(float(disjoint == theirs)).at_least(1))
    line = [table, f"{END_TO_END[table]}", f"{seconds[table]:.1f}", f"{END_TO_END[heuristic]}"]
    line += [f"{seconds[heuristic]:.1f}", f"{printed:.3f}", f"{ratio:.3f}", f"{ratio / printed - 1:+.1%}"]
    cells = []
    for name, call in problem.calls.items():
        one, other = published[name], found.plan[name]
        parts = [f"{problem.call_seconds(call, plan):.1f}" for plan in (published, found.plan)]
        cells.append([table, name, on_machines(one), parts[0], on_machines(other), parts[1], beyond(name, other, rows)])
    whole = [f"{problem.seconds(published):.1f}", "", f"{found.seconds:.1f}", ""]
    return line, [*cells, [table, "iteration", "", *whole]]


def regret(
    measurement: Measurement, table: str, rows: Sequence[RealRow], left_out: str, calibration: Calibration
) -> tuple[str, str, str]:
    """What the plan chosen with `calibration` takes by the shipped constants, the best plan, and what is lost."""
    chosen = best_plan(problem_of(table, rows, calibration)).plan
    problem = problem_of(table, rows, REAL_H100)
    seconds, best = problem.seconds(repriced(problem, chosen)), best_plan(problem).seconds
    measurement.figure(f"{table}.regret_without_{left_out}", seconds / best - 1)
    return f"{seconds:.1f}", f"{best:.1f}", f"{seconds / best - 1:.2%}"


def random_walks(measurement: Measurement, table: str, rows: Sequence[RealRow], steps: int, seeds: int) -> list[str]:
    """ReaLHF's search from its greedy start over the same meshes; and from the best plan over all meshes."""
    problem = problem_of(table, rows, REAL_H100)
    meshes, found = aligned_meshes(problem.ranks, problem.least).meshes(), best_plan(problem)
    start, begun = greedy_plan(problem, meshes), time.process_time()
    measurement.figure(f"{table}.greedy_fits", problem.fits(start))
    walks = [walk(problem, start, meshes, steps, seed + 1) for seed in range(seeds)]
    seconds = measurement.figure(f"{table}.walk_seconds", (time.process_time() - begun) / seeds, "s").value
    fitting = [one.seconds / found.seconds for one in walks if one.fits]
    measurement.figure(f"{table}.walks_that_fit", len(fitting), f"of {seeds}")
    over = measurement.figure(f"{table}.walk_over_best", Figure.of(fitting, "x")).text() if fitting else "-"
    anywhere = list(next(iter(problem.calls.values())).options)
    free = walk(problem, found.plan, anywhere, steps, 1).seconds / found.seconds
    measurement.figure(f"{table}.unaligned_over_best", free, "x")
    return [f"{steps}", f"{seeds}", f"{len(fitting)}", over, f"{seconds:.2f}", f"{free:.3f}"]


def problem_of(table: str, rows: Iterable[RealRow], calibration: Calibration) -> MeshProblem:
    """The six calls of a table on its machines."""
    own = {row.call: row for row in of_table(rows, table) if not row.eager}
    ranks = MACHINE_RANKS * max(row.nodes[1] for row in own.values())
    sizes = sorted({mesh.size for mesh in aligned_meshes(ranks, LEAST_MESH).meshes()})
    works = {name: CallWork.of(row) for name, row in own.items()}
    return mesh_problem(works, ranks, sizes, calibration.reached(data_sheets()["h100"]))


def published_plan(problem: MeshProblem, table: str, rows: Iterable[RealRow]) -> MeshPlan:
    """REAL's plan as one of the problem."""
    plan = {}
    for row in of_table(rows, table):
        if not row.eager:
            mesh = Mesh(MACHINE_RANKS * (row.nodes[0] - 1), row.layout.size)
            plan[row.call] = Choice(mesh, option_of(problem, row.call, mesh, row.layout))
    return plan


def repriced(problem: MeshProblem, plan: MeshPlan) -> MeshPlan:
    """The same meshes and layouts as priced by another problem."""
    return {name: Choice(one.mesh, option_of(problem, name, one.mesh, one.option.layout)) for name, one in plan.items()}


def option_of(problem: MeshProblem, name: str, mesh: Mesh, layout: ParallelLayout) -> Option:
    return next(one for one in problem.calls[name].options[mesh] if one.layout == layout)


def with_published_degrees(problem: MeshProblem, rows: Sequence[RealRow]) -> MeshProblem:
    """Only tensor degrees that REAL published for such a call."""
    phases = []
    for phase in problem.phases:
        calls = []
        for call in phase:
            known = published_degrees(call.name, rows)
            some = {mesh: [one for one in found if one.layout.tp in known] for mesh, found in call.options.items()}
            calls.append(replace(call, options=some))
        phases.append(tuple(calls))
    return replace(problem, phases=tuple(phases))


def published_degrees(name: str, rows: Iterable[RealRow]) -> set[int]:
    """Tensor degrees of rows that do such work: generate, infer or train."""
    return {row.layout.tp for row in rows if row.call[-3:] == name[-3:]}


def beyond(name: str, choice: Choice, rows: Sequence[RealRow]) -> str:
    tp = choice.option.layout.tp
    return "" if tp in published_degrees(name, rows) else f"tp {tp}"


def on_machines(choice: Choice) -> str:
    """Layout and machines, counted from 1 as REAL does; a part of one by its ranks."""
    mesh, layout = choice.mesh, choice.option.layout
    if mesh.size < MACHINE_RANKS:
        return f"{layout}{mesh}"
    first, last = mesh.first // MACHINE_RANKS + 1, mesh.last // MACHINE_RANKS + 1
    return f"{layout} on {first}" + (f"-{last}" if last > first else "")


def of_table(rows: Iterable[RealRow], table: str) -> list[RealRow]:
    return [row for row in rows if row.table == table]


def without(rows: Iterable[RealRow], table: str) -> list[RealRow]:
    return [row for row in rows if row.table != table]


if __name__ == "__main__":
    run_program(main)
