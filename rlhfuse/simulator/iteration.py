"""One iteration on paper: generation and inference, serial or fused, then training.

Fused, with n = 4 instances and R_t reached at time T (paper Figure 5); `=` generate, `m` migrate, `w` weights in,
`s` score:

    0 ============T m ==================w s
    1 =========   T m w sssssss       ss          the tail's samples are scored as they end
    2 =====       T m w ssssss       s
    3 ===========.T m w sssssss

Every instance stops at its first step boundary after T and they agree there; a destination goes on when its own
keys and values have arrived, a freed one when its own have left. Serial (R_t = 0) waits for the last sample and
then scores on all instances. Scoring takes ready samples in order of completion, in packed batches.

Knows nothing of how R_t is chosen (threshold.py). Paper sections 4.2 and 6.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Sequence

from rlhfuse.errors import InputError
from rlhfuse.simulator.cost import CostModel
from rlhfuse.simulator.generation import InstanceLimits, InstanceRun, start_instances
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.migration import MigrationPlan, MoveCost, SequenceState, destination_count, plan_migration


@dataclass(frozen=True)
class Span:
    """What one instance does from `start` to `end`, in seconds of the iteration."""

    instance: int
    kind: str  # generate, migrate, swap_in, score or idle
    start: float
    end: float


@dataclass(frozen=True)
class GenInferTimeline:
    """The simulated generation and inference of one batch.

    `plans` holds the migrations in order, none where it stayed serial; `trigger_seconds` when each was agreed on;
    `spans` tile [0, total_seconds] of every instance.
    """

    spans: tuple[Span, ...]
    total_seconds: float
    generation_seconds: float  # until the last sample is finished
    migration_seconds: float  # from each trigger until every destination decodes again
    trigger_seconds: tuple[float, ...]
    plans: tuple[MigrationPlan, ...]
    migrated_bytes: float
    scored_before_generation_end: int

    def of(self, instance: int) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.instance == instance)


def simulate_gen_infer(
    lengths: SampleLengths, instances: int, costs: CostModel, limits: InstanceLimits, triggers: Sequence[int]
) -> GenInferTimeline:
    """Simulate one batch that migrates when so many samples remain; no trigger, a single instance or no tail: serial.

    Raises InputError for triggers that do not descend within [1, samples] and for lengths beyond the limits.
    """
    check_triggers(triggers, len(lengths))
    threshold = triggers[0] if triggers else 0
    runs = start_instances(lengths, instances, costs, limits)
    if threshold == 0 or instances == 1:
        return _serial(lengths, runs, costs, limits)
    trigger = _trigger_seconds(lengths, instances, costs, limits, threshold)
    for run in runs:
        run.run(until=trigger)
    if not any(run.unfinished for run in runs):
        return _serial(lengths, start_instances(lengths, instances, costs, limits), costs, limits)
    return _Fused(lengths, runs, costs, limits, threshold).simulate()


def check_triggers(triggers: Sequence[int], samples: int) -> None:
    """Raises InputError unless the numbers of remaining samples descend strictly within [1, samples]."""
    for trigger, before in zip(triggers, [samples + 1, *triggers]):
        if not 1 <= trigger < before:
            shown = ", ".join(map(str, triggers))
            raise InputError(f"triggers {shown}: descending numbers from 1 to the {samples} samples are needed")


def _trigger_seconds(
    lengths: SampleLengths, instances: int, costs: CostModel, limits: InstanceLimits, threshold: int
) -> float:
    """The moment at which no more than `threshold` samples are unfinished."""
    runs = start_instances(lengths, instances, costs, limits)
    for run in runs:
        run.run()
    ends = sorted(seconds for run in runs for seconds, _ in run.finished)
    return ends[len(ends) - threshold - 1] if threshold < len(ends) else 0.0


def _serial(
    lengths: SampleLengths, runs: list[InstanceRun], costs: CostModel, limits: InstanceLimits
) -> GenInferTimeline:
    spans = []
    for instance, run in enumerate(runs):
        run.run()
        spans.append(Span(instance, "generate", 0.0, run.clock))
    generation = max(run.clock for run in runs)
    ready = [(generation, limits.scored_tokens(p, o)) for p, o in zip(lengths.prompt, lengths.output)]
    scoring = _score(ready, [(generation, instance) for instance in range(len(runs))], costs, limits)
    total = max(span.end for span in scoring.spans)
    return GenInferTimeline(
        spans=_tile([*spans, *scoring.spans], len(runs), total),
        total_seconds=total,
        generation_seconds=generation,
        migration_seconds=0.0,
        trigger_seconds=(),
        plans=(),
        migrated_bytes=0.0,
        scored_before_generation_end=0,
    )


class _Fused:
    """The fused time line from the trigger on; it owns the runs, which stand at their first boundary after it."""

    def __init__(
        self,
        lengths: SampleLengths,
        runs: list[InstanceRun],
        costs: CostModel,
        limits: InstanceLimits,
        threshold: int,
    ) -> None:
        self.lengths, self.runs, self.costs, self.limits = lengths, runs, costs, limits
        self.threshold = threshold
        self.spans: list[Span] = []

    def simulate(self) -> GenInferTimeline:
        agreed = max(run.clock for run in self.runs)
        for instance, run in enumerate(self.runs):
            self.spans.append(Span(instance, "generate", 0.0, run.clock))
        plan = self._plan()
        resumed, freed = self._migrate(plan, agreed)
        workers = [(seconds, instance) for instance, seconds in freed.items()]
        for instance in plan.destinations:
            run = self.runs[instance]
            run.clock = resumed[instance]
            run.run()
            self.spans.append(Span(instance, "generate", resumed[instance], run.clock))
            workers.append((run.clock, instance))
        finished = sorted(end for run in self.runs for end in run.finished)
        generation = finished[-1][0]
        scoring = _score(self._ready(finished), workers, self.costs, self.limits)
        self.spans += scoring.spans
        total = max(span.end for span in self.spans)
        return GenInferTimeline(
            spans=_tile(self.spans, len(self.runs), total),
            total_seconds=total,
            generation_seconds=generation,
            migration_seconds=max(resumed.values()) - agreed,
            trigger_seconds=(agreed,),
            plans=(plan,),
            migrated_bytes=sum(move.kv_tokens for move in plan.moves) * self.limits.kv_bytes_per_token,
            scored_before_generation_end=scoring.done_before(generation),
        )

    def _ready(self, finished: list[tuple[float, int]]) -> list[tuple[float, int]]:
        tokens = self.limits.scored_tokens
        return [(end, tokens(self.lengths.prompt[i], self.lengths.output[i])) for end, i in finished]

    def _plan(self) -> MigrationPlan:
        limits, block = self.limits, self.limits.block_tokens
        states, free_blocks = [], []
        for instance, run in enumerate(self.runs):
            free = limits.kv_capacity_tokens // block
            for sequence in run.unfinished:
                tokens = run.tokens_of(sequence)
                running = sequence.sample_id in run.running
                states.append(SequenceState(sequence.sample_id, instance, tokens, tokens if running else 0))
                free -= -(-tokens // block) if running else 0
            free_blocks.append(max(0, free))
        count = destination_count(
            self.threshold, limits.bs_max, limits.sample_kv_bytes, limits.kv_capacity_bytes, len(self.runs)
        )
        cost = move_cost(self.costs, limits)
        return plan_migration(states, len(self.runs), count, free_blocks, block, cost)

    def _migrate(self, plan: MigrationPlan, agreed: float) -> tuple[dict[int, float], dict[int, float]]:
        """Move the samples. Returns when each destination decodes again and when each freed instance is free."""
        sent = {instance: 0.0 for instance in plan.freed}
        received = {instance: 0.0 for instance in plan.destinations}
        sequences = {s.sample_id: s for i in plan.freed for s in self.runs[i].release()}
        for move in plan.moves:
            sequence = sequences[move.sample_id]
            sequence.cached = move.mode == "kv"
            self.runs[move.destination].take(sequence)
            volume = move.kv_tokens * self.limits.kv_bytes_per_token
            sent[move.source] += volume
            received[move.destination] += volume
        freed = {instance: agreed + self._transfer(volume) for instance, volume in sent.items()}
        resumed = {}
        for instance, volume in received.items():
            sources = {move.source for move in plan.moves_to(instance) if move.kv_tokens}
            resumed[instance] = max([agreed + self._transfer(volume), *(freed[source] for source in sources)])
        for instance, end in (*freed.items(), *resumed.items()):
            self.spans.append(Span(instance, "migrate", agreed, end))
        return resumed, freed

    def _transfer(self, volume: float) -> float:
        return self.costs.migration_seconds(volume) if volume else 0.0


def move_cost(costs: CostModel, limits: InstanceLimits) -> MoveCost:
    """The two straight lines that decide how a sample moves, read off a cost model.

    The lines go through one block and one longest sample, so they are exact for linear costs.
    """
    one, longest = limits.block_tokens, limits.max_prompt_tokens + limits.max_output_tokens
    far = max(longest, one + 1)
    prefill = [costs.prefill_seconds(tokens, 1) for tokens in (one, far)]
    slope = (prefill[1] - prefill[0]) / (far - one)
    volumes = [tokens * limits.kv_bytes_per_token for tokens in (one, far)]
    transfer = [costs.migration_seconds(volume) for volume in volumes]
    per_byte = (transfer[1] - transfer[0]) / (volumes[1] - volumes[0])
    return MoveCost(
        kv_bytes_per_token=limits.kv_bytes_per_token,
        transfer_latency_seconds=transfer[0] - per_byte * volumes[0],
        transfer_seconds_per_byte=per_byte,
        prefill_seconds_per_token=slope,
        prefill_latency_seconds=prefill[0] - slope * one,
    )


@dataclass(frozen=True)
class _Scoring:
    spans: tuple[Span, ...]
    batches: tuple[tuple[float, int], ...]  # (end, samples)

    def done_before(self, seconds: float) -> int:
        return sum(count for end, count in self.batches if end <= seconds)


def _score(
    ready: Sequence[tuple[float, int]],
    workers: Sequence[tuple[float, int]],
    costs: CostModel,
    limits: InstanceLimits,
) -> _Scoring:
    """Score samples (ready seconds, tokens), ordered by time, on workers (free seconds, instance).

    A worker first loads the weights. The earliest free worker takes ready samples up to the level at which all
    workers would end together, and to `score_tokens`, but at least one sample.
    """
    heap = [(seconds + costs.swap_in_seconds(), instance) for seconds, instance in workers]
    free_since = {instance: seconds for seconds, instance in workers}
    heapq.heapify(heap)
    times = [seconds for seconds, _ in ready]
    total = [0, *accumulate(tokens for _, tokens in ready)]
    spans: list[Span] = []
    batches: list[tuple[float, int]] = []
    first = 0
    while first < len(ready):
        free, instance = heapq.heappop(heap)
        if instance in free_since:  # only a worker that scores pays for the weights
            since = free_since.pop(instance)
            spans.append(Span(instance, "swap_in", since, free))
        start = max(free, times[first])
        available = bisect_right(times, start)
        tokens = total[available] - total[first]
        work = costs.score_seconds(tokens, available - first)
        part = (_level([start, *(other for other, _ in heap)], work) - start) / work if work > 0 else 1.0
        share = min(limits.score_tokens, math.ceil(part * tokens - 1e-6))
        last = max(first + 1, bisect_right(total, total[first] + share, first, available + 1) - 1)
        end = start + costs.score_seconds(total[last] - total[first], last - first)
        spans.append(Span(instance, "score", start, end))
        batches.append((end, last - first))
        heapq.heappush(heap, (end, instance))
        first = last
    return _Scoring(tuple(spans), tuple(batches))


def _level(free: Sequence[float], work: float) -> float:
    """The time at which workers that become free at `free` have done `work` seconds together, ending as one."""
    total = 0.0
    ordered = sorted(free)
    for count, (seconds, following) in enumerate(zip(ordered, [*ordered[1:], math.inf]), 1):
        total += seconds
        level = (work + total) / count
        if level <= following:
            return level
    raise AssertionError("the last worker's following time is infinite")


def _tile(spans: Sequence[Span], instances: int, total: float) -> tuple[Span, ...]:
    """Spans by instance and time, gaps filled with idle, empty ones left out."""
    tiled = []
    for instance in range(instances):
        clock = 0.0
        for span in sorted((s for s in spans if s.instance == instance and s.end > s.start), key=lambda s: s.start):
            if span.start > clock:
                tiled.append(Span(instance, "idle", clock, span.start))
            tiled.append(span)
            clock = span.end
        if clock < total:
            tiled.append(Span(instance, "idle", clock, total))
    return tuple(tiled)


@dataclass(frozen=True)
class IterationSeconds:
    """Predicted seconds of one iteration's two parts, serial and fused."""

    gen_infer_serial: float
    gen_infer_fused: float
    training_serial: float
    training_fused: float

    @property
    def serial(self) -> float:
        return self.gen_infer_serial + self.training_serial

    @property
    def fused(self) -> float:
        return self.gen_infer_fused + self.training_fused

    @property
    def speedup(self) -> float:
        return self.serial / self.fused

    def to_dict(self) -> dict:
        return asdict(self)


def simulate_iteration(
    lengths: SampleLengths,
    instances: int,
    costs: CostModel,
    limits: InstanceLimits,
    triggers: Sequence[int],
    minibatch_seconds: tuple[float, float],
    minibatches: int,
) -> IterationSeconds:
    """A whole iteration; `minibatch_seconds` are a mini-batch's training makespans (serial, fused)."""
    serial = simulate_gen_infer(lengths, instances, costs, limits, ()).total_seconds
    fused = simulate_gen_infer(lengths, instances, costs, limits, triggers).total_seconds
    return IterationSeconds(serial, fused, minibatch_seconds[0] * minibatches, minibatch_seconds[1] * minibatches)
