"""The simulator's oracle: generation and inference the slow way, every prefill and every decode step by itself.

It shares with the product only the functions that the runtime shares too (packs, plan, transfer order). Clocks are
exact where all costs are whole multiples of a power of two, so time lines can be compared with ==.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from rlhfuse.decisions.migration import UnfinishedSample, plan_at_threshold, transfer_order
from rlhfuse.decisions.packing import deal, scoring_packs, streamed_pack
from rlhfuse.simulator.instance_limits import fusion_limits


@dataclass
class Sample:
    number: int
    prompt: int
    output: int
    done: int = 0
    cached: bool = False

    @property
    def tokens(self) -> int:
        return self.prompt + self.done


@dataclass
class Place:
    """An instance: decodes until it is freed or empty, then it is a worker."""

    waiting: list[Sample]
    running: list[Sample] = field(default_factory=list)
    busy_until: float = 0.0  # end of its step, its hand-overs or its pack
    role: str = "decodes"  # decodes, stopping, joins, scores or free
    kept_out: bool = False  # nothing is admitted after a preemption until a sample ends
    all_admitted: float | None = None
    loads_from: float | None = None
    early_from: float | None = None  # when it begins to load those models that come early
    new: bool = False  # has scored no pack


class StepByStep:
    def __init__(self, lengths, instances, costs, limits, threshold):
        pairs = list(zip(lengths.prompt, lengths.output))
        edges = [len(pairs) * i // instances for i in range(instances + 1)]
        self.places = [
            Place([Sample(i, *pairs[i]) for i in range(first, last)]) for first, last in zip(edges, edges[1:])
        ]
        self.lengths, self.costs, self.limits, self.threshold = lengths, costs, limits, threshold
        self.tokens = [limits.padded_score_tokens or sum(pair) for pair in pairs]
        self.ended: dict[int, float] = {}
        self.begun_at = {sample.number: i for i, place in enumerate(self.places) for sample in place.waiting}
        self.told: set[int] = set()
        self.stopping, self.met = False, False  # for the migration; whether it has been
        self.packs, self.stream = [], []
        self.scored: list[tuple[float, int]] = []
        self.spans: list[tuple[int, str, float, float]] = []  # (instance, kind, start, end)
        self.plan = None

    def run(self) -> StepByStep:
        now, steps = 0.0, 0
        while now < math.inf:
            for place in self.places:
                if place.role == "scores" and place.busy_until <= now:
                    place.role = "free"
            self.tell(now)
            self.trigger(now)
            if not self.finished_serially(now):
                self.draw(now)
            for place in self.places:
                while place.role == "decodes" and place.busy_until <= now and (place.running or place.waiting):
                    self.step(place, now)
            now = min((p.busy_until for p in self.places if p.busy_until > now), default=math.inf)
            steps += 1
            assert steps < 100_000
        rewarded = self.rewarded()
        self.total = max([*self.ended.values(), *(end for end, _ in self.scored), *rewarded.values()])
        for i, end in rewarded.items():
            own = max(span[3] for span in self.spans if span[0] == i)
            self.spans.append((i, "reward", max(own, *self.ended.values()), end))
        return self

    def rewarded(self) -> dict[int, float]:
        """When the reward function is done with what an instance began: a sample goes to the worker free first."""
        if not (cost := self.costs.reward_call()):
            return {}
        free = [[0.0] * self.limits.reward_workers * cost.at_once for _ in self.places]
        ends = {}
        for end, number in sorted((end, number) for number, end in self.ended.items()):
            workers = free[i := self.begun_at[number]]
            ends[i] = max(end, heapq.heappop(workers)) + cost.seconds  # all take equally long: the last is done last
            heapq.heappush(workers, ends[i])
        return ends

    def step(self, place: Place, now: float) -> None:
        """One prefill, one preemption or one decode step."""
        lim, costs = self.limits, self.costs
        admitted, context = [], 0
        while place.waiting and len(place.running) < lim.max_sequences and not place.kept_out:
            context = sum(s.tokens for s in place.running) if not admitted else context + admitted[-1][1]
            first = place.waiting[0]
            if place.running and context + first.tokens + len(place.running) + 1 > lim.kv_capacity_tokens:
                break
            place.running.append(place.waiting.pop(0))
            whole = first.tokens
            first.done += not first.cached
            admitted.append((first, first.tokens, 0 if first.cached else whole))
            first.cached = False
        if admitted:
            fresh = [tokens for _, _, tokens in admitted if tokens]
            place.busy_until = now + (costs.prefill_seconds(sum(fresh), len(fresh)) if fresh else 0.0)
            if place.all_admitted is None and not place.waiting:
                place.all_admitted = place.busy_until
            self.retire(place)
            return
        context = sum(s.tokens for s in place.running)
        if context + len(place.running) > lim.kv_capacity_tokens and len(place.running) > 1:
            place.waiting.insert(0, place.running.pop())
            place.kept_out = True
            return
        place.busy_until = now + costs.decode_step_seconds(len(place.running), context)
        for sample in place.running:
            sample.done += 1
        self.retire(place)

    def retire(self, place: Place) -> None:
        for sample in [s for s in place.running if s.done == s.output]:
            place.running.remove(sample)
            place.kept_out = False
            self.ended[sample.number] = place.busy_until

    def remaining(self, now: float) -> int:
        return len(self.lengths) - sum(end <= now for end in self.ended.values())

    def tell(self, now: float) -> None:
        """Stream what ended by now; a destination without samples becomes a worker."""
        if not self.met:
            return
        for number, end in sorted(self.ended.items(), key=lambda one: (one[1], one[0])):
            if end <= now and number not in self.told:
                self.told.add(number)
                self.stream.append(self.tokens[number])
        for i, place in enumerate(self.places):
            decoding = place.role in ("decodes", "stopping")
            if decoding and not place.running and not place.waiting and place.busy_until <= now:
                self.spans.append((i, "generate", place.early_from, place.busy_until))
                self.join(place, now + self.costs.release_seconds())

    def join(self, place: Place, seconds: float) -> None:
        place.role, place.busy_until, place.new = "joins", seconds, True

    def trigger(self, now: float) -> None:
        if self.met or not self.threshold or len(self.places) < 2:
            return
        all_left = self.threshold >= len(self.lengths)
        if not self.stopping and (now > 0 if all_left else self.remaining(now) <= self.threshold):
            self.stopping = True
            for place in self.places:
                place.role = "stopping"
        if self.stopping and all(place.busy_until <= now for place in self.places):
            self.meet(now)

    def meet(self, now: float) -> None:
        self.threshold, threshold = 0, self.threshold
        lim, states, free = self.limits, [], []
        for i, place in enumerate(self.places):
            states += [UnfinishedSample(s.number, i, s.tokens, s.tokens - 1) for s in place.running]
            states += [UnfinishedSample(s.number, i, s.tokens, s.cached * (s.tokens - 1)) for s in place.waiting]
            held = [*place.running, *(s for s in place.waiting if s.cached)]
            blocks = sum(-(-(s.tokens - 1) // lim.block_tokens) for s in held)
            free.append(max(0, lim.kv_capacity_tokens // lim.block_tokens - blocks))
            place.role = "decodes"
        if not states:
            return
        self.plan = plan = plan_at_threshold(threshold, states, free, fusion_limits(self.costs, lim))
        for i, place in enumerate(self.places):
            self.spans.append((i, "generate", 0.0, place.busy_until))
            self.spans.append((i, "meet", now, now + self.costs.barrier_seconds()))
        now += self.costs.barrier_seconds()
        until = dict.fromkeys(range(len(self.places)), now)
        for source, target in transfer_order(plan):
            tokens = sum(one.kv_tokens for one in plan.moves if (one.source, one.destination) == (source, target))
            seconds = self.costs.migration_seconds(tokens * lim.kv_bytes_per_token) if tokens else 0.0
            until[source] = until[target] = max(until[source], until[target]) + seconds
        samples = {s.number: s for i in plan.freed for s in (*self.places[i].running, *self.places[i].waiting)}
        for one in plan.moves:
            samples[one.sample_id].cached = one.mode == "kv"
            self.places[one.destination].waiting.append(samples[one.sample_id])
        self.met = True
        self.told = {number for number, end in self.ended.items() if end <= now}
        known = [self.tokens[number] for number in sorted(self.told)]
        packs = scoring_packs(known, len(self.places), lim.score_tokens)
        self.packs = [[known[i] for i in pack] for pack in packs]
        for i in plan.freed:
            self.places[i].running, self.places[i].waiting = [], []
        for i, place in enumerate(self.places):
            self.spans.append((i, "migrate", now, until[i]))
            place.busy_until = place.early_from = until[i]
            if not place.running and not place.waiting:
                self.join(place, until[i] + self.costs.release_seconds())
                place.early_from = None
                if i in plan.freed:
                    place.loads_from = place.busy_until

    def draw(self, now: float) -> None:
        ready = [i for i, p in enumerate(self.places) if p.role in ("free", "joins") and p.busy_until <= now]
        for i in sorted(ready, key=lambda i: (self.places[i].new, i)):
            if self.packs:
                pack = self.packs.pop(0)
            elif self.stream:
                here = [p for p in self.places if p.role in ("scores", "free", "joins")]
                here = [p for p in here if p.role != "joins" or p.busy_until <= now]
                count = streamed_pack(self.stream, sum(self.stream), len(here), self.limits.score_tokens)
                pack, self.stream = self.stream[:count], self.stream[count:]
            else:
                return
            self.places[i].role = "scores"
            self.places[i].busy_until = self.score(i, now, pack)

    def score(self, i: int, now: float, pack: list[int]) -> float:
        """Model after model; on a worker that still loads, each as soon as it is there."""
        place, costs, models = self.places[i], self.costs, self.limits.scoring_models
        there, clock, load = [now] * models, now, costs.swap_in_seconds() / models
        if place.new:
            begun = now if place.loads_from is None else place.loads_from
            there, early = [], self.limits.early_models
            for model in range(models):
                early_load = model < early and place.early_from is not None and place.early_from <= begun
                before = there[-1] if there else 0.0
                there.append(max(before, place.early_from if early_load else begun) + load)
            self.spans.append((i, "swap_in", begun, there[0]))
        for ready in there:
            clock = max(clock, ready) + costs.score_seconds(sum(pack), len(pack)) / models
        self.spans.append((i, "score", max(now, there[0]), clock))
        place.new = False
        self.scored.append((clock, len(pack)))
        return clock

    def finished_serially(self, now: float) -> bool:
        """Without a migration: when all is generated, deal the samples and score them."""
        if self.met or self.scored or self.remaining(now):
            return False
        for i, share in enumerate(deal(self.tokens, len(self.places))):
            place, agreed = self.places[i], now + self.costs.barrier_seconds()
            self.spans += [(i, "generate", 0.0, place.busy_until), (i, "meet", now, agreed)]
            clock = place.loads_from = agreed + self.costs.release_seconds()
            place.new, place.early_from = True, place.all_admitted or 0.0
            own = [self.tokens[n] for n in share]
            for pack in scoring_packs(own, 1, self.limits.score_tokens):
                clock = self.score(i, clock, [own[n] for n in pack])
        return True
