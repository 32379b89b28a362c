"""Continuous batching on one generation instance, compiled: when each of its samples ends.

The clock jumps from event to event (a sample ends, the cache is full): so many decode steps between two of them cost
that number x the step at the middle context, exact where a step is linear in its context. Between two turns a sample
may pause: it has no row, and its whole blocks stay in the cache until others need the room. Other block rounding and
prompts' chunks mixed with decode steps are left out. Samples are in linked lists; -1 ends them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from rlhfuse.simulator.cost_numbers import decode_seconds, prefill_seconds
from rlhfuse.tasks.migration import blocks

NEVER = 1 << 62  # a step
# Of kernels that allocate nothing: they count no references of the arrays that they are given.
IN_PLACE: dict[str, Any] = {"cache": True, "error_model": "numpy", "_nrt": False}
GENERATE, MEET, MIGRATE, SWAP_IN, SCORE = range(5)  # kinds of spans

SAMPLE = np.dtype(
    [
        ("prompt", np.int64),
        ("output", np.int64),  # response tokens at the end of its turn
        ("scored", np.int64),  # tokens that scoring pays for
        ("home", np.int32),  # instance that starts it, ascending
        ("at", np.int64),  # instance that decodes it
        ("done", np.int32),  # response tokens, while it runs those that it had when it was admitted
        ("finish_step", np.int64),
        ("following", np.int32),  # in the list of waiting, of running or of pausing samples
        ("before", np.int32),  # in the list of running samples
        ("kv_tokens", np.int32),  # that migrate with it
        ("kept", np.int32),  # tokens that it has in the cache while it pauses and until it is admitted again
        ("turn", np.int32),  # of the batch's turns, and the last of its own
        ("last_turn", np.int32),
        ("ended", np.float64),  # seconds; nan until it has
        ("resumes", np.float64),  # seconds
        ("cached", np.bool_),  # arrived with its keys and values: admitted without a prefill
        ("runs", np.bool_),
        ("pauses", np.bool_),
        ("resumed", np.bool_),  # it has had a pause
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
        ("next_resume", np.float64),  # of its pausing samples
        ("context", np.int64),  # tokens of all running samples
        ("step", np.int64),
        ("running", np.int64),  # how many
        ("next_end", np.int64),  # step
        ("first_waiting", np.int64),
        ("last_waiting", np.int64),
        ("first", np.int64),  # running
        ("last", np.int64),
        ("first_pausing", np.int64),
        ("last_pausing", np.int64),
        ("kept", np.int64),  # tokens of samples that do not run
        ("last_ended", np.int64),  # sample
        ("place", np.int64),  # among the destinations; of one that is freed -1 - its place among those
        ("preempted", np.bool_),  # nothing is admitted until a sample ends, or two would evict each other
        ("scores", np.bool_),  # has joined those that score
        ("loaded", np.bool_),  # has its models
    ],
    align=True,
)
TURN = np.dtype(
    [
        ("drawn", np.int64),  # tokens
        ("pause", np.float64),  # seconds, behind it
        ("observed", np.int64),  # tokens, behind the pause
    ]
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
    turns: np.ndarray  # of TURN, sample after sample
    longest_first: np.ndarray  # samples by tokens scored, equal ones in order
    instances: int
    per_worker: int  # instances of a worker, which its first one stands for
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
    """Start waiting samples that fit, in order; a prefill makes each one's next token. Says whether any did.

    What a sample has observed runs in a decode step of the others, in which they gain a token too.
    """
    if instance.first_waiting < 0 or instance.preempted:
        return False
    first, rows, context = samples[instance.first_waiting], instance.running, instance.context
    beside = rows > 0 and first.resumed and not first.cached
    step = instance.step + beside
    tokens = prefilled = admitted = 0
    while instance.first_waiting >= 0 and instance.running < b.max_sequences:
        i = instance.first_waiting
        sample = samples[i]
        own = sample.prompt + sample.done
        if instance.running > 0 and instance.context + own + instance.running + 1 > b.capacity:
            break
        instance.first_waiting = sample.following
        if not sample.cached:
            tokens += own - sample.kept
            prefilled += 1
            sample.done += 1
        instance.kept -= sample.kept
        sample.cached, sample.kept = False, 0
        sample.finish_step = step + sample.output - sample.done
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
        seconds = prefill_seconds(c, tokens, prefilled)
        if beside:
            seconds = decode_seconds(c, rows, context) + max(0.0, seconds - c.least_step)
            instance.step, instance.context = step, instance.context + rows
        instance.clock += seconds
    if math.isnan(instance.all_admitted) and instance.first_waiting < 0:
        instance.all_admitted = instance.clock
    if instance.kept > 0:
        _make_room(b, samples, instance)
    _retire(b, samples, instance)
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
def _retire(b, samples, instance):
    """Let go of the samples that end, or whose turn ends, at this step."""
    if instance.next_end > instance.step:
        return
    ended, least, i = -1, NEVER, instance.first
    while i >= 0:
        later = samples[i].following
        if samples[i].finish_step > instance.step:
            least = min(least, samples[i].finish_step)
        else:
            _leave(samples, instance, i, samples[i].output)
            if samples[i].turn < samples[i].last_turn:
                _begin_pause(b, samples, instance, i)
            else:
                samples[i].ended = instance.clock
                ended = max(ended, i)
        i = later
    if ended >= 0:
        instance.last_ended = ended
    instance.next_end = least
    instance.preempted = False


@njit(**IN_PLACE)
def _begin_pause(b, samples, instance, i):
    """Sample i, which runs no more, pauses after its turn; only its last token was not run yet."""
    sample = samples[i]
    sample.kept = (sample.prompt + sample.done - 1) // b.block_tokens * b.block_tokens
    sample.resumes = instance.clock + b.turns[sample.turn].pause
    sample.pauses = True
    pause(samples, instance, i)


@njit(**IN_PLACE)
def pause(samples, instance, i):
    """Sample i is the last that began to pause."""
    samples[i].following = -1
    if instance.first_pausing < 0:
        instance.first_pausing = i
    else:
        samples[instance.last_pausing].following = i
    instance.last_pausing = i
    instance.kept += samples[i].kept
    instance.next_resume = min(instance.next_resume, samples[i].resumes)


@njit(**IN_PLACE)
def _resume(b, samples, instance):
    """Samples whose pause is over wait with what they have observed, in order of its end."""
    while instance.next_resume <= instance.clock:
        found, before = _next_to_resume(samples, instance)
        sample = samples[found]
        if before < 0:
            instance.first_pausing = sample.following
        else:
            samples[before].following = sample.following
        if sample.following < 0:
            instance.last_pausing = before
        sample.done += b.turns[sample.turn].observed
        sample.turn += 1
        sample.output = sample.done + b.turns[sample.turn].drawn
        sample.pauses, sample.resumed = False, True
        wait(samples, instance, found)


@njit(**IN_PLACE)
def _next_to_resume(samples, instance):
    """The sample that resumes first, and the one before it in the list; `next_resume` is of the others from now on."""
    found, before, earlier, i = -1, -1, -1, instance.first_pausing
    next_resume = np.inf
    while i >= 0:
        if found < 0 or samples[i].resumes < samples[found].resumes:
            next_resume = samples[found].resumes if found >= 0 else np.inf  # no less than those before it
            found, before = i, earlier
        else:
            next_resume = min(next_resume, samples[i].resumes)
        earlier, i = i, samples[i].following
    instance.next_resume = next_resume
    return found, before


@njit(**IN_PLACE)
def _make_room(b, samples, instance):
    """What runs takes the cache of those that pause, the first of them first, and then of those that wait."""
    over = instance.context + instance.kept - b.capacity
    given = _give_up(b, samples, instance.first_pausing, over)
    instance.kept -= given + _give_up(b, samples, instance.first_waiting, over - given)


@njit(**IN_PLACE)
def _give_up(b, samples, i, over):
    """How many of `over` tokens the list from sample i on has lost, each sample whole blocks from its end."""
    given = 0
    while i >= 0 and given < over:
        lost = min(samples[i].kept, blocks(over - given, b.block_tokens) * b.block_tokens)
        samples[i].kept -= lost
        given += lost
        i = samples[i].following
    return given


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
def _steps_to_event(b, c, instance):
    """Decode steps until a sample ends, the cache is full or a pause is over, whichever is first."""
    room = (b.capacity - instance.context) // instance.running
    if room == 0 and instance.running == 1:
        room = 1  # one sample always fits (InstanceLimits checks it)
    steps = min(instance.next_end - instance.step, room)
    return _steps_until(c, instance, instance.next_resume, steps) if instance.next_resume < np.inf else steps


@njit(**IN_PLACE)
def _steps_until(c, instance, moment, most):
    """The fewest decode steps that reach `moment`, of at most so many; seconds grow with steps."""
    low, high = min(1, most), most
    while low < high:
        middle = (low + high) // 2
        if instance.clock + _decode_seconds(c, instance, middle) >= moment:
            high = middle
        else:
            low = middle + 1
    return low


@njit(**IN_PLACE)
def _decode(b, samples, instance, steps, seconds):
    instance.clock += seconds
    instance.step += steps
    instance.context += steps * instance.running
    if instance.kept > 0:
        _make_room(b, samples, instance)
    _retire(b, samples, instance)


@njit(**IN_PLACE)
def run_events(b, c, samples, instance, until):
    """Run to the last event (an admission, an end, a preemption, a pause's end) that is not after `until`.

    Where `run` goes from here does not depend on how often this stopped in between, to the last bit.
    """
    while instance.clock < until:
        if instance.next_resume <= instance.clock:
            _resume(b, samples, instance)
        if _admit(b, c, samples, instance):
            continue  # those that a prefill finished have made room for more
        if instance.running == 0:  # all pause, or all have ended
            if instance.next_resume >= until:
                return
            instance.clock = instance.next_resume
            continue
        steps = _steps_to_event(b, c, instance)
        if steps == 0:
            _preempt_last(samples, instance)
            continue
        seconds = _decode_seconds(c, instance, steps)
        if instance.clock + seconds > until:
            return
        _decode(b, samples, instance, steps, seconds)


@njit(**IN_PLACE)
def run(b, c, samples, instance, until):
    """Run to the first step boundary at or after `until`, or until every sample is finished; pauses have no steps."""
    run_events(b, c, samples, instance, until)
    if instance.clock < until and instance.running > 0:
        steps = _steps_until(c, instance, until, _steps_to_event(b, c, instance))
        _decode(b, samples, instance, steps, _decode_seconds(c, instance, steps))


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
    instance.context = instance.running = instance.kept = 0
    instance.first_waiting = instance.first = instance.last = instance.first_pausing = -1
    instance.next_end, instance.next_resume = NEVER, np.inf


@njit(cache=True, error_model="numpy")
def start(b, spans):
    """Every instance at time 0, its samples waiting."""
    s = State(b.samples.copy(), np.zeros(b.instances, INSTANCE), spans, np.zeros(1, np.int64))
    for k in range(b.instances):
        instance = s.instances[k]
        instance.all_admitted = instance.loading = instance.early = np.nan
        instance.last_waiting = instance.last_pausing = instance.last_ended = -1
        release(instance)
    for i in range(len(s.samples)):
        wait(s.samples, s.instances[s.samples[i].home], i)
    return s


@njit(cache=True, error_model="numpy")
def copy(s):
    """The same state with a future of its own."""
    return State(s.samples.copy(), s.instances.copy(), s.spans, np.zeros(1, np.int64))
