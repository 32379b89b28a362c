"""The schedules of a run: one for every number of micro-batches that a mini-batch may have, all ready before the first.

Where a search makes them, those of the mini-batches that are drawn share its time, the likeliest first, and what one
leaves the next has. The largest number, which hardly ever comes, is searched for a moment. All others are derived: a
schedule without its last micro-batches is one of fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import FusionConfig
from rlhfuse.planning.training.passing import PassingMemory, with_room
from rlhfuse.planning.training.training_orders import derived, given_schedules, short_search
from rlhfuse.schedule.io import check_same_layout, load_family
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.ir.ranks import FusedShape
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.search.library import Library
from rlhfuse.schedule.search.search import SearchReport, SearchSettings, search
from rlhfuse.schedule.search.solution import Incumbent, schedule_of, sequence_of

Problems = Mapping[int, FusionProblem]
Passing = PassingMemory | None
LEAST_SECONDS = 0.05  # of a search, whatever is left


def schedule_family(
    fusion: FusionConfig,
    seed: int,
    problems: Problems,
    shares: Mapping[int, float],
    shape: FusedShape,
    kept: Path | None = None,
    comm: Any = None,
    passing: Passing = None,
) -> tuple[dict[int, Schedule], str]:
    """Schedules of `problems`, by micro-batches per actor pipeline, and where they are from.

    `shares`: of the mini-batches that are drawn; `kept`: schedule.json of the run that is resumed; `comm`: MPI's ranks,
    if several search together; `passing`: what needs room beside activations. Raises InputError as `given_schedules`.
    """
    given = given_schedules(fusion, problems, shape) or (kept and _kept(kept, problems))
    if given:
        made, source = dict(given[0]), given[1]
    else:
        made, source = _searched(fusion, seed, problems, shares, comm, passing)
    if (last := max(problems)) not in made:
        made[last] = _roomy(passing, problems[last], partial(short_search, seed))
    return made | derived(made, {rung: problem for rung, problem in problems.items() if rung not in made}), source


def _kept(file: Path, problems: Mapping[int, FusionProblem]) -> tuple[dict[int, Schedule], str] | None:
    """The orders that the run had, unless layouts, micro-batches or memory are others now."""
    try:
        loaded = load_family(file)
        for rung, problem in problems.items():
            check_same_layout(next(iter(loaded.values())).problem.with_microbatches(rung), problem, str(file))
    except InputError:
        return None
    made = derived(loaded, problems) if problems.keys() <= loaded.keys() else {}
    fits = all(Incumbent.of(schedule).fits() for schedule in made.values())
    return (made, f"as before, from {file}") if made and fits else None


def _searched(
    fusion: FusionConfig, seed: int, problems: Problems, shares: Mapping[int, float], comm: Any, passing: Passing
) -> tuple[dict[int, Schedule], str]:
    made, told, left, library = {}, [], fusion.search_seconds, Library.at(fusion.library)
    waiting = sorted(shares, key=lambda rung: (-shares[rung], -rung))
    while waiting:
        part = shares[waiting[0]] / sum(shares[rung] for rung in waiting)
        rung = waiting.pop(0)
        settings = SearchSettings(time_limit=max(part * left, LEAST_SECONDS), seed=seed, objective="memory")
        reports: list[tuple[SearchReport, str]] = []

        def anneal(problem: FusionProblem) -> Schedule:
            known = library.find(problem)
            known = known if comm is None else comm.bcast(known)  # hosts may know different ones
            schedule, report = search(problem, settings, start=known, comm=comm)
            library.keep(schedule)
            reports.append((report, f", from a schedule of {library.folder}" if known else ""))
            return schedule

        made[rung] = _roomy(passing, problems[rung], partial(short_search, seed), anneal)
        left -= sum(report.seconds - report.kernel_seconds for report, _ in reports)
        of = f"{rung} micro-batches: " if len(problems) > 1 else ""
        for report, begun in reports[-1:]:  # no search, where nothing but one micro-batch at a time has room
            proved = "proved optimal" if report.optimal else "not proved optimal"
            told.append(f"{of}annealed {report.seconds:.1f} s, {report.moves} moves{begun}, latency {proved}")
    return made, "; ".join(told) or "one micro-batch at a time: nothing else has room"


def _roomy(passing: Passing, problem: FusionProblem, *find: Callable[[FusionProblem], Schedule]) -> Schedule:
    """What the last of `find` makes of `problem`, with room for what passes: a quicker one is asked before it."""
    graph, asked = build_graph(problem), find if passing else find[-1:]
    made = with_room(passing, problem, lambda stated: (sequence_of(graph, one(stated)) for one in asked))
    return schedule_of(graph, made)
