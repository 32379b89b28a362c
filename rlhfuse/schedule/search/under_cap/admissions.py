"""Annealing over when micro-batches are admitted, under memory caps.

A schedule's start times are what its operations aim at. Those of a range of micro-batches aim earlier or later, and the
list scheduler makes a schedule of that which fits (dispatch.py): so a micro-batch moves on all nodes at once, which
single moves under a cap cannot do.
"""

from __future__ import annotations

import math
import random

import numpy as np

from rlhfuse.schedule.ir.action import Kind
from rlhfuse.schedule.search.dispatch import Dispatcher, Rules
from rlhfuse.schedule.search.heads_tails import new_state, refresh
from rlhfuse.schedule.search.solution import Round, Solution
from rlhfuse.schedule.search.under_cap.mirror import Mirror

WARM, COLD = 1.0, 0.05  # temperatures at which a run begins and ends, in mean times of an operation
MOVES = 6  # of an annealer that take as long as placing one operation
RUN_DECODES = 500  # of the first run; each is twice as long as the one before
MIRRORED_SHARE = 0.4  # of the schedules are made from their end
SHIFTS = (1, 3, 10, 30)  # standard deviations of a change, in mean times of an operation
EARLY = (0.0, 1.0, 3.0, 10.0, math.inf)  # how long before its aim an operation may begin


class Admissions:
    """The annealing of one problem's admissions; `advance` makes a part of it."""

    def __init__(self, dispatcher: Dispatcher, seed: str) -> None:
        self.dispatcher, self.mirror, self.random = dispatcher, Mirror.of(dispatcher.graph), random.Random(seed)
        self.graph = graph = dispatcher.graph
        lanes = graph.lanes
        self.unit = float(graph.duration.mean())
        self.microbatch = np.concatenate([np.arange(lane.microbatches) for lane in lanes])
        self.pipeline = np.array([lane.pipeline for lane in lanes])[graph.lane]
        models, pipelines = graph.problem.models, graph.problem.pipelines
        self.model = np.array([models.index(pipeline.model) for pipeline in pipelines])[self.pipeline]
        self.forward = np.array([lane.kind is Kind.F for lane in lanes])[graph.lane]
        self.admits = graph.upstream < 0
        self.length, self.spent, self.credit = RUN_DECODES, 0, 0
        self.beaten = self.makespan = math.inf  # the makespan to beat when last seen, and that of the present schedule
        self.head = self.tail = np.empty(0)  # of that one

    def advance(self, best: Solution, moves: int) -> Round:
        """Try as many schedules as so many moves pay for to beat `best`; what one costs too much is paid later."""
        if best.makespan != self.beaten:
            self.beaten = best.makespan
            self._stand_at(best)
        self.credit += moves
        found = None
        while self.credit > 0 and found is None:
            self.credit -= MOVES * self.graph.size
            found = self._step()
        return Round(moves, found, 0)

    def _step(self) -> Solution | None:
        """One change and its schedule; that, if it is the best."""
        if self.spent == self.length:
            self.length, self.spent = 2 * self.length, 0
        temperature = self.unit * WARM * (COLD / WARM) ** (self.spent / self.length)
        self.spent += 1
        limit = self.makespan - temperature * math.log(1 - self.random.random())
        mirrored = self.mirror is not None and self.random.random() < MIRRORED_SHARE
        made = (self.mirror if mirrored and self.mirror else self.dispatcher).dispatch(self._rules(mirrored), limit)
        if made.makespan > limit:
            return None
        self._stand_at(made)
        if made.makespan >= self.beaten:
            return None
        self.beaten = made.makespan
        return made

    def _stand_at(self, solution: Solution) -> None:
        state = new_state(solution.sequence, 1)
        refresh(self.graph.tables, state)
        self.makespan, self.head, self.tail = solution.makespan, state.head, state.tail

    def _rules(self, mirrored: bool) -> Rules:
        """Aims are the start times, or between them and the latest that change no makespan, with some moved."""
        draw, graph = self.random, self.graph
        aim = self.head
        if draw.random() < 0.3:
            latest = self.makespan - self.tail - graph.duration
            aim = aim + draw.random() * (latest - aim)
        aim = aim.copy()
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            aim[self._some()] += draw.gauss(0, 1) * self.unit * draw.choice(SHIFTS)
        admits = self.admits
        if mirrored and self.mirror:
            aim, admits = self.mirror.aims(aim, self.makespan), self.mirror.dispatcher.graph.upstream < 0
        early = draw.choice(EARLY) * self.unit
        earliest = aim - early if draw.random() < 0.3 else np.where(admits, aim, aim - early)
        any_window, unreserved = self.dispatcher.any_window, self.dispatcher.unreserved
        return Rules(aim, np.maximum(0.0, earliest), any_window, unreserved, draw.choice((0.0, 0.0, 1.0)))

    def _some(self) -> np.ndarray:
        """bool[operations]: of one micro-batch or a range, of one pipeline or a model: all, one way, or on one node."""
        draw, problem = self.random, self.graph.problem
        p = draw.randrange(len(problem.pipelines))
        model, count = problem.models.index(problem.pipelines[p].model), problem.pipelines[p].microbatches
        mine = self.pipeline == p if draw.random() < 0.7 else self.model == model
        first = last = draw.randrange(count)
        if draw.random() < 0.5:
            more = draw.randrange(1, 1 + max(1, count // 2))
            last = count - 1 if draw.random() < 0.4 else min(count - 1, first + more)
        some = mine & (self.microbatch >= first) & (self.microbatch <= last)
        way = draw.random()
        if way < 0.25:
            some &= ~self.forward
        elif way < 0.4:
            some &= self.forward
        elif way < 0.5:
            some &= self.graph.node == draw.randrange(problem.nodes)
        return some
