"""Generation and inference of an iteration, serial or fused (paper section 4), compiled; for many R_t at once.

With R_t reached at time T (Figure 5):      0 ============T m ==================w s
= generate, m migrate, w weights in,        1 =========   T m w sssssss       ss
s score: the tail's samples are scored      2 =====       T m w ssssss       s
as they end                                 3 ===========.T m w sssssss
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from numba import njit

from rlhfuse.simulator.cost_numbers import score_seconds
from rlhfuse.simulator.instance_kernel import (
    GENERATE,
    IN_PLACE,
    MEET,
    MIGRATE,
    SCORE,
    SWAP_IN,
    copy,
    record,
    run,
    run_events,
    start,
)
from rlhfuse.simulator.migration_kernel import choose_destinations, deal_tail, in_order, mark_tail, transfer_tail
from rlhfuse.tasks.packing import dealt_to, pack_ends, streamed_pack

AT_ONCE = math.ulp(0.0)  # the moment at which all samples are unfinished is the end of the first step
OUTCOME = np.dtype(
    [(name, np.float64) for name in ("total", "generation", "migration", "agreed", "scored")], align=True
)


@njit(cache=True, error_model="numpy")
def gen_infer(b, c, thresholds, destinations, spans):
    """(OUTCOME by R_t, the last state); `thresholds` descend and have so many `destinations`.

    What is the same for all is simulated once: generation without a migration, and generation up to the last event
    before a trigger, which goes on from there as triggers come later and later. `spans` are of the last state.
    """
    outcomes, last, live = np.zeros(len(thresholds), OUTCOME), start(b, spans), start(b, spans)
    for k in range(b.instances):
        run(b, c, last.samples, last.instances[k], np.inf)
    ends = last.samples["ended"].copy()
    ends = ends[in_order(ends)]
    serial(b, c, last, ends[-1], outcomes[0])
    for n in range(1, len(thresholds)):
        outcomes[n] = outcomes[0]
    for n in range(len(thresholds)):
        remaining = thresholds[n]
        if remaining == 0 or b.instances < 2:
            continue
        moment = ends[-remaining - 1] if remaining < len(ends) else AT_ONCE
        for k in range(b.instances):
            run_events(b, c, live.samples, live.instances[k], moment)
        s = copy(live)
        for k in range(b.instances):
            run(b, c, s.samples, s.instances[k], moment)
        if mark_tail(s) > 0:
            fused(b, c, s, destinations[n], moment, outcomes[n])
            last = s
    return outcomes, last


@njit(cache=True, error_model="numpy")
def fused(b, c, s, count, moment, outcome):
    """From R_t on, reached at `moment`; every instance is at its first step boundary from there on.

    They meet, `count` of them keep the tail, and the others are freed: they score what is finished, and the tail as it
    ends. A destination joins them when its last sample has ended.
    """
    outcome.agreed = moment
    for k in range(b.instances):
        outcome.agreed = max(outcome.agreed, s.instances[k].clock)
    outcome.agreed += c.barrier
    for k in range(b.instances):
        stopped = s.instances[k].clock
        record(s, k, GENERATE, 0.0, stopped, 0)
        record(s, k, MEET, max(stopped, outcome.agreed - c.barrier), outcome.agreed, 0)  # until then it waits
    chosen, freed = choose_destinations(b, s, count)
    deal_tail(b, s, chosen, freed)
    transfer_tail(b, c, s, chosen, freed, outcome.agreed)
    outcome.migration = 0.0
    for k in range(b.instances):
        record(s, k, MIGRATE, outcome.agreed, s.instances[k].moved, 0)
        if s.instances[k].place >= 0:
            outcome.migration = max(outcome.migration, s.instances[k].moved - outcome.agreed)
            decode_tail(b, c, s, k)
    score_tail(b, c, s, outcome)
    outcome.total = reward(b, c, s, outcome.scored)


@njit(cache=True, error_model="numpy")
def serial(b, c, s, generation, outcome):
    """All is generated at `generation`; the samples are dealt by tokens, and every worker scores its share."""
    outcome.generation, outcome.agreed = generation, generation + c.barrier
    begin, outcome.scored, workers = outcome.agreed + c.release, outcome.agreed, b.instances // b.per_worker
    scored, _ = scored_tokens(b, b.longest_first)
    dealt, early = np.array(dealt_to(scored, workers)), np.zeros(workers)
    for k in range(b.instances):
        instance = s.instances[k]
        record(s, k, GENERATE, 0.0, instance.clock, 0)
        record(s, k, MEET, outcome.generation, outcome.agreed, 0)
        outcome.scored = max(outcome.scored, instance.clock)
        if not math.isnan(instance.all_admitted):
            early[k // b.per_worker] = max(early[k // b.per_worker], instance.all_admitted)
    for w in range(workers):
        instance = s.instances[w * b.per_worker]
        instance.loading, instance.early = begin, early[w]
        own, sums = scored_tokens(b, b.longest_first[dealt == w])
        clock, first = begin, 0
        for after in pack_ends(own, 1, b.score_tokens):
            clock = score_pack(b, c, s, w, clock, sums[after] - sums[first], after - first)
            first = after
        outcome.scored = max(outcome.scored, clock)
    outcome.total = reward(b, c, s, outcome.scored)


# ---- generation of the tail


@njit(**IN_PLACE)
def decode_tail(b, c, s, k):
    """A destination decodes what it holds to the end."""
    instance = s.instances[k]
    instance.clock, instance.last_ended = instance.moved, -1
    run(b, c, s.samples, instance, np.inf)
    if instance.last_ended >= 0:
        record(s, k, GENERATE, instance.moved, instance.clock, 0)


# ---- scoring


@njit(cache=True, error_model="numpy")
def score_tail(b, c, s, outcome):
    """From the barrier on: the worker that is free pulls the next pack of the samples finished there, longest first;
    then what the tail has streamed. Of several that are free, one that has its models comes first, then the lower."""
    unfinished = s.samples["tail"].copy()
    known, known_sums = scored_tokens(b, b.longest_first[~unfinished[b.longest_first]])
    tail = np.flatnonzero(unfinished)
    tail = tail[in_order(s.samples["ended"].copy()[tail])]
    streamed, sums = scored_tokens(b, tail)
    every = b.instances // b.per_worker
    packs = pack_ends(known, every, b.score_tokens)
    free = [0 for _ in range(0)]  # heap of workers; those that must load first are above all others
    coming, decoding = first_workers(b, c, s)
    workers = pack = first = taken = put = 0  # `taken`, `put`: of the tail
    outcome.generation = outcome.scored = now = outcome.agreed
    while now < np.inf:
        while len(coming) > 0 and coming[0][0] <= now:
            workers += join(b, s, heapq.heappop(coming)[1], free)
        while len(free) > 0 and (pack < len(packs) or taken < put):
            if pack < len(packs):
                count, tokens = packs[pack] - first, known_sums[packs[pack]] - known_sums[first]
                first, pack = packs[pack], pack + 1
            else:
                count = streamed_pack(streamed[taken:put], sums[put] - sums[taken], workers, b.score_tokens)
                tokens = sums[taken + count] - sums[taken]
                taken += count
            w = heapq.heappop(free) % every
            end = score_pack(b, c, s, w, now, tokens, count)
            outcome.scored = max(outcome.scored, end)
            heapq.heappush(coming, (end, w))
        now = coming[0][0] if len(coming) > 0 else np.inf
        if put < len(tail):
            now = min(now, s.samples[tail[put]].ended)
        while put < len(tail) and s.samples[tail[put]].ended <= now:
            sample = s.samples[tail[put]]
            instance, outcome.generation = s.instances[sample.at], sample.ended
            put += 1
            w = sample.at // b.per_worker
            decoding[w] -= tail[put - 1] == instance.last_ended
            if tail[put - 1] == instance.last_ended and decoding[w] == 0:
                moved, freed = worker_moved(b, s, w)
                heapq.heappush(coming, (max(sample.ended, moved) + c.release, w))
                if freed == 0:
                    s.instances[w * b.per_worker].early = moved
    outcome.scored = max(outcome.scored, outcome.generation)


@njit(cache=True, error_model="numpy")
def first_workers(b, c, s):
    """Heap of (seconds, worker): when those that have nothing to decode are free to score; and how many instances of
    each worker decode.

    A worker whose instances are all freed begins to load the models then, another one with its first pack.
    """
    coming, decoding = [(0.0, 0) for _ in range(0)], np.zeros(b.instances // b.per_worker, np.int64)
    for k in range(b.instances):
        decoding[k // b.per_worker] += s.instances[k].place >= 0 and s.instances[k].last_ended >= 0
    for w in range(len(decoding)):
        moved, freed = worker_moved(b, s, w)
        if decoding[w] == 0:
            heapq.heappush(coming, (moved + c.release, w))
        if freed == b.per_worker:
            s.instances[w * b.per_worker].loading = moved + c.release
    return coming, decoding


@njit(**IN_PLACE)
def worker_moved(b, s, w):
    """(end of the last transfer of a worker's instances, how many of them are freed)."""
    moved, freed = 0.0, 0
    for k in range(w * b.per_worker, (w + 1) * b.per_worker):
        moved = max(moved, s.instances[k].moved)
        freed += s.instances[k].place < 0
    return moved, freed


@njit(cache=True, error_model="numpy")
def join(b, s, w, free):
    """Worker w is free to pull; says whether it is for the first time."""
    instance = s.instances[w * b.per_worker]
    heapq.heappush(free, w if instance.loaded else w + b.instances // b.per_worker)
    new = not instance.scores
    instance.scores = True
    return new


@njit(**IN_PLACE)
def score_pack(b, c, s, w, now, tokens, samples):
    """When worker w has scored a pack that it pulls `now`; the first one while its models come in."""
    k = w * b.per_worker
    instance, work = s.instances[k], score_seconds(c, tokens, samples)
    begin, end = now, now + work
    if not instance.loaded:
        begun = now if math.isnan(instance.loading) else instance.loading
        ready, end = score_first_pack(b, begun, now, c.swap_in, work, instance.early)
        record(s, k, SWAP_IN, begun, ready, 0)
        begin, instance.loaded = max(now, ready), True
    record(s, k, SCORE, begin, end, samples)
    return end


@njit(**IN_PLACE)
def score_first_pack(b, begun, now, load, work, early):
    """(first model loaded, pack scored): loading began at `begun`, the pack came at `now`; models share evenly.

        joins       |w1|w2|w3|          w: weights of a model, s: that model scores the pack
        first pack     |s1|s2 |s3|

    The first `early_models` have been loaded from `early` on, if that is before, and the others follow.
    """
    models, sooner = b.models, b.early_models if early <= begun else 0
    then, ready, end = begun, np.nan, now
    if sooner:
        then = max(begun, early + sooner * load / models)
    for model in range(1, models + 1):
        there = early + model * load / models if model <= sooner else then + (model - sooner) * load / models
        ready = there if model == 1 else ready
        end = max(end, there) + work / models
    return ready, end


@njit(cache=True, error_model="numpy")
def scored_tokens(b, samples):
    """What scoring pays for each of `samples`, and for all before each and in all."""
    tokens, sums = np.empty(len(samples), np.int64), np.zeros(len(samples) + 1, np.int64)
    for n in range(len(samples)):
        tokens[n] = b.samples[samples[n]].scored
        sums[n + 1] = sums[n] + tokens[n]
    return tokens, sums


# ---- rewards


@njit(cache=True, error_model="numpy")
def reward(b, c, s, scored):
    """When the reward function is done too; each sample queues, as it ends, for workers of the instance that began it.

    All calls take equally long, so with n of them at once a sample has the worker of the n-th sample before it.
    """
    at_once = b.reward_workers * c.reward_at_once
    if at_once == 0:
        return scored
    left = np.zeros(b.instances, np.int64)
    for i in range(len(s.samples)):
        left[s.samples[i].home] += 1
    for i in in_order(s.samples["ended"].copy()):
        instance = s.instances[s.samples[i].home]
        left[s.samples[i].home] -= 1
        calls = left[s.samples[i].home] // at_once + 1
        instance.rewarded = max(instance.rewarded, s.samples[i].ended + c.reward_seconds * calls)
        scored = max(scored, instance.rewarded)
    return scored
