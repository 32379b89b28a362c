"""Schedules that searches have found: a file a problem in one folder, so that no search finds again what is known.

A problem is known by a digest of all that a schedule is judged by; names do not matter. What is read is verified as any
schedule is. Files are replaced whole, so that any number may read; where two write at once, one is lost.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rlhfuse.base.errors import InputError, writing
from rlhfuse.base.files import user_cache, write_json
from rlhfuse.base.json_values import JsonModel, parse_json, read_json
from rlhfuse.schedule.ir.evaluate import tidy
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.search.solution import Incumbent

PLACE = "RLHFUSE_LIBRARY"  # environment: the folder that "auto" stands for, in place of the user's cache; empty: none


class Library:
    """Owned by whoever searches; `folder` None: knows nothing and keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @staticmethod
    def at(place: str) -> Library:
        """The library of a folder; "auto": of this user; "": none."""
        if place == "auto":
            place = os.environ.get(PLACE, str(user_cache() / "schedules"))
        return Library(Path(place) if place else None)

    def find(self, problem: FusionProblem) -> Schedule | None:
        """The best schedule known, within the caps. A file that holds none is told of and left out."""
        if self.folder is None or not (path := self._path(problem)).exists():
            return None
        try:
            text = parse_json(_Entry, read_json(path), str(path)).schedule
            found = Schedule.parse(_named(problem, range(len(problem.pipelines))), text)
            if Incumbent.of(found).fits():
                return _renamed(found, problem)
            raise InputError("a node holds more than its memory cap leaves")
        except InputError as error:
            warnings.warn(f"{path} is left out, to be written anew with the next schedule: {error}", stacklevel=2)
            return None

    def keep(self, schedule: Schedule) -> None:
        """Remember a schedule within its caps if it is faster than what is known, or as fast and leaner."""
        known = self.find(schedule.problem)
        if self.folder is None or (known and _key(known) <= _key(schedule)):
            return
        named = _named(schedule.problem, range(len(schedule.problem.pipelines)))
        try:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self._path(schedule.problem), {"version": 1, "schedule": _renamed(schedule, named).text()})
        except InputError as error:
            warnings.warn(f"{error}; the library of schedules does not keep what was found", stacklevel=2)

    def _path(self, problem: FusionProblem) -> Path:
        assert self.folder is not None, "asked with a folder"
        return self.folder / f"{digest(problem)}.json"


class _Entry(JsonModel):
    version: Literal[1]
    schedule: str


def digest(problem: FusionProblem) -> str:
    """Hexadecimal digits that tell problems apart by nodes, transfer, room, and placement, micro-batches, times and
    memory of each pipeline in order: whatever their names and whatever else their nodes hold."""
    rooms = [None if math.isinf(room := problem.node_cap(node)) else tidy(room) for node in range(problem.nodes)]
    facts: list = [problem.nodes, tidy(problem.transfer), rooms]
    for pipeline in problem.pipelines:
        every = pipeline.with_facts(times=_tidied, memory=_tidied)
        facts.append([every.placement, every.microbatches, every.forward, every.backward, every.weight_gradient])
        facts.append([every.activation, every.held_for_weights])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


def _tidied(values: Sequence) -> tuple:
    return tuple(map(tidy, values))


def _key(schedule: Schedule) -> tuple:
    timeline = Incumbent.of(schedule).timeline
    return timeline.makespan, timeline.peak_memory


def _named(problem: FusionProblem, names: Sequence) -> FusionProblem:
    """The problem with these names of its pipelines."""
    pipelines = (replace(pipeline, name=str(name)) for pipeline, name in zip(problem.pipelines, names))
    return replace(problem, pipelines=tuple(pipelines))


def _renamed(schedule: Schedule, problem: FusionProblem) -> Schedule:
    """The schedule of a problem that differs in names alone."""
    names = {mine.name: other.name for mine, other in zip(schedule.problem.pipelines, problem.pipelines)}
    orders = (tuple(action._replace(pipeline=names[action.pipeline]) for action in row) for row in schedule.orders)
    return Schedule(problem, tuple(orders))
