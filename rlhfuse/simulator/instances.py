"""Continuous batching simulated: when each sample of each instance finishes.

The clock jumps from event to event (a sample ends, the cache is full): `steps` decode steps between two of them cost
`steps` x the step at the middle context, exact where a step is linear in its context. Block rounding and the mixing of
prefill chunks with decode steps are left out.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from rlhfuse.base.errors import InputError
from rlhfuse.costs.cost_model import CostModel
from rlhfuse.decisions.packing import split_samples
from rlhfuse.simulator.lengths import SampleLengths


@dataclass(frozen=True)
class InstanceLimits:
    """What one generation instance can hold, and what a sample can grow to.

    `score_tokens`: tokens of one packed scoring batch. `padded_score_tokens`: 0 for packed scoring, else the
    tokens that every sample costs there whatever its length (to study engines that pad). `scoring_models`: how many
    models score, one after the other; the first `early_models` of them are loaded beneath the end of decoding.
    `reward_workers`: processes that call the reward function, 0 without one.
    """

    max_sequences: int
    kv_capacity_bytes: float  # C
    kv_bytes_per_token: float
    block_tokens: int
    bs_max: int
    max_prompt_tokens: int
    max_output_tokens: int
    score_tokens: int
    padded_score_tokens: int = 0
    scoring_models: int = 3
    reward_workers: int = 0
    early_models: int = 0

    def __post_init__(self) -> None:
        for name in ("max_sequences", "kv_capacity_bytes", "kv_bytes_per_token", "block_tokens", "bs_max"):
            if not getattr(self, name) > 0:
                raise InputError(f"instance limit {name} is {getattr(self, name)}; it must be above 0")
        if self.longest > self.kv_capacity_tokens:
            raise InputError(
                f"an instance holds KV of {self.kv_capacity_tokens} tokens, fewer than one sample of "
                f"{self.max_prompt_tokens} + {self.max_output_tokens} = {self.longest}; give it more KV blocks"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.max_prompt_tokens + self.max_output_tokens

    @property
    def kv_capacity_tokens(self) -> int:
        return int(self.kv_capacity_bytes / self.kv_bytes_per_token + 1e-6)

    @property
    def sample_kv_bytes(self) -> float:
        """M: the longest prompt plus the maximum output."""
        return self.longest * self.kv_bytes_per_token


@dataclass(frozen=True)
class InstanceSpan:
    """What one instance does from `start` to `end`, in seconds of the iteration."""

    instance: int
    kind: str  # generate, meet, migrate, swap_in, score, reward or idle
    start: float
    end: float


@dataclass(slots=True)
class SimulatedSequence:
    """One sample on an instance. `done` response tokens exist; the InstanceRun that holds it is its owner."""

    sample_id: int
    prompt: int
    output: int
    done: int = 0
    cached: bool = False  # arrived with its keys and values: admitted without a prefill
    finish_step: int = 0  # of the instance's step counter, while it runs

    @property
    def tokens(self) -> int:
        return self.prompt + self.done

    def copy(self) -> SimulatedSequence:
        return SimulatedSequence(self.sample_id, self.prompt, self.output, self.done, self.cached, self.finish_step)


class InstanceRun:
    """One generation instance: its clock, its waiting and running samples, and who finished when.

    It admits waiting samples while it has room (sequences and KV tokens), pays one prefill for those admitted together,
    and decodes all of them in lock step. A full cache preempts the sample admitted last, which loses its keys and
    values and waits, as in the engine. Ties go to the lower sample id.
    """

    def __init__(self, sequences: Iterable[SimulatedSequence], costs: CostModel, limits: InstanceLimits) -> None:
        self.costs = costs
        self.clock = 0.0
        self.waiting = deque(sequences)
        self.running: dict[int, SimulatedSequence] = {}  # in order of admission
        self.finished: list[tuple[float, int]] = []  # (seconds, sample id)
        self.all_admitted: float | None = None  # when nothing waited for the first time
        self.context_tokens = 0  # of all running samples
        self._limits = limits
        self._capacity = limits.kv_capacity_tokens
        self._step = 0
        self._ends: list[tuple[int, int]] = []  # heap of (finish step, sample id); stale after a preemption
        self._preempted = False  # nothing is admitted until a sample ends, or two would evict each other

    @property
    def unfinished(self) -> list[SimulatedSequence]:
        return [*self.running.values(), *self.waiting]

    def copy(self) -> InstanceRun:
        """The same state with a future of its own."""
        other = InstanceRun((sequence.copy() for sequence in self.waiting), self.costs, self._limits)
        other.clock, other.context_tokens = self.clock, self.context_tokens
        other.running = {sample_id: sequence.copy() for sample_id, sequence in self.running.items()}
        other.finished, other._ends = list(self.finished), list(self._ends)
        other.all_admitted = self.all_admitted
        other._step, other._preempted = self._step, self._preempted
        return other

    def run(self, until: float = math.inf) -> None:
        """Run to the first step boundary at or after `until`, or until every sample is finished."""
        self.run_events(until)
        if self.clock < until and (self.waiting or self.running):
            steps = self._steps_until(until, self._steps_to_event())
            self._decode(steps, self._decode_seconds(steps))

    def run_events(self, until: float) -> None:
        """Run up to the last event (an admission, an end, a preemption) that is not after `until`.

        Where `run` goes from here does not depend on how often this stopped in between, to the last bit.
        """
        while self.clock < until and (self.waiting or self.running):
            if self._admit():
                continue  # those that a prefill finished have made room for more
            steps = self._steps_to_event()
            if steps == 0:
                self._preempt_last()
                continue
            seconds = self._decode_seconds(steps)
            if self.clock + seconds > until:
                return
            self._decode(steps, seconds)

    def take(self, sequence: SimulatedSequence) -> None:
        """Accept a sample from another instance; with `cached` its keys and values came along."""
        self.waiting.append(sequence)

    def release(self) -> list[SimulatedSequence]:
        """Give up every unfinished sample."""
        given = self.unfinished
        for sequence in self.running.values():
            sequence.done = self._done(sequence)
        self.running.clear()
        self.waiting.clear()
        self.context_tokens = 0
        return given

    def tokens_of(self, sequence: SimulatedSequence) -> int:
        """Prompt and response tokens at the current step."""
        running = sequence.sample_id in self.running
        return sequence.prompt + (self._done(sequence) if running else sequence.done)

    def _done(self, sequence: SimulatedSequence) -> int:
        return sequence.output - (sequence.finish_step - self._step)

    def _admit(self) -> bool:
        """Start waiting samples that fit, in order; a prefill makes each one's next token. Says whether any did."""
        if not self.waiting or self._preempted:
            return False
        prefill_tokens, prefilled, admitted = 0, 0, []
        while self.waiting and len(self.running) < self._limits.max_sequences:
            sequence = self.waiting[0]
            if self.context_tokens + sequence.tokens + len(self.running) + 1 > self._capacity and self.running:
                break
            self.waiting.popleft()
            if not sequence.cached:
                prefill_tokens += sequence.tokens
                prefilled += 1
                sequence.done += 1
            sequence.cached = False
            sequence.finish_step = self._step + sequence.output - sequence.done
            self.running[sequence.sample_id] = sequence
            self.context_tokens += sequence.tokens
            admitted.append(sequence)
        if prefilled:
            self.clock += self.costs.prefill_seconds(prefill_tokens, prefilled)
        if self.all_admitted is None and not self.waiting:
            self.all_admitted = self.clock
        for sequence in admitted:
            heapq.heappush(self._ends, (sequence.finish_step, sequence.sample_id))
        self._retire()
        return bool(admitted)

    def _steps_to_event(self) -> int:
        """Decode steps until a sample ends or the cache is full, whichever is first."""
        room = (self._capacity - self.context_tokens) // len(self.running)
        if room == 0 and len(self.running) == 1:
            room = 1  # one sample always fits (InstanceLimits checks it)
        return min(self._next_end() - self._step, room)

    def _next_end(self) -> int:
        while True:
            step, sample_id = self._ends[0]
            if sample_id in self.running and self.running[sample_id].finish_step == step:
                return step
            heapq.heappop(self._ends)

    def _decode_seconds(self, steps: int) -> float:
        batch = len(self.running)
        middle = self.context_tokens + batch * (steps - 1) / 2
        return steps * self.costs.decode_step_seconds(batch, middle)

    def _steps_until(self, until: float, most: int) -> int:
        """The fewest steps, at least 1, that bring the clock to `until`; seconds grow with steps."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.clock + self._decode_seconds(middle) >= until:
                high = middle
            else:
                low = middle + 1
        return low

    def _decode(self, steps: int, seconds: float) -> None:
        self.clock += seconds
        self._step += steps
        self.context_tokens += steps * len(self.running)
        self._retire()

    def _retire(self) -> None:
        """Let go of the samples that end at this step."""
        while self.running and self._next_end() <= self._step:
            _, sample_id = heapq.heappop(self._ends)
            sequence = self.running.pop(sample_id)
            sequence.done = sequence.output
            self.context_tokens -= sequence.tokens
            self.finished.append((self.clock, sample_id))
            self._preempted = False

    def _preempt_last(self) -> None:
        sample_id, sequence = self.running.popitem()
        sequence.done = self._done(sequence)
        self.context_tokens -= sequence.tokens
        self.waiting.appendleft(sequence)
        self._preempted = True


def start_instances(
    lengths: SampleLengths, instances: int, costs: CostModel, limits: InstanceLimits
) -> list[InstanceRun]:
    """One run per instance at time 0, its share of the samples waiting. Raises InputError for too long ones."""
    check_lengths(lengths, instances, limits)
    shares = split_samples(len(lengths), instances)
    return [
        InstanceRun((SimulatedSequence(i, lengths.prompt[i], lengths.output[i]) for i in share), costs, limits)
        for share in shares
    ]


def check_lengths(lengths: SampleLengths, instances: int, limits: InstanceLimits) -> None:
    """Raise InputError without an instance, and for samples that are longer than the limits say."""
    if instances < 1:
        raise InputError(f"{instances} generation instances; at least 1 is needed")
    if max(lengths.prompt) > limits.max_prompt_tokens or max(lengths.output) > limits.max_output_tokens:
        raise InputError(
            f"lengths up to {max(lengths.prompt)} + {max(lengths.output)} tokens exceed the run's "
            f"{limits.max_prompt_tokens} + {limits.max_output_tokens}; clip them first"
        )
