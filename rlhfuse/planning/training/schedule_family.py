"""The schedules of a run: one for every number of micro-batches that a mini-batch may have, all ready before the first.

Where a search makes them, those of the mini-batches that are drawn share its time, the likeliest first, and what one
leaves the next has. The largest number, which hardly ever comes, is searched for a moment. All others are derived: a
schedule without its last micro-batches is one of fewer.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhfuse.config.settings import FusionConfig
from rlhfuse.planning.training.training_orders import derived, given_schedules, short_search
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.ir.ranks import FusedShape
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.search.search import SearchSettings, search

LEAST_SECONDS = 0.05  # of a search, whatever is left


def schedule_family(
    fusion: FusionConfig,
    seed: int,
    problems: Mapping[int, FusionProblem],
    shares: Mapping[int, float],
    shape: FusedShape,
) -> tuple[dict[int, Schedule], str]:
    """Schedules of `problems`, by micro-batches per actor pipeline, and where they are from.

    `shares`: of the mini-batches that are drawn. Raises InputError as `given_schedules`.
    """
    given = given_schedules(fusion, problems, shape)
    made, source = (dict(given[0]), given[1]) if given else ({}, "")
    if not given:
        made, source = _searched(fusion.search_seconds, seed, problems, shares)
    if (last := max(problems)) not in made:
        made[last] = short_search(seed, problems[last])
    return made | derived(made, {rung: problem for rung, problem in problems.items() if rung not in made}), source


def _searched(
    seconds: float, seed: int, problems: Mapping[int, FusionProblem], shares: Mapping[int, float]
) -> tuple[dict[int, Schedule], str]:
    made, told, left = {}, [], seconds
    waiting = sorted(shares, key=lambda rung: (-shares[rung], -rung))
    while waiting:
        part = shares[waiting[0]] / sum(shares[rung] for rung in waiting)
        rung = waiting.pop(0)
        settings = SearchSettings(time_limit=max(part * left, LEAST_SECONDS), seed=seed, objective="memory")
        made[rung], report = search(problems[rung], settings)
        left -= report.seconds - report.kernel_seconds
        proved = "proved optimal" if report.optimal else "not proved optimal"
        of = f"{rung} micro-batches: " if len(problems) > 1 else ""
        told.append(f"{of}annealed {report.seconds:.1f} s, {report.moves} moves, latency {proved}")
    return made, "; ".join(told)
