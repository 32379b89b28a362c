"""Who moves where when the tail begins, compiled: tasks/migration.py where each sample's cache is its own."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from rlhfuse.simulator.cost_numbers import transfer_seconds
from rlhfuse.simulator.instance_kernel import IN_PLACE, done_of, pause, release, wait
from rlhfuse.tasks.instance_limits import is_sent
from rlhfuse.tasks.migration import blocks, most_holding


@njit(cache=True, error_model="numpy")
def in_order(values):
    """Positions of float64 `values` in ascending order, equal ones in order."""
    return np.argsort(values, kind="mergesort")


@njit(**IN_PLACE)
def mark_tail(s):
    """Mark what is unfinished; says how much that is."""
    remaining = 0
    for i in range(len(s.samples)):
        s.samples[i].tail = math.isnan(s.samples[i].ended)
        remaining += s.samples[i].tail
    return remaining


@njit(cache=True, error_model="numpy")
def choose_destinations(b, s, count):
    """The `count` instances that keep the tail, and the others; gives each its place."""
    held = np.zeros(b.instances, np.int64)
    for i in range(len(s.samples)):
        held[s.samples[i].home] += s.samples[i].tail
    keeps = np.zeros(b.instances, np.bool_)
    for k in most_holding(held, count, b.per_worker):
        keeps[k] = True
    chosen, freed = np.flatnonzero(keeps), np.flatnonzero(~keeps)
    for place in range(len(chosen)):
        s.instances[chosen[place]].place = place
    for place in range(len(freed)):
        s.instances[freed[place]].place = -1 - place
    return chosen, freed


@njit(cache=True, error_model="numpy")
def deal_tail(b, s, chosen, freed):
    """Samples of freed instances wait at destinations: the largest first, each at the one with the fewest blocks."""
    samples, size = s.samples, b.block_tokens
    used, room = np.zeros(b.instances, np.int64), np.full(b.instances, b.capacity // size, np.int64)
    tokens, cached = np.zeros(len(samples), np.float64), np.zeros(len(samples), np.int64)
    for i in range(len(samples)):
        sample, instance = samples[i], s.instances[samples[i].home]
        if sample.tail:
            done = done_of(sample, instance)
            tokens[i] = -(sample.prompt + done)
            if sample.runs:
                cached[i] = sample.prompt + done - 1  # the last token's come with the next step
                room[sample.home] -= blocks(cached[i], size)
            elif sample.pauses:
                cached[i] = sample.kept
            if instance.place >= 0:
                used[sample.home] += blocks(sample.prompt + done, size)
            else:
                sample.done, sample.runs = done, False
    for i in in_order(tokens):
        sample = samples[i]
        if sample.tail and s.instances[sample.home].place < 0:
            least, roomy = _least_used(chosen, used, room, blocks(cached[i] + 1, size))
            sent = roomy >= 0 and cached[i] > 0 and is_sent(b.move, cached[i], cached[i])
            sample.cached = sent and not sample.pauses
            sample.kept = cached[i] if sent and sample.pauses else 0
            sample.at = roomy if sent else least
            if sent:
                sample.kv_tokens = cached[i]
                room[roomy] -= blocks(cached[i] + 1, size)
            used[sample.at] += blocks(int(-tokens[i]), size)
    for k in freed:
        release(s.instances[k])
    for i in range(len(samples)):
        if samples[i].at != samples[i].home:
            instance = s.instances[samples[i].at]
            if samples[i].pauses:
                pause(samples, instance, i)
            else:
                wait(samples, instance, i)


@njit(**IN_PLACE)
def _least_used(chosen, used, room, need):
    """The destination with the fewest blocks in use, and of those with room for `need` more; -1: none has."""
    least = roomy = -1
    for k in chosen:
        if least < 0 or used[k] < used[least]:
            least = k
        if need <= room[k] and (roomy < 0 or used[k] < used[roomy]):
            roomy = k
    return least, roomy


@njit(cache=True, error_model="numpy")
def transfer_tail(b, c, s, chosen, freed, agreed):
    """Each pair of instances transfers when both are free, in the runtime's order (`transfer_order`)."""
    volumes = np.full((len(freed), len(chosen)), -1.0)  # bytes; -1: none moves
    for i in range(len(s.samples)):
        sample = s.samples[i]
        if sample.at != sample.home:
            source, destination = -1 - s.instances[sample.home].place, s.instances[sample.at].place
            moved = sample.kv_tokens * b.move.kv_bytes_per_token
            volumes[source, destination] = max(volumes[source, destination], 0.0) + moved
    for k in range(b.instances):
        s.instances[k].moved = agreed
    rounds = max(len(freed), len(chosen))
    for turn in range(rounds):
        for row in range(len(freed)):
            column = (turn + row) % rounds
            if column < len(chosen) and volumes[row, column] >= 0:
                instance, other = s.instances[freed[row]], s.instances[chosen[column]]
                end = max(instance.moved, other.moved) + transfer_seconds(c, volumes[row, column])
                instance.moved = other.moved = end
