"""schedule.json: a schedule with its problem, its times and the bounds beside them (docs/reference/plans.md).

On reading, the orders must be a valid schedule, within its memory cap, of the problem inside the file, and that problem
must be the one the reader expects. Times, figures and bounds in the file are for people and other programs: they are
computed again from the orders. Written beside and renamed, so that half a file is never seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlhfuse.base.errors import InputError, ScheduleError
from rlhfuse.base.files import write_text
from rlhfuse.base.json_values import JsonModel, parse_json, read_json
from rlhfuse.schedule.bounds.bounds import latency_bound, memory_bound
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.evaluate import evaluate, over_cap, reaches, tidy
from rlhfuse.schedule.ir.problem import FusionProblem, Number
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import serial_makespan, serial_peak_memory


def schedule_dict(
    schedule: Schedule, search: Mapping[str, Any] | None = None, family: Sequence[Schedule] = ()
) -> dict[str, Any]:
    """The JSON form. `search` says how the schedule was found, `family` has those of other numbers of micro-batches.

    Raises ScheduleError on a deadlock.
    """
    problem, timeline = schedule.problem, evaluate(schedule)
    bound = latency_bound(problem)
    memory = memory_bound(problem, timeline.makespan)
    fits = over_cap(problem, timeline.node_peak_memory) is None
    of = ((one, one.problem.pipelines[0].microbatches) for one in family)
    others = [{"microbatches": count, "orders": one.text().splitlines()} for one, count in of]
    return {
        "version": 1,
        "problem": problem.to_dict(),
        "makespan": timeline.makespan,
        "lower_bound": bound,
        "latency_gap": _gap(timeline.makespan, bound),
        "optimal": fits and reaches(timeline.makespan, bound),
        "serial_makespan": serial_makespan(problem),
        "peak_memory": timeline.peak_memory,
        "node_peak_memory": list(timeline.node_peak_memory),
        "memory_lower_bound": memory,
        "memory_gap": _gap(timeline.peak_memory, memory),
        "memory_optimal": reaches(timeline.peak_memory, memory),
        "serial_peak_memory": serial_peak_memory(problem),
        "search": dict(search or {}),
        **({"others": others} if others else {}),
        "tasks": [
            [
                {
                    "pipeline": action.pipeline,
                    "kind": str(action.kind),
                    "microbatch": action.microbatch,
                    "stage": action.stage,
                    "start": start,
                    "end": end,
                }
                for action, start, end in zip(order, starts, ends)
            ]
            for order, starts, ends in zip(schedule.orders, timeline.starts, timeline.ends)
        ],
    }


def _gap(value: Number, bound: Number) -> Number:
    """How far `value` lies above `bound`, as a share of the bound; 0 where both are 0."""
    return tidy(value / bound - 1) if not reaches(value, bound) else 0


def save_schedule(
    path: str | Path, schedule: Schedule, search: Mapping[str, Any] | None = None, family: Sequence[Schedule] = ()
) -> None:
    """Write schedule.json, replacing what is there in one step. Raises InputError where that cannot be written."""
    write_text(path, render_json(schedule_dict(schedule, search, family)))


def load_family(path: str | Path) -> dict[int, Schedule]:
    """All schedules of a file by the micro-batches of their first pipeline, ascending, in the times of its problem.

    Raises InputError as `load_schedule`.
    """
    raw = read_json(path)
    schedule = read_schedule(raw, str(path))
    made = {schedule.problem.pipelines[0].microbatches: schedule}
    for other in parse_json(_ScheduleJson, raw, str(path)).others:
        problem = schedule.problem.with_microbatches(other.microbatches)
        try:
            made[other.microbatches] = Schedule.parse(problem, "\n".join(other.orders))
        except InputError as error:
            raise ScheduleError(
                f"{path}: {other.microbatches} micro-batches: {error}", getattr(error, "grid", "")
            ) from None
    return dict(sorted(made.items()))


def load_schedule(path: str | Path, expect: FusionProblem | None = None) -> Schedule:
    """Read schedule.json and check it. Raises InputError naming the file, what is wrong or differs, and the fix.

    `expect` refuses a schedule made for other pipelines, placements or micro-batches. Times and memory
    may differ: they are estimates, and the order stays executable under any.
    """
    return read_schedule(read_json(path), str(path), expect)


def read_schedule(raw: Any, where: str, expect: FusionProblem | None = None) -> Schedule:
    """The schedule in the JSON form `raw`, read from `where`.

    Raises InputError as `load_schedule` does: on a malformed file, and on orders that break a rule of the file's own
    problem (its memory cap is one).
    """
    form = parse_json(_ScheduleJson, raw, where)
    problem = FusionProblem.from_dict(form.problem, f"{where}: problem")
    if expect is not None:
        check_same_layout(problem, expect, where)
    try:
        schedule = Schedule(problem, tuple(tuple(task.action() for task in row) for row in form.tasks))
        peaks = evaluate(schedule).node_peak_memory
        node = over_cap(problem, peaks)
        if node is not None:
            raise InputError(
                f"node {node} holds {peaks[node]} of activations, but its memory cap leaves {problem.node_cap(node):g}"
            )
    except InputError as error:
        raise ScheduleError(f"{where}: {error}", getattr(error, "grid", "")) from None
    return schedule


def check_same_layout(given: FusionProblem, expect: FusionProblem, where: str) -> None:
    """Raise InputError naming the first difference that makes a schedule of one unusable for the other."""
    if given.nodes != expect.nodes:
        raise InputError(f"{where} is for {given.nodes} nodes, this run has {expect.nodes}; search a schedule for it")
    names = {p.name for p in given.pipelines}, {p.name for p in expect.pipelines}
    if names[0] != names[1]:
        raise InputError(
            f"{where} has pipelines {', '.join(sorted(names[0]))}, this run has {', '.join(sorted(names[1]))}; "
            "search a schedule for it"
        )
    for pipeline in expect.pipelines:
        other = given.pipeline(pipeline.name)
        for key in ("model", "placement", "microbatches", "split"):
            if getattr(other, key) != getattr(pipeline, key):
                raise InputError(
                    f"{where}: pipeline {pipeline.name} has {key} {getattr(other, key)}, this run has "
                    f"{getattr(pipeline, key)}; search a schedule for these layouts and micro-batches"
                )


class _TaskJson(JsonModel, extra="ignore"):
    pipeline: str
    kind: Literal["F", "B", "W"]
    stage: int
    microbatch: int

    def action(self) -> Action:
        return Action(self.pipeline, self.stage, Kind(self.kind), self.microbatch)


class _OtherJson(JsonModel, extra="ignore"):
    microbatches: int
    orders: list[str]


class _ScheduleJson(JsonModel, extra="ignore"):
    """What is read of schedule.json; times and figures are computed again."""

    version: Literal[1]
    problem: Any
    tasks: list[list[_TaskJson]]
    others: list[_OtherJson] = []


def render_json(raw: Mapping[str, Any]) -> str:
    """JSON text with one short line per task, so that two schedules can be compared line by line."""
    parts = []
    for key, value in raw.items():
        if key == "tasks":
            rows = [",\n".join(f"  {json.dumps(task)}" for task in row) for row in value]
            body = ",\n".join(f" [\n{row}\n ]" for row in rows)
            parts.append(f'"tasks": [\n{body}\n]')
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
