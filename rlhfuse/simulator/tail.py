"""The instances that still decode: they stop at a trigger, migrate, and go on until a neighbour changes their pace.

What they will do at their present pace is run ahead on copies, so that the caller can go from event to event; a new
pace takes hold at each instance's next step boundary. A meeting waits for the last of them to end its step; then
pairs of instances hand samples over in `transfer_order`, each pair when both are free:

    0  ====|  .. |recv from 2|recv from 3|=====       |: step boundary after the trigger, ..: waits, and they agree
    2  ======|.. |send to 0  |  freed
    3  =====|... |           |send to 0  |  freed

Knows nothing of scoring and of why the pace changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhfuse.costs.analytic import CostModel
from rlhfuse.decisions.migration import (
    FusionLimits,
    MigrationPlan,
    SequenceState,
    plan_at_threshold,
    transfer_order,
)
from rlhfuse.simulator.instances import InstanceLimits, InstanceRun


@dataclass(frozen=True)
class Meeting:
    """One migration: agreed on at `seconds`, and until when each freed instance and destination was at it."""

    seconds: float
    plan: MigrationPlan
    stopped: dict[int, float]  # instance -> its step boundary
    ends: dict[int, float]  # instance -> its last hand-over's end
    moved_bytes: float

    @property
    def migration_seconds(self) -> float:
        return max(self.ends[instance] for instance in self.plan.destinations) - self.seconds


class Tail:
    """Owns the runs of all instances; those in `decoding` have samples left or wait for the meeting."""

    def __init__(self, runs: list[InstanceRun], limits: InstanceLimits, costs: CostModel, fusion: FusionLimits) -> None:
        """`costs` prices the transfers, `fusion` decides who moves and how."""
        self._runs, self._limits, self._costs, self._fusion = runs, limits, costs, fusion
        self.decoding = set(range(len(runs)))
        self._taken = [0] * len(runs)  # samples of each instance's `finished` that the caller has been told of
        self._ahead: list[tuple[float, int, int]] = []  # ends to come (seconds, sample, instance), the last first
        self._futures: dict[int, InstanceRun] = {}  # of the decoding instances, at the present pace

    @property
    def next_end(self) -> float:
        return self._ahead[-1][0] if self._ahead else float("inf")

    def take_known(self) -> list[int]:
        """The samples that are finished up to the last step boundaries."""
        known = [s for run, taken in zip(self._runs, self._taken) for _, s in run.finished[taken:]]
        self._taken = [len(run.finished) for run in self._runs]
        return sorted(known)

    def take_next(self) -> tuple[float, int, int | None]:
        """The next sample that ends: seconds, sample, and the instance if this was its last one."""
        seconds, sample, instance = self._ahead.pop()
        self._taken[instance] += 1
        if instance in self.decoding and self._futures[instance].finished[-1] == (seconds, sample):
            self.decoding.discard(instance)
            self._runs[instance] = self._futures[instance]
            return seconds, sample, instance
        return seconds, sample, None

    def change_pace(self, now: float, costs: CostModel) -> None:
        """Decode at other costs from each instance's next step boundary on."""
        for instance in self.decoding:
            self._runs[instance].run(now)
            self._runs[instance].costs = costs
        self.look_ahead()

    def look_ahead(self) -> None:
        """Find the ends to come at the present pace."""
        ahead = []
        for instance, (run, taken) in enumerate(zip(self._runs, self._taken)):
            future = run
            if instance in self.decoding:
                future = run.copy()
                future.run()
                self._futures[instance] = future
            ahead += [(seconds, sample, instance) for seconds, sample in future.finished[taken:]]
        self._ahead = sorted(ahead, reverse=True)

    def meet(self, now: float, threshold: int) -> Meeting | None:
        """Stop, plan and move at the first step boundaries after `now`; None where nothing is left to decode."""
        for instance in self.decoding:
            self._runs[instance].run(now)
        plan = self._plan(threshold)
        if plan is None:
            return None
        stopped = {instance: run.clock for instance, run in enumerate(self._runs)}
        agreed = max(now, *stopped.values()) + self._costs.meeting_seconds()
        ends = self._hand_over(plan, agreed)
        moved = sum(move.kv_tokens for move in plan.moves) * self._limits.kv_bytes_per_token
        for instance in plan.destinations:
            self._runs[instance].clock = ends[instance]
        self.decoding = {instance for instance in plan.destinations if self._runs[instance].unfinished}
        return Meeting(agreed, plan, stopped, ends, moved)

    def _plan(self, threshold: int) -> MigrationPlan | None:
        limits, block = self._limits, self._limits.block_tokens
        states, free_blocks = [], []
        for instance, run in enumerate(self._runs):
            free = limits.kv_capacity_tokens // block
            for sequence in run.unfinished:
                tokens = run.tokens_of(sequence)
                in_cache = sequence.cached or sequence.sample_id in run.running
                kv_tokens = tokens - 1 if in_cache else 0  # those of the last token come with the next step
                states.append(SequenceState(sequence.sample_id, instance, tokens, kv_tokens))
                free -= -(-kv_tokens // block)
            free_blocks.append(max(0, free))
        return plan_at_threshold(threshold, states, free_blocks, self._fusion)

    def _hand_over(self, plan: MigrationPlan, agreed: float) -> dict[int, float]:
        """Move the samples; until when each instance was at it."""
        sequences = {s.sample_id: s for instance in plan.freed for s in self._runs[instance].release()}
        volumes: dict[tuple[int, int], float] = {}
        for move in plan.moves:
            sequence = sequences[move.sample_id]
            sequence.cached = move.mode == "kv"
            self._runs[move.destination].take(sequence)
            pair = move.source, move.destination
            volumes[pair] = volumes.get(pair, 0.0) + move.kv_tokens * self._limits.kv_bytes_per_token
        ends = dict.fromkeys((*plan.freed, *plan.destinations), agreed)
        for source, destination in transfer_order(plan):
            volume = volumes[source, destination]
            both = max(ends[source], ends[destination])
            ends[source] = ends[destination] = both + (self._costs.migration_seconds(volume) if volume else 0.0)
        return ends
