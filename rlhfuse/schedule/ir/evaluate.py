"""What a schedule costs: start and end of every action, makespan, peak activation memory. Finds deadlocks.

An action starts when the one before it on its node has ended and its upstream's output has arrived. A micro-batch holds
its activation on a stage from F to B, and what W needs from B to W when the backward is split. No static memory.
Paper: section 5.2, Algorithm 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlhfuse.base.errors import ScheduleError
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.graph import OperationGraph, build_graph
from rlhfuse.schedule.ir.problem import FusionProblem, Number, Pipeline
from rlhfuse.schedule.ir.schedule import Schedule, grid

TOLERANCE = 1e-9  # relative; sums of the same floats in another order differ by less


@dataclass(frozen=True)
class Timeline:
    """`starts[node][i]`, `ends[node][i]` belong to `schedule.orders[node][i]`; memory is per node."""

    starts: tuple[tuple[Number, ...], ...]
    ends: tuple[tuple[Number, ...], ...]
    makespan: Number
    node_peak_memory: tuple[Number, ...]

    @property
    def peak_memory(self) -> Number:
        return max(self.node_peak_memory)


def idle_share(timeline: Timeline, makespan: Number) -> float:
    """Part of the nodes' time that is idle where the timeline's tasks take `makespan`."""
    busy = sum(sum(ends) - sum(starts) for starts, ends in zip(timeline.starts, timeline.ends))
    return 1 - busy / (len(timeline.starts) * makespan)


def evaluate(schedule: Schedule) -> Timeline:
    """Time and memory of a schedule. Raises ScheduleError naming the cycle when it can never finish."""
    graph = build_graph(schedule.problem)
    orders = [[graph.number[action] for action in order] for order in schedule.orders]
    ends = end_times(graph, orders)
    return Timeline(
        starts=tuple(tuple(tidy(ends[o] - graph.duration[o]) for o in order) for order in orders),
        ends=tuple(tuple(tidy(ends[o]) for o in order) for order in orders),
        makespan=tidy(max(ends)),
        node_peak_memory=tuple(max(memory_profile(schedule, node), default=0) for node in range(len(orders))),
    )


def end_times(graph: OperationGraph, orders: Sequence[Sequence[int]]) -> list[float]:
    """End of every operation when each node runs its row of `orders`. Raises ScheduleError on a cycle."""
    upstream, lag, duration = graph.upstream.tolist(), graph.lag.tolist(), graph.duration.tolist()
    ends: list[float] = [-1.0] * graph.size
    clock, position = [0.0] * len(orders), [0] * len(orders)
    waiting = list(range(len(orders)))
    blocked: dict[int, int] = {}  # operation waited for -> the node that waits: an output leaves to one node only
    done = 0
    while waiting:
        node = waiting.pop()
        order = orders[node]
        while position[node] < len(order):
            operation = order[position[node]]
            source = upstream[operation]
            if source >= 0 and ends[source] < 0:
                blocked[source] = node
                break
            arrival = ends[source] + lag[operation] if source >= 0 else 0.0
            clock[node] = max(clock[node], arrival) + duration[operation]
            ends[operation] = clock[node]
            position[node] += 1
            done += 1
            if operation in blocked:
                waiting.append(blocked.pop(operation))
    if done < graph.size:
        _raise_cycle(graph, orders, position)
    return ends


def _raise_cycle(graph: OperationGraph, orders: Sequence[Sequence[int]], position: list[int]) -> None:
    """Each stuck node waits for an operation of another stuck node: follow that until a node repeats."""
    node = next(n for n in range(len(orders)) if position[n] < len(orders[n]))
    seen: list[int] = []
    while node not in seen:
        seen.append(node)
        node = int(graph.node[graph.upstream[orders[node][position[node]]]])
    cycle = seen[seen.index(node) :]
    waits = [
        f"node {n} at {graph.actions[stuck]} waits for {graph.actions[graph.upstream[stuck]]}"
        for n in cycle
        for stuck in [orders[n][position[n]]]
    ]
    text = grid({n: [graph.actions[o] for o in order] for n, order in enumerate(orders)}, (node, position[node]))
    raise ScheduleError(f"the schedule deadlocks: {'; '.join(waits)}", text)


def memory_profile(schedule: Schedule, node: int) -> list[Number]:
    """Activation memory on `node` after each action of its order."""
    return held_after({pipeline.name: pipeline for pipeline in schedule.problem.pipelines}, schedule.orders[node])


def held_after(pipelines: Mapping[str, Pipeline], computed: Sequence[Action]) -> list[Number]:
    """Activation memory after each computing action; its stage is one of the pipeline's."""
    numbers: dict[tuple[str, int, Kind], int] = {}
    here = np.array([numbers.setdefault(action[:3], len(numbers)) for action in computed], np.int64)
    held = _held([(pipelines[name], stage, kind) for name, stage, kind in numbers], here)
    return [tidy(amount) for amount in held.tolist()]


def held_in_lanes(graph: OperationGraph, here: np.ndarray) -> np.ndarray:
    """The same, not tidy, after each operation of the lanes `here`, int64[operations of a node]."""
    return _held([(graph.problem.pipelines[lane.pipeline], lane.stage, lane.kind) for lane in graph.lanes], here)


def _held(kinds: Sequence[tuple[Pipeline, int, Kind]], here: np.ndarray) -> np.ndarray:
    """Counted in whole activations and then multiplied, so that 8 * 1.95 is 15.6 wherever it occurs; `here`: the number
    in `kinds` of each operation."""
    held: dict[Number, np.ndarray] = {}  # size of an activation -> changes of how many, by kind
    for number in np.flatnonzero(np.bincount(here)).tolist():
        pipeline, stage, kind = kinds[number]
        activation, later = pipeline.activation[stage], pipeline.held_for_weights[stage]
        taken = {Kind.F: ((activation, 1),), Kind.B: ((activation, -1), (later, 1)), Kind.W: ((later, -1),)}
        for size, change in taken[kind]:
            held.setdefault(size, np.zeros(len(kinds), np.int64))[number] += change
    return sum((np.cumsum(changes[here]) * size for size, changes in held.items()), np.zeros(len(here)))


def over_cap(problem: FusionProblem, node_peak_memory: Sequence[Number]) -> int | None:
    """The first node whose peak is above its memory cap, if there is one."""
    for node, peak in enumerate(node_peak_memory):
        if peak > loosen(problem.node_cap(node)):
            return node
    return None


def reaches(value: Number, bound: Number) -> bool:
    """value <= bound within TOLERANCE."""
    return value <= bound * (1 + TOLERANCE)


def loosen(cap: float) -> float:
    """A cap with room for the rounding of sums."""
    return cap * (1 + TOLERANCE) + 1e-12


def tidy(value: float) -> Number:
    """An integer when it is one, else rounded to 12 digits: the noise of float sums stays out of files."""
    value = float(value)
    return int(value) if value.is_integer() else float(f"{value:.12g}")
