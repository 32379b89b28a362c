"""REAL's tables as judge of a choice of placements: its plans beside the fastest ones by the fitted constants.

    python benchmarks/real_plans.py [--steps 20000] [--seeds 3]

Searched: aligned meshes from half a machine up and every layout of powers of two, for each of the six calls. Held as
published: the number of passes of each call, which the fit made proportional to seconds of generation, so that a
search would exploit it. Memory and the space are those of paper/space.py. No row was published that trains with tp 1 or
generates with tp 1 or 4: a plan that does so is outside of what the constants were fitted to.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from harness import Figure, Measurement, counting, options
from paper.real import (
    BATCH,
    END_TO_END,
    REAL_H100,
    RealCalibration,
    RealRow,
    end_to_end_seconds,
    of_table,
    real_rows,
)
from paper.space import MACHINE_RANKS, mesh_problem
from placements.exact_search import best_plan
from placements.mesh import Mesh, aligned_meshes
from placements.problem import Choice, MeshPlan, MeshProblem
from placements.walk import greedy_plan, walk
from real_tables import fit_calibration

from rlhfuse.base.errors import InputError, run_program
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.costs.hardware import data_sheets

CASES = {"T4": "T5", "T2": "T3"}  # the table of REAL's plan: that of its heuristic


def main() -> None:
    parser = options(__doc__, seed=False)
    parser.add_argument("--steps", type=counting, default=20_000, help="of a random walk [%(default)s]")
    parser.add_argument("--seeds", type=counting, default=3, help="random walks from the greedy start [%(default)s]")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.seeds = 200, 1
    measurement, rows = Measurement("real_plans", arguments, timed=False), real_rows()
    without = {table: [row for row in rows if row.table != table] for table in BATCH}
    held_out = {table: fit_calibration(some, f"without {table}") for table, some in without.items()}
    judges = [Judge(measurement, table, rows) for table in CASES]
    head = ("REAL's plan", "printed", "predicted", "heuristic", "predicted", "ratio printed", "predicted", "off by")
    ratios = [judge.ratio_cells() for judge in judges]
    measurement.table("ratios", "The heuristic over REAL's searched plan, seconds of an iteration", head, ratios)
    head = ("table", "call", "REAL's plan", "predicted s", "fastest plan", "predicted s", "outside of published")
    plans = [cells for judge in judges for cells in judge.plan_cells()]
    measurement.table("plans", "REAL's plans and the fastest, by call", head, plans)
    head = ("table", "fitted without", "seconds of its plan", "of the best", "regret")
    regrets = [judge.regret_cells(table, held_out[table]) for judge in judges for table in held_out]
    measurement.table("regrets", "Plans chosen with other constants, priced with the shipped ones", head, regrets)
    head = ("table", "steps", "walks", "that fit", "over the best", "seconds", "on all meshes, from the best")
    walks = [judge.walk_cells(arguments.steps, arguments.seeds) for judge in judges]
    measurement.table("walks", "ReaLHF's random walk from its greedy start, which does not fit itself", head, walks)
    measurement.figure("regret", Figure(max(float(row[-1].rstrip("%")) / 100 for row in regrets)).at_most(0.02))
    measurement.finish()


class Judge:
    """One of REAL's plans beside the fastest: figures, and lines of the tables."""

    def __init__(self, measurement: Measurement, table: str, rows: Sequence[RealRow]) -> None:
        """Searches. Raises InputError where the published plan does not fit."""
        self._figures, self._table, self._rows = measurement.part(table), table, rows
        self._figure = self._figures.value
        begun = time.process_time()
        self._problem = problem_of(table, rows, REAL_H100)
        priced = time.process_time()
        self._found = best_plan(self._problem)
        searched = time.process_time()
        calls = self._problem.calls.values()
        each = [len(some) for call in calls for mesh, some in call.options.items() if mesh.first == 0]
        self._figure("options", sum(each))
        self._figure("price_seconds", priced - begun, "s")
        self._figure("search_seconds", Figure(searched - priced, "s").at_most(5))
        self._figure("placements", self._found.placements)
        self._figure("priced", self._found.priced)
        self._figure("best", self._found.seconds, "s")
        self._published = published_plan(self._problem, table, rows)
        if not self._problem.fits(self._published):
            need = self._problem.need_bytes(self._published) / 1e9
            raise InputError(f"{table}: the published plan needs {need:.1f} GB; the memory rule cannot be theirs")

    def ratio_cells(self) -> list[str]:
        """REAL's plan and its heuristic, printed and predicted."""
        table, best = self._table, self._found.seconds
        heuristic = CASES[table]
        seconds = {name: end_to_end_seconds(of_table(self._rows, name), REAL_H100) for name in (table, heuristic)}
        printed, published = END_TO_END[heuristic] / END_TO_END[table], self._problem.seconds(self._published)
        ratio = self._figure("heuristic_over_searched", seconds[heuristic] / seconds[table], "x")
        self._figure("heuristic_over_searched.off", Figure(abs(ratio / printed - 1)).at_most(0.05))
        self._figure("published_over_best", Figure(published / best, "x").at_most(1.35))
        self._figure("heuristic_over_best", Figure(seconds[heuristic] / best, "x").at_least(1.5))
        inside = best_plan(with_published_degrees(self._problem, self._rows)).seconds
        self._figure("published_over_best_of_published_degrees", published / inside, "x")
        disjoint, theirs = trains_apart(self._found.plan), trains_apart(self._published)
        self._figure("apart_as_published", Figure(float(disjoint == theirs)).at_least(1))
        pairs = [cell for name in (table, heuristic) for cell in (f"{END_TO_END[name]}", f"{seconds[name]:.1f}")]
        return [table, *pairs, f"{printed:.3f}", f"{ratio:.3f}", f"{ratio / printed - 1:+.1%}"]

    def plan_cells(self) -> list[list[str]]:
        """Every call: published beside the fastest."""
        cells = []
        for name, call in self._problem.calls.items():
            one, other = self._published[name], self._found.plan[name]
            took, best = (self._problem.call_seconds(call, plan) for plan in (self._published, self._found.plan))
            tp = other.option.layout.tp
            outside = "" if tp in published_degrees(name, self._rows) else f"tp {tp}"
            cells.append(
                [self._table, name, on_machines(one), f"{took:.1f}", on_machines(other), f"{best:.1f}", outside]
            )
        seconds = f"{self._problem.seconds(self._published):.1f}", "", f"{self._found.seconds:.1f}", ""
        return [*cells, [self._table, "iteration", "", *seconds]]

    def regret_cells(self, left_out: str, calibration: RealCalibration) -> list[str]:
        """What the plan chosen with `calibration` takes by the shipped constants, the best plan, and what is lost."""
        chosen = best_plan(problem_of(self._table, self._rows, calibration)).plan
        repriced = {name: choice_of(self._problem, name, one.mesh, one.option.layout) for name, one in chosen.items()}
        seconds, best = self._problem.seconds(repriced), self._found.seconds
        lost = self._figure(f"regret_without_{left_out}", seconds / best - 1)
        return [self._table, left_out, f"{seconds:.1f}", f"{best:.1f}", f"{lost:.2%}"]

    def walk_cells(self, steps: int, seeds: int) -> list[str]:
        """ReaLHF's search from its greedy start over the same meshes; and from the best plan over all meshes."""
        problem, best = self._problem, self._found
        meshes = aligned_meshes(problem.ranks, problem.least).meshes()
        start, begun = greedy_plan(problem, meshes), time.process_time()
        self._figure("greedy_fits", problem.fits(start))
        walks = [walk(problem, start, meshes, steps, seed + 1) for seed in range(seeds)]
        seconds = self._figure("walk_seconds", (time.process_time() - begun) / seeds, "s")
        fitting = [one.seconds / best.seconds for one in walks if one.fits]
        self._figure("walks_that_fit", len(fitting), f"of {seeds}")
        over = self._figures.figure("walk_over_best", Figure.of(fitting, "x")) if fitting else None
        anywhere = list(next(iter(problem.calls.values())).options)
        free = self._figure(
            "unaligned_over_best", walk(problem, best.plan, anywhere, steps, 1).seconds / best.seconds, "x"
        )
        ends = over.text() if over else "-", f"{seconds:.2f}", f"{free:.3f}"
        return [self._table, f"{steps}", f"{seeds}", f"{len(fitting)}", *ends]


def problem_of(table: str, rows: Sequence[RealRow], calibration: RealCalibration) -> MeshProblem:
    """The six calls of a table on its machines."""
    own = {row.work.name: row for row in of_table(rows, table) if not row.eager}
    ranks = MACHINE_RANKS * max(row.nodes[1] for row in own.values())
    machine = calibration.reached(data_sheets()["h100"])
    return mesh_problem({name: row.work for name, row in own.items()}, ranks, machine)


def published_plan(problem: MeshProblem, table: str, rows: Sequence[RealRow]) -> MeshPlan:
    """REAL's plan as one of the problem."""
    plan = {}
    for row in of_table(rows, table):
        if not row.eager:
            mesh = Mesh(MACHINE_RANKS * (row.nodes[0] - 1), row.layout.size)
            plan[row.work.name] = choice_of(problem, row.work.name, mesh, row.layout)
    return plan


def choice_of(problem: MeshProblem, name: str, mesh: Mesh, layout: ParallelLayout) -> Choice:
    return Choice(mesh, next(one for one in problem.calls[name].options[mesh] if one.layout == layout))


def trains_apart(plan: MeshPlan) -> bool:
    """Whether actor and critic train on disjoint machines, and reward and reference score so."""
    pairs = ("CriticTrain", "ActorTrain"), ("RewInf", "RefInf")
    return all(not plan[one].mesh.overlaps(plan[other].mesh) for one, other in pairs)


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


def published_degrees(name: str, rows: Sequence[RealRow]) -> set[int]:
    """Tensor degrees of rows that do such work: generate, infer or train."""
    return {row.layout.tp for row in rows if row.work.name[-3:] == name[-3:]}


def on_machines(choice: Choice) -> str:
    """Layout and machines, counted from 1 as REAL does; a part of one by its ranks."""
    mesh, layout = choice.mesh, choice.option.layout
    if mesh.size < MACHINE_RANKS:
        return f"{layout}{mesh}"
    first, last = mesh.first // MACHINE_RANKS + 1, mesh.last // MACHINE_RANKS + 1
    return f"{layout} on {first}" + (f"-{last}" if last > first else "")


if __name__ == "__main__":
    run_program(main)
