"""Generation and inference of an iteration simulated, serial or fused (paper sections 4.2 and 6); its seconds by part.

Block rounding, prefill chunks mixed with decode steps, what copies of one prompt share, and the store's round trips
are left out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhfuse.costs.cost_model import CostModel
from rlhfuse.decisions.migration import (
    FusionLimits,
    MigrationPlan,
    SampleMoveCost,
    UnfinishedSample,
    check_threshold,
    plan_at_threshold,
    transfer_order,
)
from rlhfuse.decisions.packing import deal, scoring_packs, split_samples
from rlhfuse.simulator.instances import InstanceLimits, InstanceRun, InstanceSpan, start_instances
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.scoring_queue import SimulatedScoringQueue, first_pack, last_reward_seconds


@dataclass(frozen=True)
class GenInferTimeline:
    """One batch simulated; `spans` tile [0, total_seconds] of every instance."""

    spans: tuple[InstanceSpan, ...]
    total_seconds: float
    generation_seconds: float  # until the last sample is finished
    migration_seconds: float = 0.0  # from the trigger until every destination decodes again
    trigger_seconds: float | None = None  # when the plan was agreed on
    plan: MigrationPlan | None = None  # None where it stayed serial
    migrated_bytes: float = 0.0
    scored_before_generation_end: int = 0
    reward_seconds: float = 0.0  # from the last score until the reward function is done too


@dataclass(frozen=True)
class SimulatedMigration:
    """One migration: agreed on at `seconds`, and until when each instance was at it."""

    seconds: float
    plan: MigrationPlan
    stopped: tuple[float, ...]  # of each instance: its step boundary
    ends: tuple[float, ...]  # of each instance: the end of its last transfer
    moved_bytes: float

    @property
    def migration_seconds(self) -> float:
        return max(self.ends[instance] for instance in self.plan.destinations) - self.seconds


def simulate_gen_infer(
    lengths: SampleLengths, instances: int, costs: CostModel, limits: InstanceLimits, threshold: int
) -> GenInferTimeline:
    """One batch that migrates when `threshold` samples remain; 0, one instance, no tail: serial. Raises InputError."""
    return BatchSimulation(lengths, instances, costs, limits).timeline(threshold)


class BatchSimulation:
    """One batch on so many instances, for any number of thresholds. Fused, with R_t reached at time T (Figure 5):

    0 ============T m ==================w s
    1 =========   T m w sssssss       ss          = generate, m migrate, w weights in, s score:
    2 =====       T m w ssssss       s            the tail's samples are scored as they end
    3 ===========.T m w sssssss

    Every instance stops at its first step boundary after T and they agree there; freed ones load the weights and score.
    Serial waits for the last sample and then scores on all instances, dealt by tokens. What is the same for all
    thresholds is simulated once: generation without a migration, and generation up to the last event before a trigger,
    which goes on from there as long as triggers come later and later.
    """

    def __init__(self, lengths: SampleLengths, instances: int, costs: CostModel, limits: InstanceLimits) -> None:
        """Raises InputError for lengths beyond the limits."""
        self.lengths, self.instances, self.costs, self.limits = lengths, instances, costs, limits
        self.tokens = [limits.padded_score_tokens or p + o for p, o in zip(lengths.prompt, lengths.output)]
        self.fusion_limits = fusion_limits(costs, limits)
        self._live, self._reached = self._fresh(), 0.0
        self._whole = self._fresh()
        for run in self._whole:
            run.run()
        self._ends = sorted(seconds for run in self._whole for seconds, _ in run.finished)

    def timeline(self, threshold: int) -> GenInferTimeline:
        """Generation and inference with this R_t; see `simulate_gen_infer`."""
        check_threshold(threshold, len(self.lengths))
        if threshold and self.instances > 1:
            moment = self.moment(threshold)
            runs = self._runs_at(moment)
            for run in runs:
                run.run(moment)
            plan = self._plan(runs, threshold)
            if plan:
                return self._fused(runs, self._migrate(runs, plan, moment))
        return self._serial()

    def moment(self, remaining: int) -> float:
        """Seconds after which at most `remaining` samples are unfinished; all of them: as soon as a step has ended."""
        return self._ends[-remaining - 1] if remaining < len(self._ends) else math.ulp(0.0)

    def _fresh(self) -> list[InstanceRun]:
        return start_instances(self.lengths, self.instances, self.costs, self.limits)

    def _runs_at(self, seconds: float) -> list[InstanceRun]:
        """Copies of all instances, not later than `seconds`; running them on to any later time is exact."""
        if seconds < self._reached:
            self._live = self._fresh()
        self._reached = seconds
        for run in self._live:
            run.run_events(seconds)
        return [run.copy() for run in self._live]

    # migration ------------------------------------------------------------------------------------------------

    def _plan(self, runs: Sequence[InstanceRun], threshold: int) -> MigrationPlan | None:
        """At the step boundaries where the runs stand."""
        block = self.limits.block_tokens
        states, free_blocks = [], []
        for instance, run in enumerate(runs):
            free = self.limits.kv_capacity_tokens // block
            for sequence in run.unfinished:
                tokens = run.tokens_of(sequence)
                in_cache = sequence.sample_id in run.running
                kv_tokens = tokens - 1 if in_cache else 0  # those of the last token come with the next step
                states.append(UnfinishedSample(sequence.sample_id, instance, tokens, kv_tokens))
                free -= -(-kv_tokens // block)
            free_blocks.append(max(0, free))
        return plan_at_threshold(threshold, states, free_blocks, self.fusion_limits)

    def _migrate(self, runs: Sequence[InstanceRun], plan: MigrationPlan, moment: float) -> SimulatedMigration:
        """Moves the samples, each pair of instances when both are free, in `transfer_order`."""
        stopped = tuple(run.clock for run in runs)
        agreed = max(moment, *stopped) + self.costs.barrier_seconds()
        sequences = {s.sample_id: s for instance in plan.freed for s in runs[instance].release()}
        volumes: dict[tuple[int, int], float] = {}
        for move in plan.moves:
            sequence = sequences[move.sample_id]
            sequence.cached = move.mode == "kv"
            runs[move.destination].take(sequence)
            pair = move.source, move.destination
            volumes[pair] = volumes.get(pair, 0.0) + move.kv_tokens * self.limits.kv_bytes_per_token
        ends = [agreed] * len(runs)
        for source, destination in transfer_order(plan):
            volume = volumes[source, destination]
            both = max(ends[source], ends[destination])
            ends[source] = ends[destination] = both + (self.costs.migration_seconds(volume) if volume else 0.0)
        for instance in plan.destinations:
            runs[instance].clock = ends[instance]
        moved = sum(move.kv_tokens for move in plan.moves) * self.limits.kv_bytes_per_token
        return SimulatedMigration(agreed, plan, stopped, tuple(ends), moved)

    # timelines ------------------------------------------------------------------------------------------------

    def _fused(self, runs: Sequence[InstanceRun], migration: SimulatedMigration) -> GenInferTimeline:
        """From the migration on: the tail decodes, freed instances and those without samples score."""
        finished = sorted(sample for run in runs for _, sample in run.finished)
        queue = SimulatedScoringQueue([self.tokens[sample] for sample in finished], self.instances, self.limits)
        release, spans = self.costs.release_seconds(), []
        tail: list[tuple[float, int, int, bool]] = []  # (seconds, sample, instance, its last one)
        for instance, run in enumerate(runs):
            stopped, end = migration.stopped[instance], migration.ends[instance]
            barrier = max(stopped, migration.seconds - self.costs.barrier_seconds())  # until then it waits
            spans.append(InstanceSpan(instance, "generate", 0.0, stopped))
            spans.append(InstanceSpan(instance, "meet", barrier, migration.seconds))
            spans.append(InstanceSpan(instance, "migrate", migration.seconds, end))
            before = len(run.finished)
            run.run()
            ended = run.finished[before:]
            tail += [(seconds, sample, instance, sample == ended[-1][1]) for seconds, sample in ended]
            if ended:
                spans.append(InstanceSpan(instance, "generate", end, ended[-1][0]))
            else:
                queue.register(end + release, instance, loads=instance in migration.plan.freed)
        heapq.heapify(tail)
        generation = now = migration.seconds
        while now < math.inf:
            queue.pull(now, self.costs)
            now = min(queue.next_seconds, tail[0][0] if tail else math.inf)
            while tail and tail[0][0] <= now:
                generation, sample, instance, last = heapq.heappop(tail)
                queue.put(self.tokens[sample])
                if last:
                    queue.register(generation + release, instance, loads=False, decoded_since=migration.ends[instance])
        return self._rewarded(
            runs,
            [*spans, *queue.spans],
            max(generation, *(span.end for span in queue.spans)),
            generation_seconds=generation,
            migration_seconds=migration.migration_seconds,
            trigger_seconds=migration.seconds,
            plan=migration.plan,
            migrated_bytes=migration.moved_bytes,
            scored_before_generation_end=sum(samples for end, samples in queue.batches if end <= generation),
        )

    def _serial(self) -> GenInferTimeline:
        spans = [InstanceSpan(instance, "generate", 0.0, run.clock) for instance, run in enumerate(self._whole)]
        generation, costs = self._ends[-1], self.costs
        agreed = generation + costs.barrier_seconds()
        spans += [InstanceSpan(instance, "meet", generation, agreed) for instance in range(self.instances)]
        begin = agreed + costs.release_seconds()
        for instance, share in enumerate(deal(self.tokens, self.instances)):
            own = [self.tokens[i] for i in share]
            clock = begin
            for number, pack in enumerate(scoring_packs(own, 1, self.limits.score_tokens)):
                start, seconds = clock, costs.score_seconds(sum(own[i] for i in pack), len(pack))
                clock = start + seconds
                if number == 0:
                    models = self.limits.scoring_models
                    early = self.limits.early_models, self._whole[instance].all_admitted or 0.0
                    ready, clock = first_pack(begin, begin, costs.swap_in_seconds(), seconds, models, *early)
                    start = max(begin, ready)
                    spans.append(InstanceSpan(instance, "swap_in", begin, start))
                spans.append(InstanceSpan(instance, "score", start, clock))
        return self._rewarded(self._whole, spans, max(span.end for span in spans), generation_seconds=generation)

    def _rewarded(
        self, runs: Sequence[InstanceRun], spans: Sequence[InstanceSpan], scored: float, **facts: Any
    ) -> GenInferTimeline:
        """The time line of what ended with the last score, and of waiting for the reward function after that."""
        waits, ended = [], {sample: seconds for run in runs for seconds, sample in run.finished}
        parts = split_samples(len(ended), self.instances) if self.costs.reward_call() else ()
        for instance, part in enumerate(parts):  # by the instance that began a sample
            own = max(span.end for span in spans if span.instance == instance)
            end = last_reward_seconds(sorted(ended[sample] for sample in part), self.costs, self.limits)
            waits.append(InstanceSpan(instance, "reward", max(own, facts["generation_seconds"]), end))
        total = max([scored, *(span.end for span in waits)])
        tiles = _tile([*spans, *waits], self.instances, total)
        return GenInferTimeline(tiles, total, reward_seconds=total - scored, **facts)


def _tile(spans: Sequence[InstanceSpan], instances: int, total: float) -> tuple[InstanceSpan, ...]:
    """Spans by instance and time, gaps filled with idle, empty ones left out."""
    by_instance: list[list[InstanceSpan]] = [[] for _ in range(instances)]
    for span in spans:
        if span.end > span.start:
            by_instance[span.instance].append(span)
    tiled = []
    for instance, own in enumerate(by_instance):
        clock = 0.0
        for span in sorted(own, key=lambda s: s.start):
            if span.start > clock:
                tiled.append(InstanceSpan(instance, "idle", clock, span.start))
            tiled.append(span)
            clock = span.end
        if clock < total:
            tiled.append(InstanceSpan(instance, "idle", clock, total))
    return tuple(tiled)


def move_cost(costs: CostModel, limits: InstanceLimits) -> SampleMoveCost:
    """The two straight lines that decide how a sample moves: through the costs of one block and one longest sample."""
    one, far = limits.block_tokens, max(limits.longest, limits.block_tokens + 1)
    prefill = [costs.prefill_seconds(tokens, 1) for tokens in (one, far)]
    slope = (prefill[1] - prefill[0]) / (far - one)
    volumes = [tokens * limits.kv_bytes_per_token for tokens in (one, far)]
    transfer = [costs.migration_seconds(volume) for volume in volumes]
    per_byte = (transfer[1] - transfer[0]) / (volumes[1] - volumes[0])
    return SampleMoveCost(
        kv_bytes_per_token=limits.kv_bytes_per_token,
        transfer_latency_seconds=transfer[0] - per_byte * volumes[0],
        transfer_seconds_per_byte=per_byte,
        prefill_seconds_per_token=slope,
        prefill_latency_seconds=prefill[0] - slope * one,
    )


def fusion_limits(costs: CostModel, limits: InstanceLimits) -> FusionLimits:
    """What a migration plan depends on, from a cost model and what an instance holds."""
    return FusionLimits(
        bs_max=limits.bs_max,
        sample_kv_bytes=limits.sample_kv_bytes,
        capacity_kv_bytes=limits.kv_capacity_bytes,
        block_tokens=limits.block_tokens,
        move_cost=move_cost(costs, limits),
        score_tokens=limits.score_tokens,
    )


@dataclass(frozen=True)
class IterationSeconds:
    """Predicted seconds of one iteration's parts; `generation_*` within `gen_infer_*`, None where not known apart."""

    weight_moves: float  # into the layouts of generation and inference, one model after the other, fused or not
    gen_infer_serial: float
    gen_infer_fused: float
    training_serial: float
    training_fused: float
    generation_serial: float | None = None
    generation_fused: float | None = None
    capture: float = 0.0  # beside these, of CUDA graphs in every iteration

    @property
    def serial(self) -> float:
        return self.weight_moves + self.capture + self.gen_infer_serial + self.training_serial

    @property
    def fused(self) -> float:
        return self.weight_moves + self.capture + self.gen_infer_fused + self.training_fused

    @property
    def speedup(self) -> float:
        return self.serial / self.fused
