"""Scoring on paper: the packs, the streamed samples, and the workers that draw them.

A freed instance begins to load the weights when it joins, another worker when it has drawn its first pack, which is
scored while they come in: model i scores as soon as it is there. Whoever is free draws the next pack of the samples
known at the trigger, in order; then what has been streamed, several samples together where several wait. Of several
that are free, one that has its weights comes first, then the lower instance.

    joins    |w1|w2|w3|             w: weights of a model, s: that model scores the pack
    first pack  |s1|s2 |s3|  then packs of its own, without loading

Knows nothing of generation: it is told when samples and workers come.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from rlhfuse.costs.analytic import CostModel
from rlhfuse.decisions.packing import scoring_packs, streamed_pack
from rlhfuse.simulator.instances import InstanceLimits
from rlhfuse.simulator.spans import Span


class ScoringDesk:
    """Work and workers; the clock is the caller's. `spans` and `batches` (end, samples) say what was done."""

    def __init__(self, known: Sequence[int], workers: int, limits: InstanceLimits) -> None:
        """`known`: tokens of the samples that are finished, to be packed for so many `workers`."""
        self.spans: list[Span] = []
        self.batches: list[tuple[float, int]] = []
        self._limits = limits
        packs = scoring_packs(known, workers, limits.score_tokens)
        self._packs = deque((sum(known[i] for i in pack), len(pack)) for pack in packs)
        self._streamed: deque[int] = deque()  # tokens
        self._coming: list[tuple[float, int]] = []  # heap of (seconds, instance): when a worker is free to draw
        self._free: list[tuple[bool, int]] = []  # heap of (must load first, instance) with nothing to draw
        self._joined: dict[int, float | None] = {}  # until its first pack: when a worker began to load, if it has
        self._scoring: set[int] = set()
        self._workers: set[int] = set()  # that have joined so far

    @property
    def next_seconds(self) -> float:
        """When the next worker is free to draw; infinite if none is at work or under way."""
        return self._coming[0][0] if self._coming else float("inf")

    @property
    def scores(self) -> bool:
        return bool(self._scoring)

    def join(self, seconds: float, instance: int, loads: bool) -> None:
        """A worker from `seconds` on; `loads`: at once, and not only when there is work for it."""
        self._joined[instance] = seconds if loads else None
        heapq.heappush(self._coming, (seconds, instance))

    def stream(self, tokens: int) -> None:
        """A sample that has just been finished."""
        self._streamed.append(tokens)

    def draw(self, now: float, costs: CostModel) -> None:
        """Let every worker that is free at `now` draw work, at `costs`."""
        while self._coming and self._coming[0][0] <= now:
            _, instance = heapq.heappop(self._coming)
            self._scoring.discard(instance)
            self._workers.add(instance)
            heapq.heappush(self._free, (instance in self._joined, instance))
        while self._free and (self._packs or self._streamed):
            tokens, samples = self._packs.popleft() if self._packs else self._take_streamed()
            _, instance = heapq.heappop(self._free)
            end = self._score(instance, now, tokens, samples, costs)
            self._scoring.add(instance)
            self.batches.append((end, samples))
            heapq.heappush(self._coming, (end, instance))

    def done_before(self, seconds: float) -> int:
        """Samples that were scored by then."""
        return sum(samples for end, samples in self.batches if end <= seconds)

    def _take_streamed(self) -> tuple[int, int]:
        samples = streamed_pack(self._streamed, len(self._workers), self._limits.score_tokens)
        return sum(self._streamed.popleft() for _ in range(samples)), samples

    def _score(self, instance: int, now: float, tokens: int, samples: int, costs: CostModel) -> float:
        seconds = costs.score_seconds(tokens, samples)
        if instance not in self._joined:
            self.spans.append(Span(instance, "score", now, now + seconds))
            return now + seconds
        loads_since = self._joined.pop(instance)
        begun = now if loads_since is None else loads_since
        ready, end = first_pack(begun, now, costs.swap_in_seconds(), seconds, self._limits.scoring_models)
        self.spans += [Span(instance, "swap_in", begun, ready), Span(instance, "score", max(now, ready), end)]
        return end


def first_pack(begun: float, now: float, load: float, work: float, models: int) -> tuple[float, float]:
    """(first model loaded, pack scored) where loading began at `begun` and the pack was drawn at `now`.

    The models share `load` and `work` evenly: the cost model knows only their sums.
    """
    end = now
    for model in range(1, models + 1):
        end = max(end, begun + model * load / models) + work / models
    return begun + load / models, end
