"""The general problem as a CP-SAT model: optima to hold the bounds and the search against.

One interval per operation, no overlap on a node, one interval per held activation under a cumulative
limit on its node. Times and memory are scaled to integers, so give problems whose numbers are
multiples of 1/100.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ortools.sat.python import cp_model

SCALE = 100


@dataclass(frozen=True)
class Answer:
    """`value` is the best found (None without one), `proved` whether nothing is better or nothing exists."""

    value: float | None
    proved: bool
    seconds: float


def least_makespan(problem, *, memory=None, seconds=5.0, workers=1):
    """The least makespan; with `memory`, of the schedules whose peak is at most that. Caps always hold."""
    model = _Model(problem, memory=memory)
    model.cp.minimize(model.makespan)
    return model.solve(model.makespan, seconds, workers)


def least_memory(problem, makespan, *, seconds=5.0, workers=1):
    """The least peak memory of the schedules with a makespan of at most `makespan`."""
    model = _Model(problem, makespan=makespan)
    model.cp.minimize(model.peak)
    return model.solve(model.peak, seconds, workers)


class _Model:
    def __init__(self, problem, makespan=None, memory=None):
        self.cp = cp_model.CpModel()
        work = sum(sum(p.forward) + sum(p.backward) + sum(p.weight_gradient or ()) for p in problem.pipelines for _ in range(p.microbatches))
        hops = sum(2 * p.stages * p.microbatches for p in problem.pipelines) * problem.transfer
        horizon = _ticks(work + hops if makespan is None else makespan)
        self.makespan = self.cp.new_int_var(0, horizon, "makespan")
        most = sum(p.microbatches * _ticks(a) for p in problem.pipelines for a in p.activation)
        self.peak = self.cp.new_int_var(0, most if memory is None else _ticks(memory), "peak")
        self.busy = [[] for _ in range(problem.nodes)]
        self.held = [[] for _ in range(problem.nodes)]
        for pipeline in problem.pipelines:
            self._pipeline(problem, pipeline, horizon)
        for node in range(problem.nodes):
            self.cp.add_no_overlap(self.busy[node])
            intervals, sizes = [h for h, _ in self.held[node]], [a for _, a in self.held[node]]
            self.cp.add_cumulative(intervals, sizes, self.peak)
            cap = problem.node_cap(node)
            if cap < math.inf:
                self.cp.add_cumulative(intervals, sizes, _ticks(cap))

    def _pipeline(self, problem, pipeline, horizon):
        times = {"F": pipeline.forward, "B": pipeline.backward, "W": pipeline.weight_gradient}
        kinds = "FBW" if pipeline.split else "FB"
        start, end = {}, {}
        for s, node in enumerate(pipeline.placement):
            for m in range(pipeline.microbatches):
                for kind in kinds:
                    duration = _ticks(times[kind][s])
                    key = kind, s, m
                    start[key] = self.cp.new_int_var(0, horizon - duration, f"{pipeline.name}:{s}{kind}{m}")
                    end[key] = start[key] + duration
                    self.busy[node].append(self.cp.new_fixed_size_interval_var(start[key], duration, str(key)))
                    self.cp.add(end[key] <= self.makespan)
                    if m:
                        self.cp.add(start[key] >= end[kind, s, m - 1])
        last = pipeline.stages - 1
        for s, node in enumerate(pipeline.placement):
            for m in range(pipeline.microbatches):
                if s:
                    lag = _ticks(problem.transfer) if pipeline.placement[s - 1] != node else 0
                    self.cp.add(start["F", s, m] >= end["F", s - 1, m] + lag)
                    self.cp.add(start["B", s - 1, m] >= end["B", s, m] + lag)
                if s == last:
                    self.cp.add(start["B", s, m] >= end["F", s, m])
                if pipeline.split:
                    self.cp.add(start["W", s, m] >= end["B", s, m])
                size = self.cp.new_int_var(0, horizon, "")
                out = end[kinds[-1], s, m]
                hold = self.cp.new_interval_var(start["F", s, m], size, out, "")
                self.held[node].append((hold, _ticks(pipeline.activation[s])))

    def solve(self, value, seconds, workers):
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = 1
        status = solver.solve(self.cp)
        proved = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
        found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        return Answer(solver.value(value) / SCALE if found else None, proved, solver.wall_time)


def _ticks(value):
    ticks = round(value * SCALE)
    assert abs(ticks - value * SCALE) < 1e-6, f"{value} is no multiple of 1/{SCALE}"
    return ticks
