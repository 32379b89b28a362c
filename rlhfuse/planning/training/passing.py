"""On GPUs: what passes while micro-batches run, and what stages receive, beside the activations of a schedule.

What is received stays where it arrived: a hidden state until B, which ends its micro-batch on the stage; a gradient
until W, where the backward is split. The memory is taken once, for the most that are kept at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rlhfuse.costs.model_memory import ModelMemory
from rlhfuse.schedule.ir.action import Kind
from rlhfuse.schedule.ir.evaluate import Computed, loosen, memory_profile, where_kinds
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import min_memory, one_at_a_time

ATTEMPTS = 5  # to find a schedule that has room for what its stages receive


@dataclass(frozen=True)
class PassingMemory:
    """Bytes of a rank, by model that trains."""

    by_place: Mapping[str, tuple[float, ...]]  # of its pipeline: while a micro-batch runs there
    received: Mapping[str, float]  # one hidden state between two stages
    split: Mapping[str, tuple[float, float]]  # of split backwards: so much less in B; in W

    @staticmethod
    def of(trained: Mapping[str, ModelMemory], tokens: float) -> PassingMemory:
        """Memory that passes with micro-batches of so many tokens."""
        return PassingMemory(
            {m: tuple(model.passing_bytes(tokens, p) for p in range(model.layout.pp)) for m, model in trained.items()},
            {name: model.hidden_bytes(tokens) for name, model in trained.items()},
            {name: model.split_passing_bytes(tokens) for name, model in trained.items()},
        )

    def held_by(self, schedule: Schedule) -> tuple[float, ...]:
        """Activations by node, so that with what passes at most they are training's peak.

        What passes differs by model: the most held and the most that passes need not meet.
        """
        pipelines, peaks = {pipeline.name: pipeline for pipeline in schedule.problem.pipelines}, []
        for node, order in enumerate(schedule.orders):
            kinds = where_kinds(order)
            passing, after = np.empty(len(order)), np.array(memory_profile(schedule, node), float)
            for (name, stage, kind), here in kinds.items():
                passing[here] = self._in(pipelines[name], stage, kind)
            highest = (np.maximum(after, [0, *after[:-1]]) + passing).max()
            peaks.append(float(highest - passing.max()) + self._received_beyond(pipelines, kinds))
        return tuple(peaks)

    def least(self, problem: FusionProblem) -> tuple[float, ...]:
        """No schedule's `held_by` is less: the most that passes need not be where the most is held."""
        lean = min(min(places) - self.split[model][0] for model, places in self.by_place.items())
        return tuple(max(0.0, held + lean - max(map(max, self.by_place.values()))) for held in min_memory(problem))

    def over(self, schedule: Schedule) -> tuple[float, ...]:
        """By node, what is held above the caps; empty where all of it has room."""
        rooms = map(schedule.problem.node_cap, range(schedule.problem.nodes))
        beyond = tuple(
            max(0, held - room) if held > loosen(room) else 0 for held, room in zip(self.held_by(schedule), rooms)
        )
        return beyond if any(beyond) else ()

    def _in(self, pipeline: Pipeline, stage: int, kind: Kind) -> float:
        less, in_weights = self.split[pipeline.model]
        if kind is Kind.W:
            return in_weights
        by_place = self.by_place[pipeline.model]
        return by_place[stage % len(by_place)] - (less if pipeline.split and kind is Kind.B else 0)

    def _received_beyond(self, pipelines: Mapping[str, Pipeline], kinds: Mapping[Computed, np.ndarray]) -> float:
        """Beyond `ModelMemory.receiving_bytes`, where an order keeps more than is usual."""
        count = sum(map(len, kinds.values()))
        held: dict[tuple[str, int, Kind], np.ndarray] = {}  # (model, stage, F: hidden states, B: gradients): changes
        for (name, stage, kind), here in kinds.items():
            model, split = pipelines[name].model, pipelines[name].split
            gradients = {Kind.B: 1, Kind.W: -1} if split else {}
            for what, change in ((Kind.F, {Kind.F: 1, Kind.B: -1}), (Kind.B, gradients)):
                held.setdefault((model, stage, what), np.zeros(count, np.int64))[here] += change.get(kind, 0)
        depth, beyond = {pipeline.model: pipeline.stages for pipeline in pipelines.values()}, 0.0
        for (model, stage, what), changes in held.items():
            usual = len(self.by_place[model]) - stage % len(self.by_place[model]) if what is Kind.F else 1
            if stage > 0 if what is Kind.F else stage < depth[model] - 1:
                beyond += max(0, int(np.cumsum(changes).max()) - usual) * self.received[model]
        return beyond


def with_room(
    passing: PassingMemory | None,
    problem: FusionProblem,
    find: Callable[[FusionProblem], Schedule],
    probe: Callable[[FusionProblem], Schedule],
) -> Schedule:
    """The schedule that `find` makes of `problem`. If the inboxes of stages do not fit next to it, `find` gets a
    smaller memory cap, below what was held; `probe`, a quick search, shows how much smaller."""
    stated = problem
    for _ in range(ATTEMPTS):
        for seek in (probe, find) if passing else (find,):
            made = Schedule(problem, seek(stated).orders)
            if over := passing.over(made) if passing else ():
                break
        else:
            return made
        held = [max(memory_profile(made, node)) if over[node] else stated.node_cap(node) for node in range(len(over))]
        left = (max(least, held[node] - over[node]) for node, least in enumerate(min_memory(problem)))
        caps = tuple(room + problem.node_static(node) for node, room in enumerate(left))
        stated = replace(problem, memory_cap=caps)
    return one_at_a_time(problem)
