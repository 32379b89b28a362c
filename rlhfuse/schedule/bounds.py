"""Proved lower bounds: no schedule is faster, no schedule as fast needs less memory.

Latency. Give every action the earliest start that dependencies and the micro-batch order of its own
stage allow (head), and likewise the least time that must follow its end (tail). On one node, any set
of actions takes at least

    min head + sum of durations + min tail

and the largest of these over all sets is the makespan of Jackson's preemptive one-machine schedule,
found with one heap. The best over nodes is the bound; it contains the paper's per-stage bound and the
critical path of every pipeline, which the paper's text leaves out.

Memory. If a stage never holds more than K micro-batches of a pipeline, micro-batch m + K starts there
after m has left, so M micro-batches take at least

    head + floor((M-1)/K) R + ((M-1) mod K) f + (round trip of the last and the tail behind it)

with R the shortest round trip from the start of a forward to the release of its activation. A given
makespan thus forces a smallest K, and K activations, on every stage.

Knows nothing of schedules. Paper: section 7.3 (LB), Table 3.
"""

from __future__ import annotations

import heapq

from rlhfuse.schedule.evaluate import TOLERANCE, tidy
from rlhfuse.schedule.graph import OperationGraph, build_graph
from rlhfuse.schedule.problem import FusionProblem, Number, Pipeline


def latency_bound(problem: FusionProblem) -> Number:
    """A time that no schedule of `problem` beats, memory not regarded."""
    graph = build_graph(problem)
    heads, tails = heads_and_tails(graph)
    bound = 0.0
    for node in range(problem.nodes):
        here = [o for o in range(graph.size) if graph.node[o] == node]
        bound = max(bound, _one_machine([(heads[o], float(graph.duration[o]), tails[o]) for o in here]))
    return tidy(bound)


def heads_and_tails(graph: OperationGraph) -> tuple[list[float], list[float]]:
    """Earliest start of every operation and least time after its end, nodes without other pipelines."""
    order = _topological(graph)
    heads, tails = [0.0] * graph.size, [0.0] * graph.size
    first = [graph.lanes[lane].first for lane in graph.lane]
    for o in order:
        source = graph.upstream[o]
        if source >= 0:
            heads[o] = heads[source] + float(graph.duration[source] + graph.lag[o])
        if o > first[o]:  # the lane's previous micro-batch
            heads[o] = max(heads[o], heads[o - 1] + float(graph.duration[o - 1]))
    for o in reversed(order):
        for target in graph.downstream[o]:
            if target >= 0:
                tails[o] = max(tails[o], tails[target] + float(graph.duration[target] + graph.lag[target]))
        if o + 1 < graph.size and first[o + 1] == first[o]:
            tails[o] = max(tails[o], tails[o + 1] + float(graph.duration[o + 1]))
    return heads, tails


def memory_bound(problem: FusionProblem, makespan: Number) -> Number:
    """A peak activation memory that no schedule as fast as `makespan` goes below."""
    bound = 0.0
    for pipeline in problem.pipelines:
        for stage in range(pipeline.stages):
            fewest = _fewest_in_flight(problem, pipeline, stage, makespan)
            bound = max(bound, fewest * pipeline.activation[stage])
    return tidy(bound)


def _fewest_in_flight(problem: FusionProblem, pipeline: Pipeline, stage: int, makespan: Number) -> int:
    """The smallest K with which this stage can still be through by `makespan`."""
    head, forward, leave, finish = _round_trip(problem, pipeline, stage)
    last = pipeline.microbatches - 1
    for in_flight in range(1, pipeline.microbatches):
        rounds, rest = divmod(last, in_flight)
        if head + rounds * leave + rest * forward + finish <= makespan * (1 + TOLERANCE):
            return in_flight
    return pipeline.microbatches


def _round_trip(problem: FusionProblem, pipeline: Pipeline, stage: int) -> tuple[float, float, float, float]:
    """Of one micro-batch at `stage`: arrival, forward time, forward start to release, forward start to its end."""
    hop = [
        problem.transfer if a != b else 0 for a, b in zip(pipeline.placement, pipeline.placement[1:])
    ]
    arrival = sum(pipeline.forward[:stage]) + sum(hop[:stage])
    down = sum(pipeline.forward[stage:]) + sum(hop[stage:])
    up = sum(pipeline.backward[stage:]) + sum(hop[stage:])
    weight = pipeline.weight_gradient or (0,) * pipeline.stages
    after, travelled = weight[stage], 0.0
    for earlier in range(stage - 1, -1, -1):
        travelled += hop[earlier] + pipeline.backward[earlier]
        after = max(after, travelled + weight[earlier])
    return arrival, pipeline.forward[stage], down + up + weight[stage], down + up + after


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """Jackson's preemptive schedule of (head, duration, tail): always run the released job of longest tail."""
    jobs = sorted(jobs)
    clock, makespan, following = 0.0, 0.0, 0
    released: list[list[float]] = []  # [-tail, time left]
    while released or following < len(jobs):
        if not released:
            clock = max(clock, jobs[following][0])
        while following < len(jobs) and jobs[following][0] <= clock:
            _, duration, tail = jobs[following]
            heapq.heappush(released, [-tail, duration])
            following += 1
        tail, left = released[0]
        until = jobs[following][0] if following < len(jobs) else float("inf")
        if clock + left <= until:
            clock += left
            heapq.heappop(released)
            makespan = max(makespan, clock - tail)
        else:
            released[0][1] = left - (until - clock)
            clock = until
    return makespan


def _topological(graph: OperationGraph) -> list[int]:
    """Operations so that upstreams and earlier micro-batches of a lane come first."""
    depth = [0] * graph.size
    for start in range(graph.size):
        chain, o = [], start
        while o >= 0 and not depth[o]:
            chain.append(o)
            o = int(graph.upstream[o])
        base = depth[o] if o >= 0 else 0
        for steps, o in enumerate(reversed(chain), 1):
            depth[o] = base + steps
    return sorted(range(graph.size), key=lambda o: (depth[o], o))
