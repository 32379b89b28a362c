"""The general problem as a CP-SAT model: optima to hold the bounds and the search against.

One interval per operation, no overlap on a node, one interval per held activation under a cumulative limit on its
node. Times and memory are scaled to the integers that CP-SAT needs, so give problems whose numbers are multiples of
1/400; caps may be any. How far the solver goes is given in its own work units, some seconds each on a free core, so
that what it proves does not depend on how busy the machine is. Needs ortools (pip install rlhfuse[exact]).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ortools.sat.python import cp_model

SCALES = (1, 4, 20, 40, 100, 200, 400)


@dataclass(frozen=True)
class Answer:
    """`value` is the best found (None without one), `proved` whether nothing is better or nothing exists."""

    value: float | None
    proved: bool


def least_makespan(problem, *, work=1.0):
    """The least makespan found within so much `work`. Caps always hold."""
    model = _Model(problem)
    model.cp.minimize(model.makespan)
    return model.solve(model.makespan, model.times, work)


def least_memory(problem, makespan, *, work=1.0):
    """The least peak memory of the schedules with a makespan of at most `makespan`."""
    model = _Model(problem, makespan=makespan)
    model.cp.minimize(model.peak)
    return model.solve(model.peak, model.memory, work)


class _Model:
    def __init__(self, problem, makespan=None):
        self.cp = cp_model.CpModel()
        self.times = _scale(t for p in problem.pipelines for t in (*p.forward, *p.backward, *(p.weight_gradient or ())))
        self.times = max(self.times, _scale([problem.transfer, makespan or 0]))
        sizes = [a for p in problem.pipelines for a in (*p.activation, *(p.weight_activation or ()))]
        self.memory = _scale(sizes)
        horizon = self._time(_one_after_another(problem) if makespan is None else makespan)
        self.makespan = self.cp.new_int_var(0, horizon, "makespan")
        most = sum(p.microbatches for p in problem.pipelines) * sum(map(self._size, sizes))
        self.peak = self.cp.new_int_var(0, most, "peak")
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
                self.cp.add_cumulative(intervals, sizes, math.floor(cap * self.memory + 1e-6))

    def _time(self, value):
        return round(value * self.times)

    def _size(self, value):
        return round(value * self.memory)

    def _pipeline(self, problem, pipeline, horizon):
        times = {"F": pipeline.forward, "B": pipeline.backward, "W": pipeline.weight_gradient}
        kinds = "FBW" if pipeline.split else "FB"
        start, end = {}, {}
        for s, node in enumerate(pipeline.placement):
            for m in range(pipeline.microbatches):
                for kind in kinds:
                    duration = self._time(times[kind][s])
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
                    lag = self._time(problem.transfer) if pipeline.placement[s - 1] != node else 0
                    self.cp.add(start["F", s, m] >= end["F", s - 1, m] + lag)
                    self.cp.add(start["B", s - 1, m] >= end["B", s, m] + lag)
                if s == last:
                    self.cp.add(start["B", s, m] >= end["F", s, m])
                if pipeline.split:
                    self.cp.add(start["W", s, m] >= end["B", s, m])
                held = self._size(pipeline.activation[s])
                if not pipeline.split:
                    self._hold(node, start["F", s, m], end["B", s, m], held, horizon)
                    continue
                later = held if pipeline.weight_activation is None else self._size(pipeline.weight_activation[s])
                self._hold(node, start["F", s, m], end["W", s, m], min(held, later), horizon)
                self._hold(node, start["F", s, m], end["B", s, m], max(0, held - later), horizon)
                self._hold(node, start["B", s, m], end["W", s, m], max(0, later - held), horizon)

    def _hold(self, node, start, end, size, horizon):
        length = self.cp.new_int_var(0, horizon, "")
        self.held[node].append((self.cp.new_interval_var(start, length, end, ""), size))

    def solve(self, value, scale, work):
        solver = cp_model.CpSolver()
        solver.parameters.max_deterministic_time = work
        solver.parameters.num_workers = 1  # several race each other
        solver.parameters.random_seed = 1
        status = solver.solve(self.cp)
        proved = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
        found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        return Answer(solver.value(value) / scale if found else None, proved)


def _scale(values):
    """The first of SCALES that makes all values whole."""
    values = list(values)
    return next(scale for scale in SCALES if all(abs(v * scale - round(v * scale)) < 1e-6 for v in values))


def _one_after_another(problem):
    """Time in which everything can be done, nothing at once."""
    hops = sum(2 * p.stages * p.microbatches for p in problem.pipelines) * problem.transfer
    return hops + sum(
        p.microbatches * (sum(p.forward) + sum(p.backward) + sum(p.weight_gradient or ())) for p in problem.pipelines
    )
