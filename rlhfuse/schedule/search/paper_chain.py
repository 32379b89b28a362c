"""The paper's search as it is written: the baseline that the project's own search is measured against.

Algorithm 1 anneals the makespan from the greedy schedule; Algorithm 2 draws a node and a place on it
uniformly and swaps two neighbours, until the result is valid; Algorithm 3 computes all times again:

    draw     node i, place j                                one `tried` move
    valid    the pair is not bound on the node; the order   one pass over all operations replays the
             has no cycle; the node is within its cap       schedule: it prices it or gets stuck
    accept   if rand < exp((e_current - e_neighbor) / T)    T <- alpha T on every valid neighbour

"Optimizing memory usage" repeats this from the best schedule with the peak memory as energy, refusing
neighbours that are slower. Where peaks are equal the sum of the nodes' peaks decides, as in the authors'
program. Chains are independent but for the best schedule, which the memory phase takes over from any
rank. When T <= eps before the time is over, the chain begins again with another random stream.

Read where the text leaves a choice: T falls on every iteration (text), not on accepted ones (Algorithm 1,
line 16); the annealing of the makespan ends early at its lower bound; C admits equality. The defaults of
`PaperSettings` are from the authors' program. Nothing else is improved.

Knows nothing of clocks, MPI or files. Paper: section 5.2, Algorithms 1-3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from rlhfuse.errors import InputError
from rlhfuse.schedule.ir.evaluate import TOLERANCE
from rlhfuse.schedule.ir.graph import OperationGraph
from rlhfuse.schedule.ir.objective import Goal, Incumbent, loosen
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.min_memory import one_at_a_time
from rlhfuse.schedule.search.anneal import uniform
from rlhfuse.schedule.search.heads_tails import Tables
from rlhfuse.schedule.search.paper_greedy import paper_greedy
from rlhfuse.schedule.search.sequence import Found, Round, hash_seed, node_peaks, sequence_of, tables_of

ROUND_OPERATIONS = 20_000_000  # replayed by a chain between two looks at the clock: about a tenth of a second


@dataclass(frozen=True)
class PaperSettings:
    """Temperatures in the problem's units of time (`t0`) and memory (`memory_t0`); `alpha` per iteration.

    A `t0` of None is the energy of the first schedule, as in the text. Raises InputError when out of range.
    """

    t0: float | None = 10.0  # authors' program: 10 to 200
    alpha: float = 0.999995  # authors' program: 0.999995 to 0.999997
    eps: float = 1e-12  # authors' program: 1e-12 to 1e-26
    memory_t0: float = 80.0  # authors' program: 80 to 1000

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise InputError(f"alpha={self.alpha} must be between 0 and 1, such as 0.999995")
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise InputError(f"eps={self.eps} must be above 0, such as 1e-12")
        for name, value in (("t0", self.t0), ("memory_t0", self.memory_t0)):
            if value is not None and not (value > self.eps and math.isfinite(value)):
                raise InputError(f"{name}={value} must be above eps={self.eps}, or there is nothing to anneal")


class PaperState(NamedTuple):
    """What annealing changes. `sequence` lists operations by node, then order; a price is (makespan, peak, sum)."""

    sequence: np.ndarray  # int64[n]
    current: np.ndarray  # float64[3], price of `sequence`; the last two are not kept when peaks play no part
    peak: np.ndarray  # float64[nodes], peak memory of `sequence` on each node
    best_sequence: np.ndarray  # int64[n], the paper's S*
    best: np.ndarray  # float64[3], its price
    random: np.ndarray  # uint64[1], never 0
    end: np.ndarray  # float64[n], scratch
    clock: np.ndarray  # float64[nodes], scratch
    cursor: np.ndarray  # int64[nodes], scratch
    awaited: np.ndarray  # int64[nodes], scratch
    stack: np.ndarray  # int64[nodes], scratch


class Law(NamedTuple):
    """What annealing obeys. Energies closer than `tick` (time) or `grain` (memory) are equal."""

    memory: bool  # the energy is the peak memory, not the makespan
    cap: np.ndarray  # float64[nodes]
    capped: bool  # whether any cap is finite
    enough: float  # a makespan up to this is not slower
    target: float  # no energy is below this
    alpha: float
    eps: float
    tick: float
    grain: float


@njit(cache=True)
def replay(t: Tables, w: PaperState) -> float:
    """Algorithm 3: the makespan of `w.sequence`, or -1 when it has a cycle.

    Nodes run in turn, each until the input of its next operation is missing; whoever computes that wakes
    it. Every operation is visited once, after all that it depends on.
    """
    nodes = len(t.first) - 1
    w.end[:] = -1.0
    for node in range(nodes):
        w.cursor[node], w.clock[node], w.awaited[node], w.stack[node] = t.first[node], 0.0, -1, node
    waiting, done, makespan = nodes, 0, 0.0
    while waiting > 0:
        waiting -= 1
        node = w.stack[waiting]
        i, now = w.cursor[node], w.clock[node]
        while i < t.first[node + 1]:
            o = w.sequence[i]
            source = t.upstream[o]
            if source >= 0:
                if w.end[source] < 0:
                    w.awaited[node] = source
                    break
                now = max(now, w.end[source] + t.lag[o])
            now += t.duration[o]
            w.end[o] = now
            i += 1
            for k in range(2):
                target = t.downstream[o, k]
                if target >= 0 and w.awaited[t.node[target]] == o:
                    w.awaited[t.node[target]] = -1
                    w.stack[waiting] = t.node[target]
                    waiting += 1
        done += i - w.cursor[node]
        w.cursor[node], w.clock[node] = i, now
        makespan = max(makespan, now)
    return makespan if done == len(w.sequence) else -1.0


@njit(cache=True)
def node_peak(t: Tables, sequence: np.ndarray, node: int) -> float:
    """Peak activation memory on a node."""
    level, peak = 0.0, 0.0
    for i in range(t.first[node], t.first[node + 1]):
        level += t.memory[sequence[i]]
        peak = max(peak, level)
    return peak


@njit(cache=True)
def set_price(t: Tables, w: PaperState) -> None:
    """Price `w.sequence`, which has no cycle, and make it the best."""
    w.current[0] = replay(t, w)
    for node in range(len(w.peak)):
        w.peak[node] = node_peak(t, w.sequence, node)
    w.current[1], w.current[2] = w.peak.max(), w.peak.sum()
    w.best[:], w.best_sequence[:] = w.current, w.sequence


@njit(cache=True)
def cool(t: Tables, w: PaperState, law: Law, draws: int, temperature: float):
    """Algorithm 1 for at most `draws` draws of Algorithm 2; ends early when frozen or at `law.target`.

    Returns (draws made, neighbours accepted, temperature).
    """
    nodes, accepted = len(t.first) - 1, 0
    which = 1 if law.memory else 0
    slack = law.grain if law.memory else law.tick
    price = np.zeros(3)
    for draw in range(draws):
        if temperature <= law.eps or w.best[which] <= law.target + slack:
            return draw, accepted, temperature
        node = int(uniform(w.random) * nodes)
        length = t.first[node + 1] - t.first[node]
        if length < 2:
            continue
        i = t.first[node] + int(uniform(w.random) * (length - 1))
        a, b = w.sequence[i], w.sequence[i + 1]
        if t.lane[a] == t.lane[b] or t.upstream[b] == a:
            continue
        w.sequence[i], w.sequence[i + 1] = b, a
        before = w.peak[node]
        price[0] = replay(t, w)
        if law.memory or law.capped:
            w.peak[node] = node_peak(t, w.sequence, node)
        if price[0] < 0 or w.peak[node] > law.cap[node]:
            w.sequence[i], w.sequence[i + 1], w.peak[node] = a, b, before
            continue
        cost = price[0] - w.current[0]
        better = price[0] < w.best[0] - law.tick
        allowed = True
        if law.memory:
            price[1], price[2] = w.peak.max(), w.peak.sum()
            allowed = price[0] <= max(w.current[0], law.enough) + law.tick
            cost = _memory_cost(price, w.current, law.grain)
            better = allowed and _memory_cost(price, w.best, law.grain) < -law.grain
        if better:
            w.best[:], w.best_sequence[:] = price, w.sequence
        if allowed and (cost <= 0 or np.exp(-cost / temperature) > uniform(w.random)):
            w.current[:] = price
            accepted += 1
        else:
            w.sequence[i], w.sequence[i + 1], w.peak[node] = a, b, before
        temperature *= law.alpha
    return draws, accepted, temperature


@njit(cache=True)
def _memory_cost(price: np.ndarray, other: np.ndarray, grain: float) -> float:
    """How much more memory `price` is than `other`: by the peak, at equal peaks by the sum of the nodes' peaks."""
    cost = price[1] - other[1]
    return cost if abs(cost) > grain else price[2] - other[2]


class PaperChain:
    """One rank's annealing as in the paper, cut into rounds; the interface is that of `chain.Chain`.

    The first of `starts` that fits the caps is S_0.
    """

    def __init__(
        self,
        graph: OperationGraph,
        goal: Goal,
        starts: list[Incumbent],
        seed: int,
        rank: int,
        settings: PaperSettings = PaperSettings(),
    ) -> None:
        self.graph, self.goal, self.settings = graph, goal, settings
        self.tables = tables_of(graph)
        self.first = next(entry for entry in starts if entry.fits())
        self.seed, self.rank = seed, rank
        self.runs = 0
        self.walk: PaperState | None = None
        self.law: Law | None = None
        self.temperature = 0.0

    def round(self, best: Incumbent, moves: int, share: float) -> Round:
        """Try at most `moves` swaps (at least 1) to beat `best`; the paper does not look at `share`, the clock."""
        wanted = self.goal.objective == "memory"  # whether there is a memory phase at all
        fast_enough = wanted and self.goal.fast_enough(best.timeline.makespan)
        if self._over() or (fast_enough and not self.law.memory):
            cooled = self.law is not None and not self.law.memory
            self._begin(best, memory=fast_enough or (wanted and cooled))
        draws = min(moves, max(1, ROUND_OPERATIONS // self.graph.size))
        tried, accepted, self.temperature = cool(self.tables, self.walk, self.law, draws, self.temperature)
        return Round(max(tried, 1), self._found(best), accepted)

    def _over(self) -> bool:
        """Whether the present run is frozen or has nothing left to gain."""
        if self.law is None:
            return True
        energy, slack = (self.walk.best[1], self.law.grain) if self.law.memory else (self.walk.best[0], self.law.tick)
        return self.temperature <= self.law.eps or energy <= self.law.target + slack

    def _begin(self, best: Incumbent, memory: bool) -> None:
        """Start a run: the makespan from S_0, or the memory from the best schedule."""
        self.runs += 1
        start = best if memory else self.first
        sequence = sequence_of(self.graph, start.schedule)
        self.walk = new_walk(sequence, self.graph.problem.nodes, hash_seed(self.seed, self.rank, self.runs))
        set_price(self.tables, self.walk)
        self.law = self._law(memory, start)
        wanted = self.settings.memory_t0 if memory else self.settings.t0
        self.temperature = float(self.walk.current[0]) if wanted is None else wanted

    def _law(self, memory: bool, start: Incumbent) -> Law:
        problem, makespan = self.graph.problem, start.timeline.makespan
        cap = np.array([loosen(problem.node_cap(node)) for node in range(problem.nodes)])
        return Law(
            memory=memory,
            cap=cap,
            capped=bool(np.isfinite(cap).any()),
            enough=float(self.goal.enough),
            target=float(self.goal.memory_bound(makespan) if memory else self.goal.enough),
            alpha=self.settings.alpha,
            eps=self.settings.eps,
            tick=min(TOLERANCE * float(makespan), float(self.graph.duration.min()) / 4),
            grain=TOLERANCE * float(start.timeline.peak_memory),
        )

    def _found(self, best: Incumbent) -> Found | None:
        """The run's best if it beats the incumbent."""
        makespan = float(self.walk.best[0])
        at, peak = (float(value) for value in self.goal.key(best.timeline))
        counts = max(makespan, self.law.enough)
        if counts > at + self.law.tick:
            return None
        found_peak = max(node_peaks(self.tables, self.walk.best_sequence))
        if counts >= at - self.law.tick and found_peak >= peak - self.law.grain:
            return None
        return Found(makespan, found_peak, self.walk.best_sequence.copy())


def paper_starts(problem: FusionProblem, start: Schedule | None = None) -> list[Incumbent]:
    """`start` if given, and the paper's greedy; where neither fits the caps, a schedule that needs the least."""
    made = [Incumbent.of(Schedule(problem, start.orders))] if start is not None else []
    made.append(Incumbent.of(paper_greedy(problem)))
    if not any(entry.fits() for entry in made):
        made.append(Incumbent.of(one_at_a_time(problem)))
    return sorted(made, key=lambda entry: not entry.fits())


def new_walk(sequence: np.ndarray, nodes: int, word: int) -> PaperState:
    """A walk that owns a copy of `sequence`, not yet priced; `word` seeds its random stream."""
    n = len(sequence)
    return PaperState(
        sequence=sequence.astype(np.int64),
        current=np.zeros(3),
        peak=np.zeros(nodes),
        best_sequence=np.zeros(n, np.int64),
        best=np.zeros(3),
        random=np.array([word or 1], np.uint64),
        end=np.zeros(n),
        clock=np.zeros(nodes),
        cursor=np.zeros(nodes, np.int64),
        awaited=np.zeros(nodes, np.int64),
        stack=np.zeros(nodes, np.int64),
    )
