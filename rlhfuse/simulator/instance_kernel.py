"""Continuous batching on one generation instance, compiled: when each of its samples ends.

The clock jumps from event to event (a sample ends, the cache is full): so many decode steps between two of them cost
that number x the step at the middle context, exact where a step is linear in its context. Block rounding and the mixing
of prefill chunks with decode steps are left out. Waiting and running samples are linked lists; -1 ends them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from rlhfuse.simulator.cost_numbers import decode_seconds, prefill_seconds

NEVER = 1 << 62  # a step
# Of kernels that allocate nothing: they count no references of the arrays that they are given.
IN_PLACE: dict[str, Any] = {"cache": True, "error_model": "numpy", "_nrt": False}
GENERATE, MEET, MIGRATE, SWAP_IN, SCORE = range(5)  # kinds of spans

SAMPLE = np.dtype(
    [
        ("prompt", np.int64),
        ("output", np.int64),
        ("scored", np.int64),  # tokens that scoring pays for
        ("home", np.int64),  # instance that starts it, ascending
        ("at", np.int64),  # instance that decodes it
        ("done", np.int64),  # response tokens, while it runs those that it had when it was admitted
        ("finish_step", np.int64),
        ("following", np.int64),  # in the list of waiting or of running samples
        ("before", np.int64),  # in the list of running samples
        ("kv_tokens", np.int64),  # that migrate with it
        ("ended", np.float64),  # seconds; nan until it has
        ("cached", np.bool_),  # arrived with its keys and values: admitted without a prefill
        ("runs", np.bool_),
        ("tail", np.bool_),  # unfinished at the migration
    ],
    align=True,
)
INSTANCE = np.dtype(
    [
        ("clock", np.float64),
        ("all_admitted", np.float64),  # nan until all are
        ("moved", np.float64),  # end of its last transfer
        ("loading", np.float64),  # when it begins to load the models that score; nan: with its first pack
        ("early", np.float64),  # when it begins to load those that come early; nan: it does not
        ("rewarded", np.float64),  # end of the last call for a sample that it began
        ("context", np.int64),  # tokens of all running samples
        ("step", np.int64),
        ("running", np.int64),  # how many
        ("next_end", np.int64),  # step
        ("first_waiting", np.int64),
        ("last_waiting", np.int64),
        ("first", np.int64),  # running
        ("last", np.int64),
        ("last_ended", np.int64),  # sample
        ("place", np.int64),  # among the destinations; of one that is freed -1 - its place among those
        ("preempted", np.bool_),  # nothing is admitted until a sample ends, or two would evict each other
        ("scores", np.bool_),  # has joined those that score
        ("loaded", np.bool_),  # has its models
    ],
    align=True,
)
SPAN = np.dtype(
    [
        ("instance", np.int64),
        ("kind", np.int64),
        ("samples", np.int64),  # of a scored pack
        ("start", np.float64),  # seconds
        ("end", np.float64),
    ]
)


class MoveNumbers(NamedTuple):
    """A SampleMoveCost."""

    kv_bytes_per_token: float
    transfer_latency_seconds: float
    transfer_seconds_per_byte: float
    prefill_seconds_per_token: float
    prefill_latency_seconds: float


class Batch(NamedTuple):
    """Samples, what their instances hold, and how they move."""

    samples: np.ndarray  # of SAMPLE, before anything has begun
    longest_first: np.ndarray  # samples by tokens scored, equal ones in order
    instances: int
    max_sequences: int
    capacity: int  # tokens
    block_tokens: int
    score_tokens: int
    models: int
    early_models: int
    reward_workers: int
    move: MoveNumbers


class State(NamedTuple):
    """Where all stand, and what they did."""

    samples: np.ndarray  # of SAMPLE
    instances: np.ndarray  # of INSTANCE
    spans: np.ndarray  # of SPAN, room for all; none where they are not asked for
    written: np.ndarray  # [1] of them


@njit(**IN_PLACE)
def record(s, instance, kind, start, end, samples):
    """Write a span, where spans are asked for."""
    if len(s.spans) > 0:
        span = s.spans[s.written[0]]
        span.instance, span.kind, span.samples, span.start, span.end = instance, kind, samples, start, end
        s.written[0] += 1


@njit(**IN_PLACE)
def _decode_seconds(c, instance, steps):
    middle = instance.context + instance.running * (steps - 1) / 2
    return steps * decode_seconds(c, instance.running, middle)


@njit(**IN_PLACE)
def _admit(b, c, samples, instance):
    """Start waiting samples that fit, in order; a prefill makes each one's next token. Says whether any did."""
    if instance.first_waiting < 0 or instance.preempted:
        return False
    tokens = prefilled = admitted = 0
    while instance.first_waiting >= 0 and instance.running < b.max_sequences:
        i = instance.first_waiting
        sample = samples[i]
        own = sample.prompt + sample.done
        if instance.running > 0 and instance.context + own + instance.running + 1 > b.capacity:
            break
        instance.first_waiting = sample.following
        if not sample.cached:
            tokens += own
            prefilled += 1
            sample.done += 1
        sample.cached = False
        sample.finish_step = instance.step + sample.output - sample.done
        sample.before, sample.following, sample.runs = instance.last, -1, True
        if instance.last < 0:
            instance.first = i
        else:
            samples[instance.last].following = i
        instance.last = i
        instance.running += 1
        instance.context += sample.prompt + sample.done
        instance.next_end = min(instance.next_end, sample.finish_step)
        admitted += 1
    if prefilled:
        instance.clock += prefill_seconds(c, tokens, prefilled)
    if math.isnan(instance.all_admitted) and instance.first_waiting < 0:
        instance.all_admitted = instance.clock
    _retire(samples, instance)
    return admitted > 0


@njit(**IN_PLACE)
def _leave(samples, instance, i, done):
    """Sample i runs no more."""
    samples[i].done, samples[i].runs = done, False
    instance.context -= samples[i].prompt + done
    instance.running -= 1
    earlier, later = samples[i].before, samples[i].following
    if earlier < 0:
        instance.first = later
    else:
        samples[earlier].following = later
    if later < 0:
        instance.last = earlier
    else:
        samples[later].before = earlier


@njit(**IN_PLACE)
def _retire(samples, instance):
    """Let go of the samples that end at this step."""
    if instance.next_end > instance.step:
        return
    instance.last_ended = -1
    least, i = NEVER, instance.first
    while i >= 0:
        later = samples[i].following
        if samples[i].finish_step <= instance.step:
            _leave(samples, instance, i, samples[i].output)
            samples[i].ended = instance.clock
            instance.last_ended = max(instance.last_ended, i)
        else:
            least = min(least, samples[i].finish_step)
        i = later
    instance.next_end = least
    instance.preempted = False


@njit(**IN_PLACE)
def _preempt_last(samples, instance):
    """The sample admitted last loses its keys and values and waits, as in the engine."""
    i = instance.last
    _leave(samples, instance, i, done_of(samples[i], instance))
    if instance.first_waiting < 0:
        instance.last_waiting = i
    samples[i].following, instance.first_waiting = instance.first_waiting, i
    instance.preempted = True
    least, i = NEVER, instance.first
    while i >= 0:
        least, i = min(least, samples[i].finish_step), samples[i].following
    instance.next_end = least


@njit(**IN_PLACE)
def done_of(sample, instance):
    """Response tokens of a sample now."""
    return sample.output - (sample.finish_step - instance.step) if sample.runs else sample.done


@njit(**IN_PLACE)
def _steps_to_event(b, instance):
    """Decode steps until a sample ends or the cache is full, whichever is first."""
    room = (b.capacity - instance.context) // instance.running
    if room == 0 and instance.running == 1:
        room = 1  # one sample always fits (InstanceLimits checks it)
    return min(instance.next_end - instance.step, room)


@njit(**IN_PLACE)
def _decode(samples, instance, steps, seconds):
    instance.clock += seconds
    instance.step += steps
    instance.context += steps * instance.running
    _retire(samples, instance)


@njit(**IN_PLACE)
def run_events(b, c, samples, instance, until):
    """Run to the last event (an admission, an end, a preemption) that is not after `until`.

    Where `run` goes from here does not depend on how often this stopped in between, to the last bit.
    """
    while instance.clock < until and (instance.running > 0 or instance.first_waiting >= 0):
        if _admit(b, c, samples, instance):
            continue  # those that a prefill finished have made room for more
        steps = _steps_to_event(b, instance)
        if steps == 0:
            _preempt_last(samples, instance)
            continue
        seconds = _decode_seconds(c, instance, steps)
        if instance.clock + seconds > until:
            return
        _decode(samples, instance, steps, seconds)


@njit(**IN_PLACE)
def run(b, c, samples, instance, until):
    """Run to the first step boundary at or after `until`, or until every sample is finished."""
    run_events(b, c, samples, instance, until)
    if instance.clock < until and (instance.running > 0 or instance.first_waiting >= 0):
        low, high = 1, _steps_to_event(b, instance)  # the fewest steps that reach it; seconds grow with steps
        while low < high:
            middle = (low + high) // 2
            if instance.clock + _decode_seconds(c, instance, middle) >= until:
                high = middle
            else:
                low = middle + 1
        _decode(samples, instance, low, _decode_seconds(c, instance, low))


@njit(**IN_PLACE)
def wait(samples, instance, i):
    """Sample i is the last to wait."""
    samples[i].following = -1
    if instance.first_waiting < 0:
        instance.first_waiting = i
    else:
        samples[instance.last_waiting].following = i
    instance.last_waiting = i


@njit(**IN_PLACE)
def release(instance):
    """The instance gives up all its samples."""
    instance.context = instance.running = 0
    instance.first_waiting = instance.first = instance.last = -1
    instance.next_end = NEVER


@njit(cache=True, error_model="numpy")
def start(b, spans):
    """Every instance at time 0, its samples waiting."""
    s = State(b.samples.copy(), np.zeros(b.instances, INSTANCE), spans, np.zeros(1, np.int64))
    for k in range(b.instances):
        instance = s.instances[k]
        instance.all_admitted = instance.loading = instance.early = np.nan
        instance.last_waiting = instance.last_ended = -1
        release(instance)
    for i in range(len(s.samples)):
        wait(s.samples, s.instances[s.samples[i].home], i)
    return s


@njit(cache=True, error_model="numpy")
def copy(s):
    """The same state with a future of its own."""
    return State(s.samples.copy(), s.instances.copy(), s.spans, np.zeros(1, np.int64))
