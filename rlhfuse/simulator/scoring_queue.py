"""The scoring queue simulated: packs, streamed samples, the workers that pull them; and calls of a reward function.

joins       |w1|w2|w3|          w: weights of a model, s: that model scores the pack; the first may be there early
first pack     |s1|s2 |s3|      then packs of its own, without loading
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from rlhfuse.costs.cost_model import CostModel
from rlhfuse.decisions.packing import scoring_packs, streamed_pack
from rlhfuse.simulator.instances import InstanceLimits, InstanceSpan


class SimulatedScoringQueue:
    """Work and workers; the clock is the caller's. `spans` and `batches` (end, samples) say what was done.

    A freed instance begins to load the weights when it registers, another worker when it has pulled its first pack,
    which is scored while they come in, but for models that it has begun to load while it decoded. Whoever is free pulls
    the next pack of the samples finished at the barrier, in order; then what has been streamed, several samples
    together where several wait. Of several that are free, one that has its weights comes first, then the lower
    instance.
    """

    def __init__(self, known: Sequence[int], workers: int, limits: InstanceLimits) -> None:
        """`known`: tokens of the samples that are finished, to be packed for so many `workers`."""
        self.spans: list[InstanceSpan] = []
        self.batches: list[tuple[float, int]] = []
        self._limits = limits
        packs = scoring_packs(known, workers, limits.score_tokens)
        self._packs = deque((sum(known[i] for i in pack), len(pack)) for pack in packs)
        self._streamed: deque[int] = deque()  # tokens
        self._coming: list[tuple[float, int]] = []  # heap of (seconds, instance): when a worker is free to pull
        self._free: list[tuple[bool, int]] = []  # heap of (must load first, instance) with nothing to pull
        self._new: dict[int, float | None] = {}  # until its first pack: when a worker began to load, if it has
        self._early: dict[int, float] = {}  # when it began to load the first `early_models`
        self._workers: set[int] = set()  # that have joined so far

    @property
    def next_seconds(self) -> float:
        """When the next worker is free to pull; infinite if none is at work or under way."""
        return self._coming[0][0] if self._coming else float("inf")

    def register(self, seconds: float, instance: int, loads: bool, decoded_since: float | None = None) -> None:
        """A worker from `seconds` on; `loads`: at once, and not only when there is work for it.

        `decoded_since`: when it began to decode the tail, and to load what may come early.
        """
        self._new[instance] = seconds if loads else None
        if decoded_since is not None:
            self._early[instance] = decoded_since
        heapq.heappush(self._coming, (seconds, instance))

    def put(self, tokens: int) -> None:
        """A sample that has just been finished."""
        self._streamed.append(tokens)

    def pull(self, now: float, costs: CostModel) -> None:
        """Let every worker that is free at `now` pull work, at `costs`."""
        while self._coming and self._coming[0][0] <= now:
            _, instance = heapq.heappop(self._coming)
            self._workers.add(instance)
            heapq.heappush(self._free, (instance in self._new, instance))
        while self._free and (self._packs or self._streamed):
            tokens, samples = self._packs.popleft() if self._packs else self._take_streamed()
            _, instance = heapq.heappop(self._free)
            end = self._score(instance, now, tokens, samples, costs)
            self.batches.append((end, samples))
            heapq.heappush(self._coming, (end, instance))

    def _take_streamed(self) -> tuple[int, int]:
        samples = streamed_pack(self._streamed, len(self._workers), self._limits.score_tokens)
        return sum(self._streamed.popleft() for _ in range(samples)), samples

    def _score(self, instance: int, now: float, tokens: int, samples: int, costs: CostModel) -> float:
        seconds = costs.score_seconds(tokens, samples)
        if instance not in self._new:
            self.spans.append(InstanceSpan(instance, "score", now, now + seconds))
            return now + seconds
        loads_since = self._new.pop(instance)
        begun = now if loads_since is None else loads_since
        models, early = self._limits.scoring_models, self._early.pop(instance, begun)
        sooner = self._limits.early_models if early < begun else 0
        ready, end = first_pack(begun, now, costs.swap_in_seconds(), seconds, models, sooner, early)
        self.spans += [
            InstanceSpan(instance, "swap_in", begun, ready),
            InstanceSpan(instance, "score", max(now, ready), end),
        ]
        return end


def last_reward_seconds(ends: Sequence[float], costs: CostModel, limits: InstanceLimits) -> float:
    """When the reward function is done with what one instance began, which ends at `ends`, ascending; 0 without.

    All calls take equally long, so with c of them at once a sample has the worker of the c-th sample before it.
    """
    call = costs.reward_call()
    if not (call and limits.reward_workers):
        return 0.0
    at_once, last = limits.reward_workers * call.at_once, len(ends) - 1
    return max((end + call.seconds * ((last - i) // at_once + 1) for i, end in enumerate(ends)), default=0.0)


def first_pack(
    begun: float, now: float, load: float, work: float, models: int, sooner: int = 0, since: float = 0.0
) -> tuple[float, float]:
    """(first model loaded, pack scored): loading began at `begun`, the pack came at `now`; models share evenly.

    The first `sooner` of them have been loaded `since` then, and the others follow, not before `begun`.
    """
    then = max(begun, since + sooner * load / models) if sooner else begun
    ready = [since + model * load / models for model in range(1, sooner + 1)]
    ready += [then + model * load / models for model in range(1, models - sooner + 1)]
    end = now
    for there in ready:
        end = max(end, there) + work / models
    return ready[0], end
