"""Rules by which micro-batches are admitted under memory caps, and a search among them that counts decodes.

A rule says how many micro-batches every stage holds at most, and what an operation's turn is: a weighted sum of how
long its micro-batch takes to come to it, of how many were admitted before, and of its kind. The list scheduler makes a
schedule of each (dispatch.py). A grid is tried first, then small changes of the best.
"""

from __future__ import annotations

import math
import random
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rlhfuse.base.remembered import remembered
from rlhfuse.schedule.ir.action import Kind
from rlhfuse.schedule.ir.evaluate import loosen, reaches
from rlhfuse.schedule.ir.graph import OperationGraph, build_graph
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import pipeline_work
from rlhfuse.schedule.search.dispatch import KEPT, Dispatcher, Rules
from rlhfuse.schedule.search.solution import Solution
from rlhfuse.schedule.search.under_cap.mirror import Mirror

GRID_SHARE = 0.5  # of all tries
WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48)
# In shares of the busiest node's work: how long after the time at which a micro-batch could come to it an operation
# aims (a factor), when a model begins, how its micro-batches are spread.
STRETCHES = (0.5, 1, 1, 1.5, 2, 3)
PHASES = (0, 0, 0, 0.05, 0.1, 0.25, 0.5)
PACES = (1, 1, 1, 0.8, 0.5)
BACKWARD_BONUSES = (0, 0, 1, 2, 5, 20)  # mean times of an operation
NEARLY = 0.01  # a change may be this much worse
FRUITLESS = 150  # changes before the climb goes on from another of the best


class AdmissionRule(NamedTuple):
    """`weights` of `AdmissionRules.features`; `window` of every stage; the model that has room reserved, or -1."""

    weights: np.ndarray  # float64[models, 5]
    window: np.ndarray  # int64[stages]
    reserved: int
    patience: float
    mirrored: bool = False  # whether it makes schedules of the mirrored problem


class AdmissionRules:
    """Draws rules for one problem, and keeps the fastest schedules that they make, so many."""

    def __init__(self, dispatcher: Dispatcher, seed: str, kept: int = KEPT) -> None:
        self.dispatcher, self.random, self.kept = dispatcher, random.Random(seed), kept
        graph = dispatcher.graph
        self.pipelines, models = graph.problem.pipelines, graph.problem.models
        large = max(self.pipelines, key=pipeline_work).model
        self.large = models.index(large)
        self.model_of = np.array([models.index(pipeline.model) for pipeline in self.pipelines])
        self.operation_model = self.model_of[[lane.pipeline for lane in graph.lanes]][graph.lane]
        self.stage_model = self.model_of[dispatcher.stages.pipeline]
        self.most = np.array([pipeline.microbatches for pipeline in self.pipelines])[dispatcher.stages.pipeline]
        self.work = float(np.bincount(graph.node, graph.duration).max())
        self.mean = float(graph.duration.mean()) / self.work
        self.best: list[tuple[Solution, AdmissionRule]] = []  # the fastest first
        self.tried = 0  # by search

    @cached_property
    def mirror(self) -> Mirror | None:
        return Mirror.of(self.dispatcher.graph)

    @remembered
    def features(self, mirrored: bool) -> np.ndarray:
        return _features((self.mirror if mirrored and self.mirror else self).dispatcher.graph, self.work)

    def search(self, tries: int, enough: float = 0.0) -> list[Solution]:
        """The fastest schedules of so many decodes, those of an earlier call among them, the fastest first; ends at one
        that takes `enough` time."""
        fixed = self._fixed()
        for number in range(self.tried, max(1, tries)):
            if self.best and reaches(self.best[0][0].makespan, enough):
                break
            self.tried = number + 1
            if number < len(fixed):
                self._try(fixed[number])
            elif number < GRID_SHARE * tries:
                self._try(self._drawn())
            else:
                self._climb(tries - number, enough)
                break
        return [solution for solution, _ in self.best]

    def _try(self, rule: AdmissionRule, limit: float | None = None) -> float:
        """Decode; the makespan, infinite above `limit`, or where that is None of what is too slow to be kept."""
        turn = np.einsum("ij,ij->i", self.features(rule.mirrored), rule.weights[self.operation_model])
        reserved = self.stage_model == rule.reserved
        rules = Rules(turn, self.dispatcher.any_time, rule.window, reserved, rule.patience)
        slowest = self.best[-1][0].makespan if len(self.best) == self.kept else math.inf
        mirror = self.mirror if rule.mirrored else None
        if limit is None:  # turned back, a mirrored schedule adds the same times up in another order
            limit = loosen(slowest) if mirror else slowest
        made = (mirror or self.dispatcher).dispatch(rules, limit)
        if made.makespan < slowest and all(made.makespan != other.makespan for other, _ in self.best):
            self.best = sorted([*self.best, (made, rule)], key=lambda entry: entry[0].makespan)[: self.kept]
        return made.makespan

    def _fixed(self) -> list[AdmissionRule]:
        """No windows: ranks of directions and models, and both models at one pace."""
        weights = [self._ranks(direction, way) for direction in (0, 1) for way in range(4)]
        mirrored = (False,) if any(pipeline.split for pipeline in self.pipelines) else (False, True)
        return [AdmissionRule(row, self.dispatcher.any_window, -1, 0.0, side) for row in weights for side in mirrored]

    def _ranks(self, backward_first: int, way: int) -> np.ndarray:
        """Turns by model, then by direction (the larger model first, or last), the other way round, or no model."""
        size = np.zeros(len(self.dispatcher.graph.problem.models))
        size[self.large] = (-1, 1, -1, 0)[way]
        model, kind = (1, 3) if way >= 2 else (3, 1)
        weights = np.zeros((len(size), 5))
        weights[:, 0] = model * size
        weights[:, 2] = 0.01
        weights[:, 3] = -kind if backward_first else kind
        weights[:, 4] = kind if backward_first else 2 * kind
        return weights

    def _aims(self) -> np.ndarray:
        """Times that operations aim at, drawn for each model."""
        draw, rows = self.random.choice, []
        bonus = draw(BACKWARD_BONUSES) * self.mean
        for _ in self.dispatcher.graph.problem.models:
            rows.append((draw(PHASES), draw(STRETCHES), draw(PACES), -bonus, bonus))
        return np.array(rows, float)

    def _weights(self) -> np.ndarray:
        return self._aims() if self.random.random() < 0.4 else self._ranks(*divmod(self.random.randrange(8), 4))

    def _drawn(self) -> AdmissionRule:
        """A window and a shape of it for the largest model and for the others, and the rest."""
        draw, windows = self.random.choice, []
        drawn = {large: (draw(self._sizes(large)), draw((0, 1))) for large in (True, False)}
        for pipeline, model in zip(self.pipelines, self.model_of):
            size, proportional = drawn[model == self.large]
            behind = np.arange(pipeline.stages, 0, -1)
            row = np.ceil(size * behind / pipeline.stages - 1e-9) if proportional else np.minimum(size, behind)
            windows.append(np.maximum(1, row))
        window = np.concatenate(windows).astype(np.int64)
        mirrored = self.mirror is not None and draw((True, False))
        return AdmissionRule(self._weights(), window, self._reserved(), draw((0.0, 1.0)), mirrored)

    def _sizes(self, large: bool) -> list[int]:
        """Windows worth trying."""
        mine = [p for p, model in zip(self.pipelines, self.model_of) if (model == self.large) == large]
        pipeline: Pipeline = (mine or self.pipelines)[0]
        top = min(pipeline.microbatches, pipeline.stages + pipeline.stages // 2 + 2)
        return sorted({size for size in WINDOWS if size <= top} | {top, min(pipeline.stages, top)})

    def _reserved(self) -> int:
        return self.random.randrange(-1, len(self.dispatcher.graph.problem.models))

    def _climb(self, tries: int, enough: float) -> None:
        """Changes of one rule that are not much worse, and now and then another of the best."""
        made, rule, stuck = self.best[0][0].makespan, self.best[0][1], 0
        for _ in range(tries):
            changed = self._changed(rule)
            limit = made * (1 + NEARLY * self.random.random() ** 2)
            got = self._try(changed, limit)
            stuck = 0 if got < made else stuck + 1
            if got <= limit:
                made, rule = got, changed
            if reaches(self.best[0][0].makespan, enough):
                return
            if stuck > FRUITLESS:
                solution, rule = self.random.choice(self.best)
                made, stuck = solution.makespan, 0

    def _changed(self, rule: AdmissionRule) -> AdmissionRule:
        """Another window on a range of stages, or other turns, or both."""
        kind = self.random.random()
        if kind < 0.15:
            rule = rule._replace(weights=self._weights())
        elif kind < 0.5:
            rule = rule._replace(weights=self._nudged(rule.weights))
            if kind > 0.2:
                return rule
        elif kind > 0.985:
            rule = rule._replace(reserved=self._reserved())
        elif kind > 0.97:
            rule = rule._replace(patience=self.random.choice((0.0, 0.5, 1.0)))
        p = self.random.randrange(len(self.pipelines))
        alone, stages = self.random.random() < 0.4, self.pipelines[p].stages
        low, high = sorted((self.random.randrange(stages), self.random.randrange(stages)))
        if self.random.random() < 0.3:
            low, high = 0, stages - 1
        step, window = self.random.choice((-2, -1, -1, 1, 1, 2)), np.minimum(rule.window, self.most)
        for q, model in enumerate(self.model_of):
            if q == p or (not alone and model == self.model_of[p]):
                first = self.dispatcher.stages.first[q]
                some = slice(first + low, first + min(high + 1, self.pipelines[q].stages))
                window[some] = np.clip(window[some] + step, 1, self.most[some])
        return rule._replace(window=window)

    def _nudged(self, weights: np.ndarray) -> np.ndarray:
        """One of the weights changed by a little."""
        weights, model, which = weights.copy(), self.random.randrange(len(weights)), self.random.randrange(4)
        if which == 1:
            weights[model, 1] *= math.exp(self.random.gauss(0, 0.3))
        elif which == 3:
            change = self.random.gauss(0, 2) * self.mean
            weights[:, 3] -= change
            weights[:, 4] += change
        else:
            weights[model, which] += self.random.gauss(0, 0.05 if which == 0 else 0.1)
        return weights


def _features(graph: OperationGraph, work: float) -> np.ndarray:
    """float64[operations, 5]: 1, the plain time until its micro-batch comes to it, the share of its pipeline's
    micro-batches before, whether it is a B, whether it is a W; the time in shares of `work`."""
    features = np.zeros((graph.size, 5))
    upstream, lag, duration = graph.upstream.tolist(), graph.lag.tolist(), graph.duration.tolist()
    features[:, 0] = 1
    for lane in graph.lanes:
        mine, o, way = slice(lane.first, lane.first + lane.microbatches), lane.first, 0.0
        while (source := upstream[o]) >= 0:
            way += (lag[o] + duration[source]) / work
            o = source
        features[mine, 1] = way
        features[mine, 2] = np.arange(lane.microbatches) / lane.microbatches
        features[mine, 3:] = lane.kind is Kind.B, lane.kind is Kind.W
    return features


def reached_by_rule(problem: FusionProblem, tries: int, seed: int = 1, enough: float = 0.0) -> Solution:
    """The fastest schedule within the caps that so many decodes find: the same for the same seed, on every machine.

    It takes some milliseconds a decode of 8,192 operations, and ends early at a makespan of `enough`. The caps leave
    room for one micro-batch at a time (`builders.check_caps`).
    """
    return AdmissionRules(Dispatcher(build_graph(problem)), str(seed), kept=1).search(tries, enough)[0]
