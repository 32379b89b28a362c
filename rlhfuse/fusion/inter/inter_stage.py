"""Generation and inference of one iteration, serial or fused (paper section 4).

Up to the trigger every instance decodes its own samples. When at most R_t remain, all ranks meet at a barrier and
compute the same migration plan; freed instances then score, needing nothing from those that decode the long tail. With
R_t = 0 nobody meets before the last sample is done: serial, the paper's "base". Which rank scores a sample never
changes its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch.distributed as dist

from rlhfuse.base.clock import Clock
from rlhfuse.base.errors import RewardError
from rlhfuse.base.sample_ids import sample_origin
from rlhfuse.fusion.inter.generation import Generation
from rlhfuse.fusion.inter.group_stream import GroupStream, complete_groups
from rlhfuse.fusion.inter.inference import Meeting, Rewarder, Scorer
from rlhfuse.fusion.inter.iteration_store import IterationStore, StoreReporter
from rlhfuse.fusion.inter.migration import MigrationBarrier, execute_migration, gather_states
from rlhfuse.fusion.inter.rank_place import RankPlace
from rlhfuse.fusion.inter.report import CALLS, GenInferReport, RankEvents, summarize, turns_of
from rlhfuse.fusion.inter.request import Request
from rlhfuse.fusion.inter.scoring_queue import ScoringQueue
from rlhfuse.fusion.inter.tools import Tools
from rlhfuse.gen.engine import Engine
from rlhfuse.monitor.heartbeat import Waiting
from rlhfuse.ppo.rollout import Rollout
from rlhfuse.tasks.instance_limits import InstanceLimits
from rlhfuse.tasks.migration import MigrationPlan, check_threshold, plan_at_threshold
from rlhfuse.tasks.packing import split_samples


@dataclass(frozen=True, kw_only=True)
class InterStage:
    """Runs generation and inference on this rank, one iteration after another. Keeps nothing between them."""

    place: RankPlace
    engine: Engine
    scorer: Scorer
    store: dist.Store  # pyright: ignore[reportPrivateImportUsage]  # torch's __all__ lacks it
    timeout_seconds: float
    progress: Callable[[str], None]
    bucket_bytes: int  # most memory that moving keys and values takes on a rank beside the caches
    early_models: int = 0  # of the scorer's, the first so many have room before the engine drops its cache
    rewarder: Rewarder | None = None  # asked on the leader of every instance
    tools: Tools | None = None  # on every rank, where samples have turns
    # called on every rank when its engine is paused, before what scores comes in: give back the actor's weights
    generation_done: Callable[[], None] = lambda: None
    clock: Clock = field(default_factory=Clock)  # this rank's, whose observations each iteration takes

    def run(
        self,
        iteration: int | str,
        requests: Sequence[Request],
        threshold: int,
        limits: InstanceLimits,
        stream: GroupStream | None = None,
    ) -> GenInferReport:
        """Generate and score `requests`, the whole batch, the same on every rank; `iteration` is a name no other has.

        `threshold` (R_t): how many samples remain when instances are freed; 0 is serial, and so is a single instance.
        `stream`: groups that may begin up to then; the report has those that are whole.
        The engine must hold the actor's weights and a KV cache, which it drops or keeps; the scorer's stay offloaded.
        Raises InputError at once for a threshold beyond the batch, RewardError for a sample that was given no score.
        """
        check_threshold(threshold, len(requests))
        return GenInferIteration(self, iteration, requests, threshold, limits, stream).run()


class GenInferIteration:
    """One iteration on this rank. Fused, seen from four instances, with R_t unfinished samples left at the trigger:

    0  decode ............| barrier, receive KV | decode the long tail ......... | join scoring
    1  decode ............| barrier, send KV    | load weights | score | score | score
    2  decode .......     | barrier, send KV    | load weights | score | score | score
    3  decode ............| barrier, send KV    | load weights | score | score | score

    Where memory has room, 0 loads weights while it decodes the long tail; serial instances, once nothing waits there.
    """

    def __init__(
        self,
        stage: InterStage,
        iteration: int | str,
        requests: Sequence[Request],
        threshold: int,
        limits: InstanceLimits,
        stream: GroupStream | None,
    ) -> None:
        self._stage, self._place, self._engine = stage, stage.place, stage.engine
        self._requests, self._threshold, self._limits, self._stream = requests, threshold, limits, stream
        self._store = IterationStore(stage.store, iteration, stage.timeout_seconds, stage.clock)
        self._clock = stage.clock
        self._decoders = stage.place.decoders
        self._instance, self._instances = stage.place.instance, len(stage.place.placement.instances)
        self._events = RankEvents()
        self._finished: list[Rollout] = []  # at the barrier, of the whole batch
        self._tail: list[int] = []  # ids of those unfinished then: they will be published
        self._begun = 0  # samples of all instances
        self._whole = self._clock.begin()

    def run(self) -> GenInferReport:
        try:
            with ExitStack() as stack:
                reporter = None
                if self._decoders.is_leader:
                    reporter = stack.enter_context(StoreReporter(self._store, scores=self._stream is not None))
                self._generate(reporter)
            scored = self._infer()
        finally:
            self._stage.scorer.release()  # where something failed
        report = self._gather(scored)
        report.total_seconds = self._whole.seconds
        if self._place.rank == 0:
            self._store.clear(self._instances)
        return report

    def _generate(self, reporter: StoreReporter | None) -> None:
        """Until nothing is left for this instance to decode; the engine is then paused."""
        total, instances, forward = len(self._requests), self._instances, self._engine.forward
        shapes, seconds = forward.recorded_shapes, forward.recording_seconds
        generation = Generation(
            self._engine,
            self._decoders,
            reporter,
            self._stage.rewarder,
            self._events,
            total,
            self._stage.progress,
            lambda: self._stage.scorer.begin_load(self._stage.early_models),
            self._store,
            self._stream,
            self._stage.tools,
        )
        unit = self._stream.copies if self._stream else 1  # a group is scored where it began
        for i in split_samples(total // unit, instances)[self._instance]:
            generation.add(self._requests[i * unit : (i + 1) * unit])
        finished = generation.decode_until(self._threshold if instances > 1 else 0)
        with self._clock.work("meet") as met:
            self._stage.progress(Waiting("inter-stage: barrier of all instances"))
            self._finished, barrier = gather_states(self._place, self._engine, finished, generation.began)
        self._tail, self._begun = [state.sample_id for state in barrier.states], sum(map(len, barrier.began))
        if self._stage.rewarder and self._decoders.is_leader:
            meeting = Meeting(self._instance, barrier.began, self._finished, self._tail, self._store)
            self._stage.rewarder.meet(meeting)
        plan = plan_at_threshold(self._threshold, barrier.states, barrier.free_blocks, self._limits)
        if plan:
            with self._clock.work("migrate"):
                self._migrate(barrier, plan)
        if self._decoders.is_leader:
            moved = sum(pair.seconds for pair in self._events.migrations)
            self._events.barrier_seconds = max(0.0, self._clock.now() - met.start - moved)
        if plan and self._instance in plan.destinations:
            generation.decode_tail()
        self._events.capture_seconds = forward.recording_seconds - seconds
        if recorded := forward.recorded_shapes - shapes:
            self._clock.observe("capture", recorded, self._events.capture_seconds)
        with self._clock.work() as release:
            self._engine.pause()
            self._stage.generation_done()
        self._clock.observe("release", release.seconds)

    def _migrate(self, barrier: MigrationBarrier, plan: MigrationPlan) -> None:
        stage, engine, events = self._stage, self._engine, self._events
        stage.progress(f"inter-stage: migration of {len(plan.moves)} samples")
        tools = stage.tools if self._decoders.is_leader else None
        if tools and (leaving := [move.sample_id for move in plan.moves_from(self._instance)]):
            tools.hand_over(leaving, self._store)
        pairs = execute_migration(plan, self._place, engine, stage.bucket_bytes, self._clock)
        if tools and (come := [move.sample_id for move in plan.moves if move.destination == self._instance]):
            tools.adopt(come, self._store)
        block_tokens = engine.options.block_tokens
        block_bytes = block_tokens * engine.spec.kv_bytes_per_token(engine.dtype.itemsize)
        events.plan = plan
        events.bytes_needed = barrier.bytes_needed(plan, block_tokens, block_bytes)
        if self._decoders.is_leader:
            events.migrations += pairs

    def _infer(self) -> list[Rollout]:
        """Score until no work is left; returns this worker's samples, at its leader."""
        queue = ScoringQueue(
            self._store,
            self._place,
            self._stage.scorer,
            self._limits.score_tokens,
            self._events,
            self._stage.progress,
        )
        if not self._tail:
            return queue.score_share(self._finished)
        if self._events.plan and {*self._place.spanned} <= {*self._events.plan.freed}:
            queue.register()
        return queue.pull(self._finished, len(self._tail), len(self._finished) + len(self._tail))

    def _gather(self, scored: list[Rollout]) -> GenInferReport:
        """Every rank gets every scored sample, the scores alone where it has the rest, and sums of what happened."""
        rewarder, self._events.scored_seconds = self._stage.rewarder, self._whole.seconds
        if rewarder and self._decoders.is_leader:
            with self._clock.work(CALLS):
                self._stage.progress("inference: waiting for the reward function")
                self._events.function_scores = rewarder.finish()
                self._clock.observe(CALLS, *rewarder.take_calls())
        self._events.rewarded_seconds = self._whole.seconds
        observed = self._clock.take_observed()
        if self._decoders.is_leader:  # what tensor ranks do together counts once
            self._events.observed = observed
        self._stage.progress(Waiting("inter-stage: gathering scored samples"))
        known = {rollout.sample_id: rollout for rollout in self._finished}
        own = [(r.sample_id, r.scores_alone()) if r.sample_id in known else r for r in scored]
        everyone = self._place.gather((self._events, own))
        report = summarize([events for events, _ in everyone])
        rollouts = [
            one if isinstance(one, Rollout) else known[one[0]].with_scores(*one[1])
            for _, part in everyone
            for one in part
        ]
        rollouts.sort(key=lambda rollout: rollout.sample_id)
        ended = sorted([*known, *self._tail])
        if [rollout.sample_id for rollout in rollouts] != ended or (not self._stream and self._begun != len(ended)):
            raise RuntimeError(f"{self._begun} samples were to be scored, {len(rollouts)} came back")
        if self._stream:  # a group of which some were dropped is none
            whole = complete_groups(ended, self._stream.copies)
            rollouts = [rollout for rollout in rollouts if sample_origin(rollout.sample_id)[1] in whole]
        report.rollouts, report.begun, report.aborted = rollouts, self._begun, self._begun - len(ended)
        if self._stage.tools:
            report.turns = turns_of(rollouts, [events for events, _ in everyone])
            report.ended = {sample: after for events, _ in everyone for sample, after in events.ended.items()}
        given = report.function_scores
        if rewarder and (missing := [r.sample_id for r in report.rollouts if r.sample_id not in given]):
            raise RewardError(f"sample {missing[0]}: the reward function gave it no score")
        return report
