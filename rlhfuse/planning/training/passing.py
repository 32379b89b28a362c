"""On GPUs: what passes while micro-batches run, and what stages receive, beside the activations of a schedule.

What is received stays where it arrived: a hidden state until B, which ends its micro-batch on the stage; a gradient
until W, where the backward is split. The memory is taken once, for the most that are kept at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rlhfuse.costs.model_memory import ModelMemory
from rlhfuse.schedule.ir.action import Kind
from rlhfuse.schedule.ir.evaluate import held_in_lanes, loosen, tidy
from rlhfuse.schedule.ir.graph import OperationGraph, build_graph
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import min_memory, one_at_a_time
from rlhfuse.schedule.search.solution import node_peaks, sequence_of

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

    def held_by(self, graph: OperationGraph, sequence: np.ndarray) -> tuple[float, ...]:
        """Activations by node of a schedule, so that with what passes at most they are training's peak.

        What passes differs by model: the most held and the most that passes need not meet.
        """
        pipelines, first, peaks = graph.problem.pipelines, graph.tables.first, []
        passing = [self._in(pipelines[lane.pipeline], lane.stage, lane.kind) for lane in graph.lanes]
        for low, high in zip(first, first[1:]):
            here = graph.lane[sequence[low:high]]
            lanes, after = np.flatnonzero(np.bincount(here)).tolist(), held_in_lanes(graph, here)
            held = np.maximum(after, [0, *after[:-1]])
            highest = max(tidy(held[here == lane].max()) + passing[lane] for lane in lanes)
            peaks.append(highest - max(passing[lane] for lane in lanes) + self._received_beyond(graph, lanes, here))
        return tuple(map(float, peaks))

    def least(self, problem: FusionProblem) -> tuple[float, ...]:
        """No schedule's `held_by` is less: the most that passes need not be where the most is held."""
        lean = min(min(places) - self.split[model][0] for model, places in self.by_place.items())
        return tuple(max(0.0, held + lean - max(map(max, self.by_place.values()))) for held in min_memory(problem))

    def over(self, graph: OperationGraph, sequence: np.ndarray) -> tuple[float, ...]:
        """By node, what is held above the caps; empty where all of it has room."""
        held = zip(self.held_by(graph, sequence), map(graph.problem.node_cap, range(graph.problem.nodes)))
        beyond = tuple(max(0, most - room) if most > loosen(room) else 0 for most, room in held)
        return beyond if any(beyond) else ()

    def _in(self, pipeline: Pipeline, stage: int, kind: Kind) -> float:
        less, in_weights = self.split[pipeline.model]
        if kind is Kind.W:
            return in_weights
        by_place = self.by_place[pipeline.model]
        return by_place[stage % len(by_place)] - (less if pipeline.split and kind is Kind.B else 0)

    def _received_beyond(self, graph: OperationGraph, lanes: Iterable[int], here: np.ndarray) -> float:
        """Beyond `ModelMemory.receiving_bytes`, where an order keeps more than is usual; `here`: its lanes."""
        held: dict[tuple[str, int, Kind], np.ndarray] = {}  # (model, stage, F: hidden states, B: gradients): changes
        depth = {pipeline.model: pipeline.stages for pipeline in graph.problem.pipelines}
        for number in lanes:
            lane, pipeline = graph.lanes[number], graph.problem.pipelines[graph.lanes[number].pipeline]
            gradients = {Kind.B: 1, Kind.W: -1} if pipeline.split else {}
            for what, change in ((Kind.F, {Kind.F: 1, Kind.B: -1}), (Kind.B, gradients)):
                key = pipeline.model, lane.stage, what
                held.setdefault(key, np.zeros(len(graph.lanes), np.int64))[number] += change.get(lane.kind, 0)
        beyond = 0.0
        for (model, stage, what), changes in held.items():
            usual = len(self.by_place[model]) - stage % len(self.by_place[model]) if what is Kind.F else 1
            if stage > 0 if what is Kind.F else stage < depth[model] - 1:
                beyond += max(0, int(np.cumsum(changes[here]).max()) - usual) * self.received[model]
        return beyond


def with_room(
    passing: PassingMemory | None, problem: FusionProblem, seek: Callable[[FusionProblem], Iterable[np.ndarray]]
) -> np.ndarray:
    """The last schedule that `seek` makes of `problem`, as a sequence. If the inboxes of stages do not fit next to one,
    it gets a smaller memory cap, below what was held: quick ones come first, which show how much smaller."""
    graph, stated = build_graph(problem), problem
    for _ in range(ATTEMPTS):
        made, over = np.empty(0), ()
        for made in seek(stated):
            if over := passing.over(graph, made) if passing else ():
                break
        if not over:
            return made
        peaks = node_peaks(graph, made)
        held = [peak if over[node] else stated.node_cap(node) for node, peak in enumerate(peaks)]
        left = (max(least, held[node] - over[node]) for node, least in enumerate(min_memory(problem)))
        caps = tuple(room + problem.node_static(node) for node, room in enumerate(left))
        stated = replace(problem, memory_cap=caps)
    return sequence_of(graph, one_at_a_time(problem))
