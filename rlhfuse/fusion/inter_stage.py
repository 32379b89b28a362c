"""Generation and inference of one iteration, serial or fused (paper section 4).

Fused, seen from four instances, with R_t unfinished samples left at the trigger:

    0  decode ............| gather plan, receive KV | decode the long tail ....... | join scoring
    1  decode ............| gather plan, send KV    | load weights | score | score | score
    2  decode .......     | gather plan, send KV    | load weights | score | score | score
    3  decode ............| gather plan, send KV    | load weights | score | score | score

Up to the trigger every instance decodes its own samples; leaders count finished samples in the store. When at
most R_t remain, all ranks meet once, exchange who holds what, and compute the same migration plan. From then on
a freed instance needs nothing from one that decodes: scoring work is drawn by ticket, first the samples known at
the meeting, then the long tail's as they are published. Which rank scores a sample depends on time, its numbers
don't. With R_t = 0 there is no meeting before the last sample is done: serial, the paper's "base".
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from typing import Callable, Sequence

import torch
import torch.distributed as dist

from rlhfuse.fusion.board import Board
from rlhfuse.fusion.inference import Rewarder, Scorer, pack_by_tokens
from rlhfuse.fusion.placement import Placement
from rlhfuse.gen.engine import Engine
from rlhfuse.gen.migration import BUCKET_BYTES
from rlhfuse.gen.sequence import GenerationResult, SamplingParams
from rlhfuse.gen.transfer import HeadPlan, receive_shipment, send_shipment
from rlhfuse.parallel.collect import all_gather_bytes
from rlhfuse.ppo.balance import partition
from rlhfuse.ppo.rollout import Rollout, pack_rollouts, unpack_rollouts
from rlhfuse.simulator.generation import split_samples
from rlhfuse.simulator.migration import MigrationPlan, MoveCost, SequenceState, destination_count, plan_migration

STEPS_BETWEEN_POLLS = 4  # decode steps after which a leader reads the count though none of its own finished
IDLE_SECONDS = 0.002  # sleep of an instance that has nothing left to decode before the trigger

GO_ON, MEET = 0, 1
OBSERVED = ("decode", "prefill", "score", "load")  # kinds of work that the cost model is fitted to


@dataclass(frozen=True)
class FusionLimits:
    """What decides m and how samples move (DESIGN words: BS_max, M, C)."""

    bs_max: int
    sample_kv_bytes: float  # M
    capacity_kv_bytes: float  # C
    block_tokens: int
    move_cost: MoveCost
    score_tokens: int  # token budget of one scoring pack


@dataclass(frozen=True)
class Request:
    """One sample to generate."""

    sample_id: int
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class PhaseSpan:
    """What this rank did, in `time.time()` seconds."""

    kind: str  # generate, meet, migrate, load, score, wait
    start_seconds: float
    end_seconds: float


@dataclass
class GenInferReport:
    """All samples of the iteration, scored and sorted, and what happened. Equal on every rank but for spans."""

    rollouts: list[Rollout] = field(default_factory=list)
    plans: tuple[MigrationPlan, ...] = ()  # one for each trigger at which somebody was freed
    migrated_samples: int = 0
    migrated_bytes: int = 0
    bytes_needed: int = 0  # of the blocks that had to move, each once for a destination
    pause_seconds: float = 0.0  # longest that a migrated sample stood still
    agreement_seconds: float = 0.0  # of generation, spent to agree with others; the most of any instance
    recomputed_samples: int = 0
    scored_before_generation_end: int = 0
    generation_seconds: float = 0.0
    total_seconds: float = 0.0
    begin_seconds: float = 0.0  # wall clock
    function_scores: dict[int, float] = field(default_factory=dict)  # sample id -> what a Rewarder said
    observations: dict[str, list[list[float]]] = field(default_factory=dict)
    spans: list[PhaseSpan] = field(default_factory=list)


class InterStage:
    """Runs generation and inference on this rank. Owns nothing but its iteration's bookkeeping."""

    def __init__(
        self, rank: int, placement: Placement, engine: Engine, scorer: Scorer, store: dist.Store, *,
        instance_group: dist.ProcessGroup, worker_group: dist.ProcessGroup,
        timeout_seconds: float, progress: Callable[[str], None], bucket_bytes: int = BUCKET_BYTES,
        rewarder: Rewarder | None = None,
    ) -> None:  # fmt: skip
        """`bucket_bytes`: most memory that moving keys and values takes on a rank beside the caches."""
        self._rank = rank
        self._placement = placement
        self._engine = engine
        self._scorer = scorer
        self._rewarder = rewarder
        self._store = store
        self._instance_group = instance_group
        self._worker_group = worker_group
        self._timeout = timeout_seconds
        self._progress = progress
        self._bucket_bytes = bucket_bytes
        self._instance = placement.instance_of(rank)
        self._worker = placement.worker_of(rank)
        self._leads_instance = placement.instances[self._instance][0] == rank
        self._leads_worker = placement.workers[self._worker][0] == rank
        self._observed: dict[str, list[list[float]]] = {kind: [] for kind in OBSERVED}

    def run(
        self, iteration: int, requests: Sequence[Request], triggers: Sequence[int], limits: FusionLimits
    ) -> GenInferReport:
        """Generate and score `requests`, the whole batch, the same on every rank.

        `triggers`: numbers of remaining samples at which instances are freed, strictly descending; () is serial.

        The engine must hold the actor's weights and a KV cache, the scorer's weights must be parked. Returns
        with the KV cache dropped and the scorer's weights released.
        """
        self._limits = limits
        threshold = triggers[0] if triggers else 0
        board = Board(self._store, iteration, self._timeout)
        report = GenInferReport()
        begin = report.begin_seconds = time.time()
        for position in split_samples(len(requests), len(self._placement.instances))[self._instance]:
            request = requests[position]
            self._engine.add(request.sample_id, request.prompt, request.params)
        self._observed = {kind: [] for kind in OBSERVED}
        done = self._generate(board, len(requests), threshold, report)
        known, states, free = self._meet(done, report)
        if states:
            report.plans = (self._plan(states, free, threshold),)
            self._migrate(report.plans[0], report)
        ended = time.time()
        if report.plans and self._instance in report.plans[-1].destinations:
            self._decode_tail(board, report)
            ended = time.time()
        scored, early = self._score(board, known, len(states), len(requests), report)
        self._scorer.release()
        self._gather(report, scored, early, begin, ended)
        if self._rank == 0:
            board.clear(len(states))
        return report

    # generation -----------------------------------------------------------------------------------------------

    def _generate(self, board: Board, total: int, threshold: int, report: GenInferReport) -> list[Rollout]:
        """Decode until at most `threshold` samples of the whole batch remain (0: until all are done)."""
        start, done, steps, finished = time.time(), [], 0, 0
        while True:
            results = self._step() if self._engine.has_unfinished() else []
            done += [as_rollout(result) for result in results]
            steps += 1
            decision = GO_ON
            if self._leads_instance:
                if results or steps % STEPS_BETWEEN_POLLS == 0 or not self._engine.has_unfinished():
                    finished = board.finish(len(results))
                decision = MEET if total - finished <= threshold else GO_ON
            self._progress(f"generation: step {steps}, {finished} of {total} samples finished")
            if self._agree(decision, self._instance_group, self._placement.instances[self._instance]) == MEET:
                report.spans.append(PhaseSpan("generate", start, time.time()))
                return done
            if not self._engine.has_unfinished():
                time.sleep(IDLE_SECONDS)

    def _step(self) -> list[GenerationResult]:
        results = self._engine.step()
        stats = self._engine.last_step
        if stats.prefill_tokens:
            self._observed["prefill"].append([stats.prefill_tokens, stats.batch, stats.seconds])
        else:
            self._observed["decode"].append([stats.batch, stats.context_tokens, stats.seconds])
        for result in results:
            if result.finish_reason == "error":
                raise FloatingPointError(f"sample {result.sample_id}: the actor's logits are not finite")
        if results and self._rewarder and self._leads_instance:
            self._rewarder.submit([as_rollout(result) for result in results])
        return results

    def _agree(self, value: int, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> int:
        """The leader's value on all tensor ranks of an instance or worker."""
        if len(ranks) == 1:
            return value
        box = torch.tensor([value])
        dist.broadcast(box, src=ranks[0], group=group)
        return int(box)

    # the meeting ----------------------------------------------------------------------------------------------

    def _meet(
        self, done: list[Rollout], report: GenInferReport
    ) -> tuple[list[Rollout], list[SequenceState], list[int]]:
        """Exchange finished samples, unfinished sequences and free blocks; the same on every rank."""
        start = time.time()
        self._progress("inter-stage: meeting of all instances")
        header, body = b"", b""
        if self._leads_instance:
            states = [
                [s.sample_id, s.total_tokens, s.kv_tokens, list(s.shared_blocks)] for s in self._engine.unfinished()
            ]
            header = json.dumps({"states": states, "free": self._engine.free_blocks}).encode()
            body = pack_rollouts(done)
        headers, bodies = all_gather_bytes(header), all_gather_bytes(body)
        states, free = [], []
        for instance, ranks in enumerate(self._placement.instances):
            told = json.loads(headers[ranks[0]])
            free.append(told["free"])
            states += [
                SequenceState(sample, instance, tokens, kv, tuple(shared))
                for sample, tokens, kv, shared in told["states"]
            ]
        known = [rollout for data in bodies for rollout in unpack_rollouts(data)]
        report.spans.append(PhaseSpan("meet", start, time.time()))
        return sorted(known, key=lambda r: r.sample_id), states, free

    def _plan(self, states: list[SequenceState], free: list[int], threshold: int) -> MigrationPlan:
        limits, instances = self._limits, len(self._placement.instances)
        m = destination_count(threshold, limits.bs_max, limits.sample_kv_bytes, limits.capacity_kv_bytes, instances)
        return plan_migration(states, instances, m, free, limits.block_tokens, limits.move_cost)

    # migration ------------------------------------------------------------------------------------------------

    def _migrate(self, plan: MigrationPlan, report: GenInferReport) -> None:
        """Carry out the plan: freed instances send, destinations receive; then the freed drop their cache."""
        start = time.time()
        self._progress("inter-stage: migration")
        report.migrated_samples = len(plan.moves)
        report.recomputed_samples = sum(move.mode == "tokens" for move in plan.moves)
        for source, destination in transfer_order(plan):
            if self._instance in (source, destination):
                report.migrated_bytes += self._hand_over(plan, source, destination)
        if self._instance in plan.freed:
            self._engine.pause()
        report.spans.append(PhaseSpan("migrate", start, time.time()))

    def _hand_over(self, plan: MigrationPlan, source: int, destination: int) -> int:
        """This rank's part of what moves from one instance to another. Returns bytes of keys and values sent."""
        sides = self._placement.instances[source], self._placement.instances[destination]
        heads = HeadPlan.between(*sides, self._engine.spec.kv_heads)
        if self._instance == destination:
            receive_shipment(self._engine, heads, self._rank, bucket_bytes=self._bucket_bytes)
            return 0
        modes = {move.sample_id: move.mode for move in plan.moves_from(source) if move.destination == destination}
        with self._engine.export_sequences(modes, modes) as shipment:
            return send_shipment(shipment, heads, self._rank, bucket_bytes=self._bucket_bytes)

    def _decode_tail(self, board: Board, report: GenInferReport) -> None:
        """A destination decodes what is left and publishes each sample as it ends."""
        start = time.time()
        while self._engine.has_unfinished():
            results = self._step()
            self._progress(f"generation of the long tail: {len(self._engine.unfinished())} samples left here")
            if self._leads_instance and results:
                for result in results:
                    board.publish(as_rollout(result).to_bytes())
                board.finish(len(results))
        self._engine.pause()
        report.spans.append(PhaseSpan("generate", start, time.time()))

    # scoring --------------------------------------------------------------------------------------------------

    def _score(
        self, board: Board, known: list[Rollout], streamed: int, total: int, report: GenInferReport
    ) -> tuple[list[Rollout], int]:
        """Load the frozen models and score until no work is left; returns this worker's samples.

        Serial work is dealt beforehand, balanced by tokens; after a trigger it is drawn by ticket.
        """
        start = time.time()
        if not report.plans:
            self._engine.pause()
        self._progress("inference: loading weights")
        self._scorer.finish_load()
        self._observed["load"].append([self._scorer.load_seconds])
        loaded = time.time()
        report.spans.append(PhaseSpan("load", start, loaded))
        if not report.plans:
            scored, early = self._score_share(known, report), 0
        else:
            scored, early = self._score_tickets(board, known, streamed, total, report)
        self._observed["score"] += [list(one) for one in self._scorer.observations]
        self._scorer.observations.clear()
        return (scored if self._leads_worker else []), (early if self._leads_worker else 0)

    def _score_share(self, known: list[Rollout], report: GenInferReport) -> list[Rollout]:
        lengths = [len(r.prompt_tokens) + len(r.response_tokens) for r in known]
        share = [known[i] for i in partition(lengths, len(self._placement.workers))[self._worker]]
        scored: list[Rollout] = []
        for pack in self._packs(share, 1):
            self._progress(f"inference: {len(scored)} of {len(share)} samples scored here")
            scored += self._timed_score(pack, report)
        return scored

    def _score_tickets(
        self, board: Board, known: list[Rollout], streamed: int, total: int, report: GenInferReport
    ) -> tuple[list[Rollout], int]:
        packs = self._packs(known, len(self._placement.workers))
        scored, early = [], 0
        while True:
            ticket = board.claim() if self._leads_worker else 0
            ticket = self._agree(ticket, self._worker_group, self._placement.workers[self._worker])
            if ticket >= len(packs) + streamed:
                return scored, early
            if ticket < len(packs):
                pack = packs[ticket]
            else:
                waiting = time.time()
                self._progress(f"inference: waiting for sample {ticket - len(packs)} of the long tail")
                pack = [Rollout.from_bytes(board.fetch(ticket - len(packs)))]
                report.spans.append(PhaseSpan("wait", waiting, time.time()))
            self._progress(f"inference: ticket {ticket}")
            scored += self._timed_score(pack, report)
            if self._leads_worker and board.finish(0) < total:
                early += len(pack)

    def _timed_score(self, pack: list[Rollout], report: GenInferReport) -> list[Rollout]:
        start = time.time()
        scored = self._scorer.score(pack)
        report.spans.append(PhaseSpan("score", start, time.time()))
        return scored

    def _packs(self, rollouts: list[Rollout], workers: int) -> list[list[Rollout]]:
        """Packs within the token budget, and small enough that each of `workers` gets one if samples allow."""
        lengths = [len(r.prompt_tokens) + len(r.response_tokens) for r in rollouts]
        fair = math.ceil(sum(lengths) / workers)
        budget = max(min(self._limits.score_tokens, fair), max(lengths, default=1))
        return [[rollouts[i] for i in pack] for pack in pack_by_tokens(lengths, budget)]

    # the end --------------------------------------------------------------------------------------------------

    def _gather(self, report: GenInferReport, scored: list[Rollout], early: int, begin: float, ended: float) -> None:
        """Every rank gets every scored sample, and the sums of what happened."""
        self._progress("inter-stage: gathering scored samples")
        told = {
            "early": early,
            "bytes": report.migrated_bytes,
            "generation": ended - begin if self._leads_instance else 0.0,
            "observed": self._observed if self._leads_instance else {},
            "scores": list(self._rewarder.finish().items()) if self._rewarder else [],
        }
        everyone = [json.loads(data) for data in all_gather_bytes(json.dumps(told).encode())]
        rollouts = [r for data in all_gather_bytes(pack_rollouts(scored)) for r in unpack_rollouts(data)]
        report.rollouts = sorted(rollouts, key=lambda r: r.sample_id)
        report.scored_before_generation_end = sum(one["early"] for one in everyone)
        report.migrated_bytes = sum(one["bytes"] for one in everyone)
        report.generation_seconds = max(one["generation"] for one in everyone)
        for one in everyone:
            report.function_scores |= dict(one["scores"])
            for kind, rows in one["observed"].items():
                report.observations.setdefault(kind, []).extend(rows)
        report.total_seconds = time.time() - begin


def transfer_order(plan: MigrationPlan) -> list[tuple[int, int]]:
    """Pairs (source, destination) with samples to move, in the order in which every instance goes through its own.

    One order for all cannot deadlock: the first pair that is not done has nobody else to wait for. In each round
    different sources talk to different destinations, as far as there are any:  0>4 1>5 2>6, 0>5 1>6 2>4, ...
    """
    pairs = {(move.source, move.destination) for move in plan.moves}
    rounds = max(len(plan.freed), len(plan.destinations))

    def place(pair: tuple[int, int]) -> tuple[int, int]:
        source, destination = plan.freed.index(pair[0]), plan.destinations.index(pair[1])
        return (destination - source) % rounds, source

    return sorted(pairs, key=place)


def as_rollout(result: GenerationResult) -> Rollout:
    """A finished generation as a sample to be scored."""
    return Rollout(
        sample_id=result.sample_id,
        prompt_tokens=tuple(result.prompt_tokens),
        response_tokens=tuple(result.tokens),
        old_logprobs=torch.tensor(result.logprobs, dtype=torch.float32),
        finish_reason=result.finish_reason,
    )
