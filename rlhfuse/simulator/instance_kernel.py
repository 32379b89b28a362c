"""InstanceRun in numba: the same events in the same order with the same operations, equal to the last bit.

instances.py says what they mean. Waiting and running samples of an instance are linked lists over all samples; -1 ends
them. Costs come as numbers (cost_numbers.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

NEVER = 1 << 62  # a step


SAMPLE = np.dtype(
    [
        ("prompt", np.int64),
        ("output", np.int64),
        ("scored", np.int64),  # tokens that scoring pays for
        ("home", np.int64),  # instance that starts it, ascending
        ("done", np.int64),  # response tokens, while it runs those that it had when it was admitted
        ("finish_step", np.int64),
        ("following", np.int64),  # in the list of waiting or of running samples
        ("before", np.int64),  # in the list of running samples
        ("ended", np.float64),  # seconds; nan until it has
        ("cached", np.bool_),
        ("runs", np.bool_),
    ],
    align=True,
)
INSTANCE = np.dtype(
    [
        ("clock", np.float64),
        ("all_admitted", np.float64),  # nan until all are
        ("context", np.int64),  # tokens of all running samples
        ("step", np.int64),
        ("running", np.int64),  # how many
        ("next_end", np.int64),  # step
        ("first_waiting", np.int64),
        ("last_waiting", np.int64),
        ("first", np.int64),  # running
        ("last", np.int64),
        ("last_ended", np.int64),  # sample
        ("preempted", np.bool_),
    ],
    align=True,
)


class Batch(NamedTuple):
    """Samples, what their instances hold, and how they move."""

    samples: np.ndarray  # of SAMPLE, before anything has begun
    longest_first: np.ndarray  # samples by tokens scored, equal ones in order
    instances: int
    max_sequences: int
    capacity: int  # tokens
    kv_bytes_per_token: float
    block_tokens: int
    score_tokens: int
    models: int
    early_models: int
    reward_workers: int
    transfer_latency: float  # these four decide whether a sample's keys and values move
    transfer_per_byte: float
    run_latency: float
    run_per_token: float


class State(NamedTuple):
    """Where all stand."""

    samples: np.ndarray  # of SAMPLE
    instances: np.ndarray  # of INSTANCE


# ---- costs


@njit(cache=True, error_model="numpy")
def _both(computing, moving, in_turns):
    return computing + moving if in_turns else max(computing, moving)


@njit(cache=True, error_model="numpy")
def decode_seconds(d, one, steps):
    batch, own = one.running, d.by_batch[one.running]
    context = one.context + batch * (steps - 1) / 2
    flops = (own.flops + d.flops_per_token * context) / d.flop_rate
    moved = (d.weight_bytes + d.kv_bytes * context) / d.byte_rate
    layer = d.floor + _both(flops, moved, d.in_turns) + own.all_reduce
    step = d.layers * layer + own.head + own.sampler
    return steps * (step / own.tokens)


@njit(cache=True, error_model="numpy")
def _line(f, tokens, sequences):
    return f.constant + (f.per_token * tokens + f.per_sequence * sequences) if tokens > 0 else 0.0


@njit(cache=True, error_model="numpy")
def _forward(m, tokens, sequences, outputs):
    if tokens <= 0:
        return 0.0
    pairs = tokens * (tokens / max(sequences, 1.0) + 1) / 2
    flops = m.flops_per_token * tokens + m.flops_per_pair * pairs
    moved = m.weight_bytes + m.kv_bytes * tokens
    roofline = _both(flops / m.flop_rate, moved / m.byte_rate, m.in_turns)
    between = tokens * m.moved_per_token / m.bandwidth
    ring = m.ring_share * (tokens * m.hidden * m.element_bytes) / m.link
    layer = _both(roofline, m.floor, m.in_turns) + between + 2 * (2 * ring + m.sum_start)
    return m.layers * layer + _both(m.head_flops * outputs / m.flop_rate, m.head_floor, m.in_turns) + m.passed


@njit(cache=True, error_model="numpy")
def prefill_seconds(c, tokens, sequences):
    f = c.prefill
    if f.lines:
        return _line(f, float(tokens), float(sequences))
    return _forward(f.models[0], float(tokens), float(sequences), float(sequences))


@njit(cache=True, error_model="numpy")
def score_seconds(c, tokens, sequences):
    f = c.score
    if f.lines:
        return _line(f, float(tokens), float(sequences))
    total = 0.0
    for m in f.models:
        share = max(m.share, min(1.0, 1 / max(sequences, 1)))
        scored = tokens * share
        total += _forward(m, scored, sequences * share, scored * m.output_share)
    return total


# ---- one instance (InstanceRun)


@njit(cache=True, error_model="numpy")
def _admit(b, c, samples, one):
    if one.first_waiting < 0 or one.preempted:
        return False
    tokens = prefilled = admitted = 0
    while one.first_waiting >= 0 and one.running < b.max_sequences:
        i = one.first_waiting
        own = samples[i].prompt + samples[i].done
        if one.running > 0 and one.context + own + one.running + 1 > b.capacity:
            break
        one.first_waiting = samples[i].following
        if not samples[i].cached:
            tokens += own
            prefilled += 1
            samples[i].done += 1
        samples[i].cached = False
        samples[i].finish_step = one.step + samples[i].output - samples[i].done
        samples[i].before, samples[i].following, samples[i].runs = one.last, -1, True
        if one.last < 0:
            one.first = i
        else:
            samples[one.last].following = i
        one.last = i
        one.running += 1
        one.context += samples[i].prompt + samples[i].done
        one.next_end = min(one.next_end, samples[i].finish_step)
        admitted += 1
    if prefilled:
        one.clock += prefill_seconds(c, tokens, prefilled)
    if math.isnan(one.all_admitted) and one.first_waiting < 0:
        one.all_admitted = one.clock
    _retire(samples, one)
    return admitted > 0


@njit(cache=True, error_model="numpy")
def _leave(samples, one, i, done):
    """Sample i runs no more."""
    samples[i].done, samples[i].runs = done, False
    one.context -= samples[i].prompt + done
    one.running -= 1
    earlier, later = samples[i].before, samples[i].following
    if earlier < 0:
        one.first = later
    else:
        samples[earlier].following = later
    if later < 0:
        one.last = earlier
    else:
        samples[later].before = earlier


@njit(cache=True, error_model="numpy")
def _retire(samples, one):
    if one.next_end > one.step:
        return
    one.last_ended = -1
    least, i = NEVER, one.first
    while i >= 0:
        later = samples[i].following
        if samples[i].finish_step <= one.step:
            _leave(samples, one, i, samples[i].output)
            samples[i].ended = one.clock
            one.last_ended = max(one.last_ended, i)
        else:
            least = min(least, samples[i].finish_step)
        i = later
    one.next_end = least
    one.preempted = False


@njit(cache=True, error_model="numpy")
def _preempt_last(samples, one):
    i = one.last
    _leave(samples, one, i, samples[i].output - (samples[i].finish_step - one.step))
    if one.first_waiting < 0:
        one.last_waiting = i
    samples[i].following, one.first_waiting = one.first_waiting, i
    one.preempted = True
    least, i = NEVER, one.first
    while i >= 0:
        least, i = min(least, samples[i].finish_step), samples[i].following
    one.next_end = least


@njit(cache=True, error_model="numpy")
def _steps_to_event(b, one):
    room = (b.capacity - one.context) // one.running
    if room == 0 and one.running == 1:
        room = 1
    return min(one.next_end - one.step, room)


@njit(cache=True, error_model="numpy")
def _decode(samples, one, steps, seconds):
    one.clock += seconds
    one.step += steps
    one.context += steps * one.running
    _retire(samples, one)


@njit(cache=True, error_model="numpy")
def run_events(b, c, samples, one, until):
    while one.clock < until and (one.running > 0 or one.first_waiting >= 0):
        if _admit(b, c, samples, one):
            continue
        steps = _steps_to_event(b, one)
        if steps == 0:
            _preempt_last(samples, one)
            continue
        seconds = decode_seconds(c.decode, one, steps)
        if one.clock + seconds > until:
            return
        _decode(samples, one, steps, seconds)


@njit(cache=True, error_model="numpy")
def run(b, c, samples, one, until):
    run_events(b, c, samples, one, until)
    if one.clock < until and (one.running > 0 or one.first_waiting >= 0):
        low, high = 1, _steps_to_event(b, one)
        while low < high:
            middle = (low + high) // 2
            if one.clock + decode_seconds(c.decode, one, middle) >= until:
                high = middle
            else:
                low = middle + 1
        _decode(samples, one, low, decode_seconds(c.decode, one, low))


@njit(cache=True, error_model="numpy")
def wait(samples, one, i):
    """Sample i is the last to wait."""
    samples[i].following = -1
    if one.first_waiting < 0:
        one.first_waiting = i
    else:
        samples[one.last_waiting].following = i
    one.last_waiting = i


@njit(cache=True, error_model="numpy")
def start(b):
    """Every instance at time 0, its samples waiting."""
    s = State(b.samples.copy(), np.zeros(b.instances, INSTANCE))
    for k in range(b.instances):
        one = s.instances[k]
        one.all_admitted, one.next_end = np.nan, NEVER
        one.first_waiting = one.last_waiting = one.first = one.last = one.last_ended = -1
    for i in range(len(s.samples)):
        wait(s.samples, s.instances[s.samples[i].home], i)
    return s


@njit(cache=True, error_model="numpy")
def copy(s):
    """The same state with a future of its own."""
    return State(s.samples.copy(), s.instances.copy())
