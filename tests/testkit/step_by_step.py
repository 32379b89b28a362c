"""The simulator's oracle: generation and inference the slow way, every prefill and every decode step by itself.

It shares with the product only the functions that the runtime shares too (packs, plan, transfer order). Clocks are
exact where all costs are whole multiples of a power of two, so time lines can be compared with ==.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace

from run_report.timeline import simulate_gen_infer

from rlhfuse.costs.fits import Line
from rlhfuse.costs.measured import MeasuredCost
from rlhfuse.costs.table import RewardCost
from rlhfuse.decisions.migration import UnfinishedSample, plan_at_threshold, transfer_order
from rlhfuse.decisions.packing import deal, scoring_packs, streamed_pack
from rlhfuse.simulator.lengths import Turn

TICK = 2.0**-20  # all costs are whole multiples of it, so every sum of them is exact


def exact_costs(swap_in: int, per_token: int, reward: int = 0, at_once: int = 1, release: int | None = None):
    file = MeasuredCost(
        decode=Line(10000 * TICK, (1000 * TICK, 2 * TICK)),
        prefill=Line(2048 * TICK, (128 * TICK, 0.0)),
        score=Line(4096 * TICK, (per_token * TICK, 64 * TICK)),
        migration=Line(1024 * TICK, (TICK,)),
        swap_in=swap_in * TICK,
        meeting=3072 * TICK,
        release=(swap_in // 2 if release is None else release) * TICK,
        reward=RewardCost(reward * TICK, at_once) if reward else None,
    )
    return file.table


def both(lengths, instances, costs, lim, threshold):
    """The time line and what takes every step; they must agree."""
    threshold = min(threshold, len(lengths))
    line = simulate_gen_infer(lengths, instances, costs, lim, threshold)
    slow = StepByStep(lengths, instances, costs, lim, threshold).run()
    assert line.plan == slow.plan
    assert dict(enumerate(line.sample_seconds)) == slow.ended
    assert line.total_seconds == slow.total
    spans = [(span.instance, span.kind, span.start, span.end) for span in line.spans if span.kind != "idle"]
    assert sorted(spans) == sorted(span for span in slow.spans if span[2] < span[3])
    assert sum(count for _, count in slow.scored) == len(lengths)
    scored = max([*slow.ended.values(), *(end for end, _ in slow.scored)])
    assert line.reward_seconds == slow.total - scored
    assert line.scored_before_generation_end == sum(
        count for end, count in slow.scored if end <= line.generation_seconds and line.plan
    )
    return line


@dataclass
class Sample:
    number: int
    prompt: int
    turns: list[Turn]  # the running one and those behind it
    output: int = 0  # tokens of the response when its turn ends
    done: int = 0
    cached: bool = False
    kept: int = 0  # tokens in the cache while it does not run
    resumes: float = 0.0
    resumed: bool = False

    def __post_init__(self) -> None:
        self.output = self.turns[0].drawn

    @property
    def tokens(self) -> int:
        return self.prompt + self.done


@dataclass
class Place:
    """An instance: decodes until it is freed or empty, then it is a worker."""

    waiting: list[Sample]
    running: list[Sample] = field(default_factory=list)
    pausing: list[Sample] = field(default_factory=list)
    busy_until: float = 0.0  # end of its step, its hand-overs or its pack
    role: str = "decodes"  # decodes, stopping, joins, scores or free
    kept_out: bool = False  # nothing is admitted after a preemption until a sample ends
    all_admitted: float | None = None
    loads_from: float | None = None
    early_from: float | None = None  # when it begins to load those models that come early
    new: bool = False  # has scored no pack

    @property
    def empty(self) -> bool:
        return not (self.waiting or self.running or self.pausing)

    def works(self, now: float) -> bool:
        """Whether anything runs, waits, or comes back now."""
        return bool(self.waiting or self.running) or any(s.resumes <= now for s in self.pausing)

    def next_time(self, now: float) -> float:
        """When something happens here next, after now."""
        times = [self.busy_until]
        if self.role == "decodes" and not self.running and not self.waiting:
            times += [sample.resumes for sample in self.pausing]
        return min((time for time in times if time > now), default=math.inf)


class StepByStep:
    def __init__(self, lengths, instances, costs, limits, threshold):
        pairs = list(zip(lengths.prompt, lengths.output))
        turns = lengths.turns or [(Turn(output, 0.0, 0),) for output in lengths.output]
        edges = [len(pairs) * i // instances for i in range(instances + 1)]
        self.places = [
            Place([Sample(i, lengths.prompt[i], list(turns[i])) for i in range(first, last)])
            for first, last in zip(edges, edges[1:])
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
                while place.role == "decodes" and place.busy_until <= now and place.works(now):
                    self.step(place, now)
            now = min(place.next_time(now) for place in self.places)
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
        if not (cost := self.costs.reward):
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
        self.resume(place, now)
        admitted, context = [], 0
        before, held = list(place.running), sum(s.tokens for s in place.running)
        beside = bool(before and place.waiting and place.waiting[0].resumed and not place.waiting[0].cached)
        while place.waiting and len(place.running) < lim.max_sequences and not place.kept_out:
            context = sum(s.tokens for s in place.running) if not admitted else context + admitted[-1][1]
            first = place.waiting[0]
            if place.running and context + first.tokens + len(place.running) + 1 > lim.kv_capacity_tokens:
                break
            place.running.append(place.waiting.pop(0))
            whole = first.tokens
            first.done += not first.cached
            admitted.append((first, first.tokens, 0 if first.cached else whole - first.kept))
            first.cached, first.kept = False, 0
        if admitted:
            fresh = [tokens for _, _, tokens in admitted if tokens]
            seconds = costs.prefill_seconds(sum(fresh), len(fresh)) if fresh else 0.0
            if beside:  # a step of those that decode, and what it takes longer
                least = costs.decode_step_seconds(1, 0)
                seconds = costs.decode_step_seconds(len(before), held) + max(0.0, seconds - least)
                for sample in before:
                    sample.done += 1
            place.busy_until = now + seconds
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

    def resume(self, place: Place, now: float) -> None:
        """Samples whose pause is over wait with what they have observed."""
        for sample in sorted((s for s in place.pausing if s.resumes <= now), key=lambda s: s.resumes):
            place.pausing.remove(sample)
            sample.done += sample.turns.pop(0).observed
            sample.output, sample.resumed = sample.done + sample.turns[0].drawn, True
            place.waiting.append(sample)

    def retire(self, place: Place) -> None:
        """Samples end, or pause; what runs takes the cache of those that don't, block by block."""
        idle, size = [*place.pausing, *place.waiting], self.limits.block_tokens
        while sum(s.tokens for s in place.running) + sum(s.kept for s in idle) > self.limits.kv_capacity_tokens:
            if not (first := next((s for s in idle if s.kept), None)):
                break
            first.kept -= size
        for sample in [s for s in place.running if s.done == s.output]:
            place.running.remove(sample)
            place.kept_out = False
            if len(sample.turns) > 1:
                sample.kept = (sample.tokens - 1) // size * size
                sample.resumes = place.busy_until + sample.turns[0].pause
                place.pausing.append(sample)
            else:
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
            if decoding and place.empty and place.busy_until <= now:
                self.spans.append((i, "generate", place.early_from, place.busy_until))
                self.join(place, now + self.costs.release)

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
            states += [UnfinishedSample(s.number, i, s.tokens, s.kept) for s in place.pausing]
            held = [*place.running, *(s for s in place.waiting if s.cached)]
            blocks = sum(-(-(s.tokens - 1) // lim.block_tokens) for s in held)
            free.append(max(0, lim.kv_capacity_tokens // lim.block_tokens - blocks))
            place.role = "decodes"
        if not states:
            return
        self.plan = plan = plan_at_threshold(threshold, states, free, replace(lim, move_cost=self.costs.move_cost(lim)))
        for i, place in enumerate(self.places):
            self.spans.append((i, "generate", 0.0, place.busy_until))
            self.spans.append((i, "meet", now, now + self.costs.meeting))
        now += self.costs.meeting
        until = dict.fromkeys(range(len(self.places)), now)
        for source, target in transfer_order(plan):
            tokens = sum(one.kv_tokens for one in plan.moves if (one.source, one.destination) == (source, target))
            seconds = self.costs.migration_seconds(tokens * lim.kv_bytes_per_token) if tokens else 0.0
            until[source] = until[target] = max(until[source], until[target]) + seconds
        for one in plan.moves:
            place, there = self.places[one.source], self.places[one.destination]
            sample = next(s for s in (*place.running, *place.waiting, *place.pausing) if s.number == one.sample_id)
            pauses = sample in place.pausing
            sample.cached, sample.kept = one.mode == "kv" and not pauses, one.kv_tokens if pauses else 0
            (there.pausing if pauses else there.waiting).append(sample)
        self.met = True
        self.told = {number for number, end in self.ended.items() if end <= now}
        known = [self.tokens[number] for number in sorted(self.told)]
        packs = scoring_packs(known, len(self.places), lim.score_tokens)
        self.packs = [[known[i] for i in pack] for pack in packs]
        for i in plan.freed:
            self.places[i].running, self.places[i].waiting, self.places[i].pausing = [], [], []
        for i, place in enumerate(self.places):
            self.spans.append((i, "migrate", now, until[i]))
            place.busy_until = place.early_from = until[i]
            if place.empty:
                self.join(place, until[i] + self.costs.release)
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
        there, clock, load = [now] * models, now, costs.swap_in / models
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
            place, agreed = self.places[i], now + self.costs.meeting
            self.spans += [(i, "generate", 0.0, place.busy_until), (i, "meet", now, agreed)]
            clock = place.loads_from = agreed + self.costs.release
            place.new, place.early_from = True, place.all_admitted or 0.0
            own = [self.tokens[n] for n in share]
            for pack in scoring_packs(own, 1, self.limits.score_tokens):
                clock = self.score(i, clock, [own[n] for n in pack])
        return True
