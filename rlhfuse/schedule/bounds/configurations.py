"""A lower bound of memory and time together: what a node can hold at once, in whole micro-batches.

At any moment a node holds a *configuration*: so many micro-batches of each kind as fit its cap together. Each is held
for at least its round trip, so the least time in which configurations give every kind its holds, a linear program, lies
between the least head and the least tail. Prices of the kinds that no configuration exceeds prove it: they are scaled
down until none does, whatever floats have made of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlhfuse.schedule.bounds.window_rules import SLACK
from rlhfuse.schedule.ir.evaluate import loosen
from rlhfuse.schedule.ir.problem import FusionProblem

MOST_CONFIGURATIONS = 3_000  # of a node; where there are more, its memory need not be held in whole numbers
MOST_EXCHANGES = 200  # stopping early proves less, never something false
WORTH_AN_EXCHANGE = 1e-9  # of a configuration's time, that its price is above it


class Kind(NamedTuple):
    """What a node holds of a stage: `count` micro-batches, each `size` for at least `length`, none of them before
    `head` nor later than `tail` before the end."""

    count: int
    size: float
    length: float
    head: float
    tail: float


def configurations_bound(problem: FusionProblem, least: float = 0.0) -> float:
    """A time that no schedule within the problem's memory cap beats, if `least` is one: that, where no cap binds.

    A micro-batch of every stage by itself fits its node.
    """
    if problem.memory_cap is not None:
        for node, kinds in enumerate(_kinds(problem)):
            least = _least_makespan(kinds, loosen(problem.node_cap(node)), least)
    return least


def _kinds(problem: FusionProblem) -> list[list[Kind]]:
    """Kinds of every node. A split backward holds from F to B the activation, and then to W what W needs."""
    rows: list[list[Kind]] = [[] for _ in range(problem.nodes)]
    for pipeline in problem.pipelines:
        hops = sum(a != b for a, b in zip(pipeline.placement, pipeline.placement[1:]))
        whole = sum(pipeline.forward) + sum(pipeline.backward) + 2 * hops * problem.transfer
        before, after, last = 0.0, 0.0, pipeline.placement[0]
        for stage, node in enumerate(pipeline.placement):
            hop, last = problem.transfer if node != last else 0, node
            before, after = before + hop, after + hop
            count, size, later = pipeline.microbatches, pipeline.activation[stage], pipeline.held_for_weights[stage]
            early = pipeline.backward[stage] if later > size else 0  # then B takes it when it starts
            length = whole - before - after - early
            rows[node].append(Kind(count, size, length, before, after + early))
            if pipeline.weight_gradient is not None:
                rows[node].append(Kind(count, later, early + pipeline.weight_gradient[stage], before + length, 0.0))
            before, after = before + pipeline.forward[stage], after + pipeline.backward[stage]
    return rows


def _least_makespan(kinds: Sequence[Kind], room: float, least: float) -> float:
    """The same of a node with so much room: the most that some kinds with no less than one's tail need."""
    kinds = [kind for kind in kinds if kind.size]
    if sum(kind.count * kind.size for kind in kinds) <= room:
        return least
    for tail in {kind.tail for kind in kinds}:
        least = max(least, _least_span([kind for kind in kinds if kind.tail >= tail], room, least))
    return least


def _least_span(kinds: Sequence[Kind], room: float, least: float) -> float:
    """Least head, least time of configurations, least tail; something smaller where it is no more than `least`."""
    ends = min(kind.head for kind in kinds) + min(kind.tail for kind in kinds)
    needs = np.array([kind.count * kind.length for kind in kinds])
    return ends + float(needs @ _prices(kinds, needs, room, least - ends)) * (1 - SLACK)


def _prices(kinds: Sequence[Kind], needs: np.ndarray, room: float, enough: float) -> np.ndarray:
    """float64[kinds], of a micro-batch held for a unit of time: no configuration holds more than 1, and `needs`, the
    time of each kind in all, are worth as much as can be, or less where that is no more than `enough`. The simplex
    method, with as many columns as kinds."""
    sizes, most = np.array([k.size for k in kinds]), [max(1, min(k.count, int(room // k.size))) for k in kinds]
    choices = [count + 1 for count in most[:-1]]
    if math.prod(choices) > MOST_CONFIGURATIONS or (needs / most).sum() <= enough:
        return sizes / room
    fitting = np.indices(choices).reshape(len(choices), math.prod(choices)).T
    left = room - fitting @ sizes[:-1]
    last = np.minimum(most[-1], left[left >= 0] // sizes[-1])
    # A configuration takes time; holding a kind for longer than it needs, which evens out what is too much, takes none.
    columns = np.vstack([np.column_stack([fitting[left >= 0], last]), -np.eye(len(kinds))])
    times = np.repeat([1.0, 0.0], [len(last), len(kinds)])
    basis, taken = np.diag(most).astype(float), np.ones(len(kinds))
    prices = 1 / np.array(most)
    for _ in range(MOST_EXCHANGES):
        gains = columns @ prices - times
        best = int(gains.argmax())
        lengths, rates = np.linalg.solve(basis, np.column_stack([needs, columns[best]])).T
        if gains[best] <= WORTH_AN_EXCHANGE or rates.max() <= WORTH_AN_EXCHANGE or lengths @ taken <= enough:
            break
        leaving = np.where(rates > WORTH_AN_EXCHANGE, lengths / np.maximum(rates, WORTH_AN_EXCHANGE), np.inf).argmin()
        basis[:, leaving], taken[leaving] = columns[best], times[best]
        prices = np.linalg.solve(basis.T, taken)
    prices = np.maximum(prices, 0)
    return prices / max(1.0, float((columns @ prices).max()))
