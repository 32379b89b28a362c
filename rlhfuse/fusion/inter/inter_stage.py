"""Generation and inference of one iteration, serial or fused (paper section 4).

Fused, seen from four instances, with R_t unfinished samples left at the trigger:

    0  decode ............| meet, receive KV | decode the long tail ......... | join scoring
    1  decode ............| meet, send KV    | load weights | score | score | score
    2  decode .......     | meet, send KV    | load weights | score | score | score
    3  decode ............| meet, send KV    | load weights | score | score | score

Up to the first trigger every instance decodes its own samples (generation.py); its leader has finished samples
counted in the store, beside the step (courier.py). When at most R_t remain, all ranks meet once, exchange who holds
what, and compute the same migration plan (meeting.py), which they carry out pair by pair (hand_over.py). From then
on a freed instance needs nothing from one that decodes: scoring work is drawn (scoring_desk.py), first the samples
known at the meeting, then the long tail's as they are published. At a further trigger the instances that still
decode meet among themselves, and free some more. Which rank scores a sample depends on time, its numbers don't.
Without a trigger nobody meets before the last sample is done: serial, the paper's "base".
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch.distributed as dist

from rlhfuse.decisions.migration import MigrationPlan
from rlhfuse.decisions.placement import Placement
from rlhfuse.errors import RewardError
from rlhfuse.fusion.inter.generation import Generation
from rlhfuse.fusion.inter.hand_over import hand_over
from rlhfuse.fusion.inter.inference import Rewarder, Scorer
from rlhfuse.fusion.inter.iteration_store import Board
from rlhfuse.fusion.inter.migration_barrier import Meeting, meet_all, note_of
from rlhfuse.fusion.inter.report import Diary, GenInferReport, Stop, summarize
from rlhfuse.fusion.inter.request import FusionLimits, Request
from rlhfuse.fusion.inter.scoring_queue import ScoringDesk
from rlhfuse.fusion.inter.store_reporter import Courier
from rlhfuse.fusion.inter.team import Team
from rlhfuse.gen.engine import Engine
from rlhfuse.gen.migration.migration import BUCKET_BYTES
from rlhfuse.parallel.collectives import all_gather_bytes
from rlhfuse.ppo.rollout import Rollout, pack_rollouts, unpack_rollouts
from rlhfuse.simulator.instances import split_samples
from rlhfuse.simulator.iteration import check_triggers

__all__ = ["FusionLimits", "GenInferReport", "InterStage", "Request"]


def _nothing() -> None:
    """What is done at the end of generation where nobody asked for anything."""


class InterStage:
    """Runs generation and inference on this rank, one iteration after another. Keeps nothing between them."""

    def __init__(
        self,
        rank: int,
        placement: Placement,
        engine: Engine,
        scorer: Scorer,
        store: dist.Store,
        *,
        instance_group: dist.ProcessGroup,
        worker_group: dist.ProcessGroup,
        timeout_seconds: float,
        progress: Callable[[str], None],
        bucket_bytes: int = BUCKET_BYTES,
        rewarder: Rewarder | None = None,
        generation_done: Callable[[], None] = _nothing,
    ) -> None:
        """`bucket_bytes`: most memory that moving keys and values takes on a rank beside the caches.

        `generation_done` is called on every rank when its engine is paused and decodes no more, before what scores
        comes in: the time to give back the actor's weights.

        `rewarder` is asked on the leader of every instance. Its scores stay apart from a reward model's.
        """
        self._rank = rank
        self._placement = placement
        self._engine = engine
        self._scorer = scorer
        self._store = store
        self._instance = placement.instance_of(rank)
        self._worker = placement.worker_of(rank)
        self._decoders = Team(placement.instances[self._instance], rank, instance_group)
        self._scorers = Team(placement.workers[self._worker], rank, worker_group)
        self._timeout = timeout_seconds
        self._progress = progress
        self._bucket_bytes = bucket_bytes
        self._rewarder = rewarder
        self._generation_done = generation_done

    def run(
        self, iteration: int, requests: Sequence[Request], triggers: Sequence[int], limits: FusionLimits
    ) -> GenInferReport:
        """Generate and score `requests`, the whole batch, the same on every rank.

        `triggers`: numbers of remaining samples at which instances are freed, strictly descending; () is serial,
        and so is a single instance. The engine must hold the actor's weights and a KV cache, the scorer's weights
        must be offloaded. Returns with the KV cache dropped and the scorer's weights released. Raises InputError,
        before anything is done, for triggers that do not descend or exceed the batch; RewardError for a sample to
        which the reward function gave no score.
        """
        check_triggers(triggers, len(requests))
        begin, total = time.time(), len(requests)
        board = Board(self._store, iteration, self._timeout)
        diary = Diary(self._decoders.leads)
        with ExitStack() as stack:
            courier = stack.enter_context(Courier(board)) if self._decoders.leads else None
            generation = Generation(
                self._engine,
                self._decoders,
                courier,
                self._rewarder,
                diary,
                len(self._placement.instances),
                total,
                self._progress,
            )
            share = split_samples(total, len(self._placement.instances))[self._instance]
            generation.add([requests[position] for position in share])
            known, tail_samples = self._generate(board, generation, triggers, limits, diary)
        scored = self._infer(board, known, tail_samples, total, limits, diary)
        report = self._gather(scored, diary)
        if [one.sample_id for one in report.rollouts] != sorted(request.sample_id for request in requests):
            raise RuntimeError(f"{total} samples were to be scored, {len(report.rollouts)} came back")
        report.begin_seconds, report.total_seconds = begin, time.time() - begin
        if self._rank == 0:
            board.clear(len(triggers), len(self._placement.instances))
        return report

    # generation -----------------------------------------------------------------------------------------------

    def _generate(
        self, board: Board, generation: Generation, triggers: Sequence[int], limits: FusionLimits, diary: Diary
    ) -> tuple[list[Rollout], int]:
        """Until nothing is left for this instance to decode; the engine is then paused.

        Returns the samples known at the first meeting, and how many were unfinished there and will be published.
        """
        first = triggers[0] if len(self._placement.instances) > 1 and triggers else 0
        done = generation.head(first)
        stopped = time.time()
        self._progress("inter-stage: meeting of all instances")
        known, meeting = meet_all(self._placement, self._engine, done, self._decoders.leads)
        diary.span("meet", stopped, time.time())
        left = len(meeting.states)
        if left:
            self._free_instances(board, generation, meeting, stopped, triggers, limits, diary)
        else:
            diary.met(0, time.time() - stopped)
        over = time.perf_counter()
        self._engine.pause()
        self._generation_done()
        diary.observe("release", time.perf_counter() - over)
        return known, left

    def _free_instances(
        self,
        board: Board,
        generation: Generation,
        meeting: Meeting,
        stopped: float,
        triggers: Sequence[int],
        limits: FusionLimits,
        diary: Diary,
    ) -> None:
        """From the first meeting on, through further ones, until this instance is freed or has decoded its last."""
        decoding = meeting.among
        for number, trigger in enumerate(triggers):
            if number > 0:
                stopped = time.time()
                meeting = self._meet_again(board, number, decoding)
                diary.span("meet", stopped, time.time())
            decoding = meeting.among
            plan = meeting.plan(trigger, limits)
            if plan is not None:
                decoding = plan.destinations
                self._migrate(meeting, plan, stopped, diary)
                diary.met(len(diary.plans) - 1, time.time() - stopped)
                if self._instance in plan.freed:
                    return
            following = triggers[number + 1] if number + 1 < len(triggers) and len(decoding) > 1 else 0
            generation.tail(following, len(decoding) - 1)
            if not self._engine.has_unfinished():
                if following and self._decoders.leads:
                    board.bring(number + 1, self._instance, note_of(self._engine, left=True))
                return

    def _meet_again(self, board: Board, number: int, decoding: Sequence[int]) -> Meeting:
        """A later meeting, among the instances that decoded after the one before."""
        self._progress(f"inter-stage: meeting {number} of instances {' '.join(map(str, decoding))}")
        if self._decoders.leads:
            board.bring(number, self._instance, note_of(self._engine))
        return Meeting.of(board.notes(number, decoding), len(self._placement.instances))

    def _migrate(self, meeting: Meeting, plan: MigrationPlan, stopped: float, diary: Diary) -> None:
        """Carry the plan out."""
        start, number = time.time(), len(diary.plans)
        self._progress(f"inter-stage: migration of {len(plan.moves)} samples")
        done = hand_over(number, plan, self._placement, self._rank, self._engine, self._bucket_bytes)
        block_tokens = self._engine.options.block_tokens
        block_bytes = block_tokens * self._engine.spec.kv_bytes_per_token(self._engine.dtype.itemsize)
        diary.plans.append(plan)
        diary.bytes_needed += meeting.bytes_needed(plan, block_tokens, block_bytes)
        if self._decoders.leads:
            diary.hand_overs += done
            diary.stops.append(Stop(number, self._instance, stopped, time.time()))
        diary.span("migrate", start, time.time())

    # inference ------------------------------------------------------------------------------------------------

    def _infer(
        self, board: Board, known: list[Rollout], tail_samples: int, total: int, limits: FusionLimits, diary: Diary
    ) -> list[Rollout]:
        """Score until no work is left; returns this worker's samples, at its leader."""
        workers = len(self._placement.workers)
        desk = ScoringDesk(
            board, self._scorers, self._scorer, self._worker, workers, limits.score_tokens, diary, self._progress
        )
        if not tail_samples:
            return desk.score_share(known)
        if diary.plans and self._instance in diary.plans[-1].freed:
            desk.join()
        return desk.draw(known, tail_samples, total)

    def _gather(self, scored: list[Rollout], diary: Diary) -> GenInferReport:
        """Every rank gets every scored sample, and the sums of what happened."""
        scores: dict[int, float] = {}
        if self._rewarder and self._decoders.leads:
            self._progress("inference: waiting for the reward function")
            scores = self._rewarder.finish()
        self._progress("inter-stage: gathering scored samples")
        told = [json.loads(data) for data in all_gather_bytes(diary.to_json(scores))]
        rollouts = [r for data in all_gather_bytes(pack_rollouts(scored)) for r in unpack_rollouts(data)]
        given = {sample: score for one in told for sample, score in one["scores"]}
        report = summarize(told)
        report.rollouts = sorted(rollouts, key=_sample_id)
        report.function_scores = given
        if self._rewarder and (missing := [r.sample_id for r in report.rollouts if r.sample_id not in given]):
            raise RewardError(f"sample {missing[0]}: the reward function gave it no score")
        report.spans = diary.spans
        return report


def _sample_id(rollout: Rollout) -> int:
    return rollout.sample_id
