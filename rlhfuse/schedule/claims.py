"""What a schedule file says about its schedule, held against what is so.

Figures must be equal, up to the rounding of sums. A bound may be weaker than the one computed here (an older
program wrote it) but never stronger, and `optimal` must follow from the file's own makespan and bound. Times
are those of the earliest start that the order allows.

Knows nothing of how figures are computed: both sides come in the JSON form of schedule.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhfuse.errors import ScheduleError
from rlhfuse.schedule.ir.evaluate import TOLERANCE
from rlhfuse.schedule.ir.objective import reaches

FIGURES = ("makespan", "peak_memory", "serial_makespan", "serial_peak_memory")
BOUNDS = ("lower_bound", "memory_lower_bound")


def check_claims(found: Mapping[str, Any], computed: Mapping[str, Any]) -> None:
    """Raise ScheduleError naming the first entry of `found` that is untrue. What a file leaves out is not missed."""
    _check_times(found["tasks"], computed["tasks"], computed["makespan"])
    for key in FIGURES:
        if key in found and not _same(found[key], computed[key], computed[key]):
            raise ScheduleError(f"{key} is {found[key]!r}, but the schedule's is {computed[key]}")
    if "node_peak_memory" in found:
        _check_node_peaks(found["node_peak_memory"], computed["node_peak_memory"])
    for key in BOUNDS:
        if key in found and not (_number(found[key]) and reaches(found[key], computed[key])):
            raise ScheduleError(f"{key} is {found[key]!r}, but no more than {computed[key]} is proved")
    if "optimal" in found:
        bound = found.get("lower_bound", computed["lower_bound"])
        if found["optimal"] is not reaches(computed["makespan"], bound):
            raise ScheduleError(
                f"optimal is {found['optimal']!r}, but makespan {computed['makespan']} has the bound {bound}"
            )


def _check_times(found: Sequence[Sequence[Any]], computed: Sequence[Sequence[Any]], makespan: float) -> None:
    for node, (row, true_row) in enumerate(zip(found, computed)):
        for i, (task, true) in enumerate(zip(row, true_row)):
            for key in ("start", "end"):
                if key in task and not _same(task[key], true[key], makespan):
                    raise ScheduleError(
                        f"tasks[{node}][{i}]: {key} is {task[key]!r}, but in this order the task runs "
                        f"from {true['start']} to {true['end']}"
                    )


def _check_node_peaks(found: Any, computed: Sequence[float]) -> None:
    if not isinstance(found, list) or len(found) != len(computed):
        raise ScheduleError(f"node_peak_memory is {found!r}; a list of {len(computed)} numbers is needed")
    for node, (peak, true) in enumerate(zip(found, computed)):
        if not _same(peak, true, true):
            raise ScheduleError(f"node_peak_memory[{node}] is {peak!r}, but the schedule's is {true}")


def _same(found: Any, computed: float, scale: float) -> bool:
    return _number(found) and abs(found - computed) <= TOLERANCE * scale


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
