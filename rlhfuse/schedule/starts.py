"""Schedules to begin a search with: those made by rule, from the leanest to the greediest.

Capped greedy is made with several numbers of micro-batches above 1F1B's caps, so that for any memory
cap there is a start close to it. Knows nothing of search.
"""

from __future__ import annotations

from rlhfuse.errors import InputError
from rlhfuse.schedule.builders import capped_greedy, greedy, pipeline_work, serial_1f1b
from rlhfuse.schedule.goal import Incumbent
from rlhfuse.schedule.problem import FusionProblem
from rlhfuse.schedule.schedule import Schedule

# Micro-batches above 1F1B's caps, for the largest model and for the others.
START_EXTRAS = ((-1, 0), (0, 0), (1, 0), (1, 1), (2, 0), (2, 2), (4, 4), (0, 4), (0, 8), (4, 8))


def starting_schedules(problem: FusionProblem, start: Schedule | None = None) -> list[Incumbent]:
    """The schedules made by rule (and `start`), without repetition; at least one fits the caps.

    Raises InputError naming the cap when not even one micro-batch at a time fits.
    """
    made = [greedy(problem), serial_1f1b(problem)]
    for extras in START_EXTRAS:
        extra = {model: extras[min(i, 1)] for i, model in enumerate(_by_size(problem))}
        made += [capped_greedy(problem, extra, model_first=model_first) for model_first in (False, True)]
    if start is not None:
        made.insert(0, Schedule(problem, start.orders))
    entries = [Incumbent.of(schedule) for schedule in dict.fromkeys(made)]
    for in_flight in range(max(pipeline.stages for pipeline in problem.pipelines), 0, -1):
        if any(entry.fits() for entry in entries):
            return entries
        schedule = serial_1f1b(problem, in_flight)
        entries.append(Incumbent.of(schedule))
    last = entries[-1]
    if not last.fits():
        node = max(range(problem.nodes), key=lambda n: last.timeline.node_peak_memory[n] - problem.node_cap(n))
        raise InputError(
            f"memory cap leaves {problem.node_cap(node):g} for activations on node {node}, but one micro-batch at a "
            f"time needs {last.timeline.node_peak_memory[node]}; raise the cap"
        )
    return entries


def _by_size(problem: FusionProblem) -> list[str]:
    """Model names, the largest first."""
    size = {pipeline.model: pipeline_work(pipeline) for pipeline in problem.pipelines}
    return sorted(size, key=lambda model: -size[model])
