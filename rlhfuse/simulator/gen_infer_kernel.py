"""Seconds of generation and inference for many R_t, in numba: what BatchSimulation simulates, without its time line.

The same events in the same order with the same operations, so that all seconds are equal to the last bit: iteration.py
and scoring_queue.py say what they mean, decisions/ how samples are dealt and packed.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from numba import njit

from rlhfuse.decisions.packing import SMALLEST_PACK
from rlhfuse.simulator.instance_kernel import NEVER, copy, run, run_events, score_seconds, start, wait

AT_ONCE = math.ulp(0.0)  # the moment at which all samples are unfinished is the end of the first step


# ---- migration (plan_migration, BatchSimulation._migrate)


@njit(cache=True, error_model="numpy")
def _blocks(tokens, block_tokens):
    return -(-tokens // block_tokens)


@njit(cache=True, error_model="numpy")
def _moves_with_cache(b, kv_tokens):
    """SampleMoveCost.mode of a sample whose cache is its own."""
    send = b.transfer_latency + kv_tokens * b.kv_bytes_per_token * b.transfer_per_byte
    return kv_tokens > 0 and send <= b.run_latency + kv_tokens * b.run_per_token


@njit(cache=True, error_model="numpy")
def _order(values):
    """Positions in ascending order, equal ones in order."""
    return np.argsort(values.astype(np.float64), kind="mergesort")


@njit(cache=True, error_model="numpy")
def _destinations(b, samples, count):
    """Place of each instance among the `count` that hold the most samples; -1 for one that is freed."""
    held = np.zeros(b.instances, np.int64)
    for i in range(len(samples)):
        held[samples[i].home] += math.isnan(samples[i].ended)
    chosen = np.zeros(b.instances, np.bool_)
    for k in _order(-held)[:count]:
        chosen[k] = True
    place, next_place = np.full(b.instances, -1, np.int64), 0
    for k in range(b.instances):
        if chosen[k]:
            place[k] = next_place
            next_place += 1
    return place


@njit(cache=True, error_model="numpy")
def _migrate(b, c, s, place, at, agreed):
    """Deals the samples of freed instances to others; `at`: on which instance a sample is, from here on.

    Returns when each instance is at the end of its last transfer.
    """
    samples, instances, block = s.samples, b.instances, b.block_tokens
    used, room = np.zeros(instances, np.int64), np.full(instances, b.capacity // block, np.int64)
    tokens, kv_tokens = np.zeros(len(samples), np.int64), np.zeros(len(samples), np.int64)
    for i in range(len(samples)):
        own, k = samples[i], samples[i].home
        if not math.isnan(own.ended):
            continue
        done = own.output - (own.finish_step - s.instances[k].step) if own.runs else own.done
        tokens[i] = own.prompt + done
        kv_tokens[i] = tokens[i] - 1 if own.runs else 0
        room[k] -= _blocks(kv_tokens[i], block)
        if place[k] >= 0:
            used[k] += _blocks(tokens[i], block)
        else:
            own.done, own.runs = done, False
    room = np.maximum(room, 0)
    chosen, freed = np.flatnonzero(place >= 0), np.flatnonzero(place < 0)
    for i in _order(-tokens):
        own = samples[i]
        if math.isnan(own.ended) and place[own.home] < 0:
            need = _blocks(kv_tokens[i] + 1, block)
            least = roomy = -1
            for k in chosen:
                if least < 0 or used[k] < used[least]:
                    least = k
                if need <= room[k] and (roomy < 0 or used[k] < used[roomy]):
                    roomy = k
            own.cached = roomy >= 0 and _moves_with_cache(b, kv_tokens[i])
            at[i] = roomy if own.cached else least
            if own.cached:
                room[roomy] -= need
            used[at[i]] += _blocks(tokens[i], block)
    for k in freed:
        one = s.instances[k]
        one.context = one.running = 0
        one.first_waiting = one.first = one.last = -1
        one.next_end = NEVER
    sources = np.full(instances, -1, np.int64)
    sources[freed] = np.arange(len(freed))
    volumes = np.full((len(freed), len(chosen)), -1.0)  # none moves
    for i in range(len(samples)):
        own = samples[i]
        if at[i] != own.home:
            wait(samples, s.instances[at[i]], i)
            source, destination, moved = sources[own.home], place[at[i]], kv_tokens[i] if own.cached else 0
            volumes[source, destination] = max(volumes[source, destination], 0.0) + moved * b.kv_bytes_per_token
    ends, rounds = np.full(instances, agreed), max(len(freed), len(chosen))
    t = c.transfer
    for turn in range(rounds):
        for source in range(len(freed)):
            destination = (turn + source) % rounds
            if destination < len(chosen) and volumes[source, destination] >= 0:
                volume = volumes[source, destination]
                seconds = t.latency + t.factor * volume / t.parts / t.bandwidth if volume else 0.0
                one, other = freed[source], chosen[destination]
                ends[one] = ends[other] = max(ends[one], ends[other]) + seconds
    for k in chosen:
        s.instances[k].clock = ends[k]
    return ends


# ---- scoring (SimulatedScoringQueue, _serial, _fused)


@njit(cache=True, error_model="numpy")
def _first_pack_end(b, begun, now, load, work, sooner, since):
    models = b.models
    then = max(begun, since + sooner * load / models) if sooner else begun
    end = now
    for model in range(1, sooner + 1):
        end = max(end, since + model * load / models) + work / models
    for model in range(1, models - sooner + 1):
        end = max(end, then + model * load / models) + work / models
    return end


@njit(cache=True, error_model="numpy")
def _packs(b, samples, workers):
    """Tokens and samples of each pack (scoring_packs); `samples`: longest first."""
    left = 0
    for i in samples:
        left += b.samples[i].scored
    tokens, counts = np.zeros(len(samples), np.int64), np.zeros(len(samples), np.int64)
    packs = room = 0
    for i in samples:
        own = b.samples[i].scored
        if packs == 0 or own > room:
            packs += 1
            room = min(b.score_tokens, max(math.ceil(left / workers), math.ceil(b.score_tokens / SMALLEST_PACK)))
        tokens[packs - 1] += own
        counts[packs - 1] += 1
        room -= own
        left -= own
    return tokens[:packs], counts[:packs]


@njit(cache=True, error_model="numpy")
def _rewarded(b, c, ended, scored):
    """When the reward function is done too (last_reward_seconds)."""
    at_once = b.reward_workers * c.reward_at_once
    if at_once == 0:
        return scored
    last = np.full(b.instances, -1, np.int64)
    for k in b.samples["home"]:
        last[k] += 1
    seen = np.zeros(b.instances, np.int64)
    for i in _order(ended):
        k = b.samples["home"][i]
        scored = max(scored, ended[i] + c.reward_seconds * ((last[k] - seen[k]) // at_once + 1))
        seen[k] += 1
    return scored


@njit(cache=True, error_model="numpy")
def _serial(b, c, s):
    """(all seconds, seconds of generation); `s`: everything is generated."""
    generation = s.samples["ended"].max()
    agreed = generation + c.barrier
    begin = agreed + c.release
    total = max(agreed, s.instances["clock"].max())
    loads = [(0, k) for k in range(b.instances)]
    worker = np.zeros(len(b.samples), np.int64)
    for i in b.longest_first:
        load, k = heapq.heappop(loads)
        worker[i] = k
        heapq.heappush(loads, (load + b.samples[i].scored, k))
    dealt = b.longest_first[_order(worker[b.longest_first])]  # by worker, then longest first
    first = 0
    while first < len(dealt):
        after, k = first, worker[dealt[first]]
        while after < len(dealt) and worker[dealt[after]] == k:
            after += 1
        tokens, counts = _packs(b, dealt[first:after], 1)
        clock = begin
        for pack in range(len(tokens)):
            seconds = score_seconds(c, tokens[pack], counts[pack])
            if pack == 0:
                since = 0.0 if math.isnan(s.instances[k].all_admitted) else s.instances[k].all_admitted
                clock = _first_pack_end(b, begin, begin, c.swap_in, seconds, b.early_models, since)
            else:
                clock += seconds
        total, first = max(total, clock), after
    return _rewarded(b, c, s.samples["ended"], total), generation


@njit(cache=True, error_model="numpy")
def _fused(b, c, s, count, moment):
    """(all seconds, of generation, of migration); `s`: every instance at its first step boundary from `moment` on."""
    place, at = _destinations(b, s.samples, count), b.samples["home"].copy()
    unfinished = np.isnan(s.samples["ended"])
    known, tail = b.longest_first[~unfinished[b.longest_first]], np.flatnonzero(unfinished)
    agreed = max(moment, s.instances["clock"].max()) + c.barrier
    ends = _migrate(b, c, s, place, at, agreed)
    coming = [(0.0, 0) for _ in range(0)]  # heap of (seconds, instance): when a worker is free to pull
    loads_since, migrated = np.full(b.instances, np.nan), agreed
    for k in range(b.instances):
        if place[k] >= 0:
            migrated = max(migrated, ends[k])
        one = s.instances[k]
        one.last_ended = -1
        run(b, c, s.samples, one, np.inf)
        if one.last_ended < 0:
            heapq.heappush(coming, (ends[k] + c.release, k))
            if place[k] < 0:
                loads_since[k] = ends[k] + c.release
    tail = tail[_order(s.samples["ended"][tail])]
    total, generation = _score(b, c, s, at, ends, known, tail, coming, loads_since, agreed)
    return _rewarded(b, c, s.samples["ended"], total), generation, migrated - agreed


@njit(cache=True, error_model="numpy")
def _score(b, c, s, at, ends, known, tail, coming, loads_since, now):
    """(the last score or sample, the last sample) from the barrier on; `known`, longest first, and `tail`, as it ends.

    `coming`: the workers without samples of the tail; the others begin after their last.
    """
    instances = b.instances
    new, joined = np.ones(instances, np.bool_), np.zeros(instances, np.bool_)
    early = np.full(instances, np.nan)  # when a worker began to load the first `early_models`
    tokens, counts = _packs(b, known, instances)
    free = [0 for _ in range(0)]  # heap of instances; those that must load first are above all others
    pack = taken = put = waiting = workers = 0  # of the tail: samples pulled, samples streamed, tokens between them
    generation = total = now
    while now < np.inf:
        while len(coming) > 0 and coming[0][0] <= now:
            _, k = heapq.heappop(coming)
            workers += not joined[k]
            joined[k] = True
            heapq.heappush(free, k + instances if new[k] else k)
        while len(free) > 0 and (pack < len(tokens) or taken < put):
            if pack < len(tokens):
                pulled, samples = tokens[pack], counts[pack]
                pack += 1
            else:
                pulled, samples = _streamed(b, tail[taken:put], waiting, workers)
                taken += samples
                waiting -= pulled
            k = heapq.heappop(free) % instances
            seconds = score_seconds(c, pulled, samples)
            end = now + seconds
            if new[k]:
                begun = now if math.isnan(loads_since[k]) else loads_since[k]
                since = begun if math.isnan(early[k]) else early[k]
                sooner = b.early_models if since < begun else 0
                end = _first_pack_end(b, begun, now, c.swap_in, seconds, sooner, since)
                new[k] = False
            total = max(total, end)
            heapq.heappush(coming, (end, k))
        now = coming[0][0] if len(coming) > 0 else np.inf
        if put < len(tail):
            now = min(now, s.samples[tail[put]].ended)
        while put < len(tail) and s.samples[tail[put]].ended <= now:
            i = tail[put]
            generation, k = s.samples[i].ended, at[i]
            put += 1
            waiting += b.samples[i].scored
            if i == s.instances[k].last_ended:
                early[k] = ends[k]
                heapq.heappush(coming, (generation + c.release, k))
    return max(total, generation), generation


@njit(cache=True, error_model="numpy")
def _streamed(b, waiting, tokens, workers):
    """Tokens and samples of what one worker takes (streamed_pack)."""
    share = min(b.score_tokens, math.ceil(tokens / workers))
    taken, count = b.samples[waiting[0]].scored, 1
    while count < len(waiting) and taken + b.samples[waiting[count]].scored <= share:
        taken += b.samples[waiting[count]].scored
        count += 1
    return taken, count


@njit(cache=True, error_model="numpy")
def seconds_by_threshold(b, c, thresholds, destinations):
    """(all seconds, of generation, of migration) by R_t; `thresholds` descend and have so many `destinations`."""
    whole, live = start(b), start(b)
    for k in range(b.instances):
        run(b, c, whole.samples, whole.instances[k], np.inf)
    found, ends = np.zeros((len(thresholds), 3)), whole.samples["ended"].copy()
    ends = ends[_order(ends)]
    found[:, 0], found[:, 1] = _serial(b, c, whole)
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
        if np.isnan(s.samples["ended"]).any():
            found[n, 0], found[n, 1], found[n, 2] = _fused(b, c, s, destinations[n], moment)
    return found
