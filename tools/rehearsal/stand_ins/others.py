"""What the other ranks of a run say and do while one rank goes through generation and inference.

They have samples as this rank's, and have come as far. At the trigger they hold fewer unfinished ones than this
instance, which then receives theirs, every second as tokens, or more, and then it is freed and sends its own. Of what
is to be scored this rank gets some packs. Each group of ranks is led by this one.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from rehearsal.stand_ins.samples import TAIL_STEPS, Samples

from rlhfuse.base.clock import Clock
from rlhfuse.fusion.inter import inter_stage, rank_place
from rlhfuse.fusion.inter.report import RankEvents
from rlhfuse.fusion.inter.request import Request
from rlhfuse.fusion.inter.scoring_queue import ScoringQueue
from rlhfuse.fusion.inter.tensor_parallel_group import TensorParallelGroup
from rlhfuse.gen.engine import Engine
from rlhfuse.gen.migration import peer_transfer
from rlhfuse.gen.migration.kv_transfer import BlockShape, SequenceSnapshot, TransferManifest
from rlhfuse.ppo.rollout import Rollout
from rlhfuse.tasks.instance_limits import InstanceLimits
from rlhfuse.tasks.migration import MigrationPlan, UnfinishedSample, plan_at_threshold
from rlhfuse.tasks.placement import Placement

PACKS = 2  # that this rank scores of what is known at the barrier


@dataclass(frozen=True)
class Batch:
    """The samples of one iteration by instance; the last `tails[i]` of instance i are its long tail."""

    requests: tuple[list[Request], ...]
    tails: tuple[int, ...]
    threshold: int  # R_t; 0: serial
    limits: InstanceLimits

    @property
    def total(self) -> int:
        return sum(map(len, self.requests))


class OtherRanks:
    """All but `rank`; also the iteration's store (`IterationStore`), which they and this rank share."""

    def __init__(self, samples: Samples, placement: Placement, rank: int, engine: Engine) -> None:
        self._samples, self._placement, self._rank = samples, placement, rank
        self._shape = BlockShape(
            engine.spec.layers,
            engine.options.block_tokens,
            engine.spec.kv_heads,
            engine.spec.head_dim,
            str(engine.dtype).removeprefix("torch."),
        )
        self.instance = placement.instance_of(rank)
        self.clock = Clock()  # of whoever asks last
        self.moved = 0  # samples that this rank has sent or received, in all iterations
        self._batch = Batch(((),), (0,), 0, None)  # type: ignore[arg-type]
        self._plan: MigrationPlan | None = None
        self._late: list[UnfinishedSample] = []  # at the barrier, of all instances
        self._answers: dict[int, deque[bytes]] = {}  # of destinations that this rank sends to
        self._tickets = self._taken = 0
        inter_stage.IterationStore = self._as_store  # type: ignore[assignment,misc]
        inter_stage.StoreReporter = lambda *_, **more: Reporter(self)  # type: ignore[assignment,misc]
        inter_stage.ScoringQueue = SomePacks  # type: ignore[misc]
        rank_place.TensorParallelGroup = LedHere  # type: ignore[misc]
        peer_transfer.send_bytes, peer_transfer.receive_bytes = self._hear, self._say
        dist.all_gather_object = self._gather

    def begin(self, batch: Batch) -> None:
        """An iteration begins."""
        self._batch, self._plan, self._late = batch, None, []
        self._tickets = self._taken = 0
        self._answers.clear()

    def finished(self, here: int) -> int:
        """Samples of all instances that are finished, when `here` are in this one."""
        batch, own = self._batch, self._batch.requests[self.instance]
        left = len(own) - here
        if left > batch.tails[self.instance]:
            return here * len(batch.requests)
        return batch.total - (batch.threshold if left else 0)

    # collectives ----------------------------------------------------------------------------------------------

    def _gather(self, gathered: list[Any], value: Any, group: Any = None) -> None:
        """In the place of torch's all_gather_object: others say what this rank says, but for what is theirs."""
        rows: list[Any] = [value] * len(gathered)
        if isinstance(value, tuple) and isinstance(value[0], RankEvents):
            events, scored = value
            ids = [request.sample_id for part in self._batch.requests for request in part]
            scores = dict.fromkeys(ids, 0.5) if self._samples.config.reward.function else {}
            rows = [(RankEvents(plan=events.plan, function_scores=scores), []) for _ in rows]
            here = {one.sample_id if isinstance(one, Rollout) else one[0] for one in scored}
            rows[self._rank - 1][1].extend(self._samples.rollout(sample) for sample in ids if sample not in here)
        elif isinstance(value, tuple):
            rows = self._at_barrier(value, len(gathered))
        if group is None:
            rows[self._rank] = value
        gathered[:] = rows

    def _at_barrier(self, mine: tuple[list[UnfinishedSample], int, list[Rollout], Any], size: int) -> list[Any]:
        batch = self._batch
        rows: list[Any] = [([], 0, [], ()) for _ in range(size)]
        for instance, ranks in enumerate(self._placement.instances):
            done, late = self._cut(instance)
            states = [
                UnfinishedSample(request.sample_id, instance, count, (count - 1) * (place % 2))
                for place, request in enumerate(late)
                for count in [self._samples.longest - TAIL_STEPS]
            ]
            finished = [self._samples.rollout(request.sample_id, scored=False) for request in done]
            began = tuple(request.sample_id for request in batch.requests[instance])
            rows[ranks[0]] = mine if instance == self.instance else (states, mine[1], finished, began)
        leaders = [rows[ranks[0]] for ranks in self._placement.instances]
        self._late = [state for states, *_ in leaders for state in states]
        free = [free for _, free, *_ in leaders]
        self._plan = plan_at_threshold(batch.threshold, self._late, free, batch.limits)
        return rows

    def _cut(self, instance: int) -> tuple[list[Request], list[Request]]:
        requests, tail = self._batch.requests[instance], self._batch.tails[instance]
        return requests[: len(requests) - tail], requests[len(requests) - tail :]

    # keys and values that move --------------------------------------------------------------------------------

    def _hear(self, payload: bytes, to: int, group: Any = None) -> None:
        """A destination that is told what comes wants all of it, and has it in the end."""
        if self._plan and self.instance in self._plan.freed:
            manifest = TransferManifest.from_bytes(payload)
            self.moved += len(manifest.sequences)
            missing = json.dumps(list(range(manifest.num_blocks))).encode()
            self._answers[to] = deque((missing, peer_transfer.DONE))

    def _say(self, source: int, group: Any = None) -> bytes:
        if answers := self._answers.get(source):
            return answers.popleft()
        return self._manifest(self._placement.instance_of(source)).to_bytes()

    def _manifest(self, source: int) -> TransferManifest:
        """What an instance sends here."""
        assert self._plan is not None, "nothing is sent before the barrier"
        requests = {request.sample_id: request for request in self._batch.requests[source]}
        sequences, blocks = [], 0
        for move in self._plan.moves_from(source):
            if move.destination != self.instance:
                continue
            request, held = requests[move.sample_id], -(-move.kv_tokens // self._shape.block_tokens)
            drawn = self._samples.longest - TAIL_STEPS - len(request.prompt)
            numbers = tuple(range(blocks, blocks + held))
            own = request.prompt, (0,) * drawn, (0.0,) * drawn, request.params
            entropies = own[2] if self._samples.config.algorithm.top_entropy_quantile < 1 else ()
            sequences.append(SequenceSnapshot(move.sample_id, *own, move.kv_tokens, numbers, entropies))
            blocks += held
        self.moved += len(sequences)
        return TransferManifest(self._shape, blocks, tuple(sequences))

    # the store ------------------------------------------------------------------------------------------------

    def _as_store(self, store: Any, iteration: Any, timeout_seconds: float, clock: Clock) -> OtherRanks:
        self.clock = clock
        return self

    def reconnect(self) -> OtherRanks:
        return self

    def add_finished(self, count: int) -> int:
        return self._batch.total

    def next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets - 1

    def published(self) -> int:
        return len(self._late)

    def taken(self) -> int:
        return self._taken

    def try_take(self, first: int, count: int, worker: int) -> bool:
        """This rank gets the first of the tail, and others the rest."""
        self._taken = len(self._late)
        return True

    def fetch(self, index: int) -> bytes:
        return self._samples.rollout(self._late[index].sample_id, scored=False).to_bytes()

    def publish(self, samples: Sequence[bytes]) -> None:
        pass

    def add_workers(self, count: int) -> int:
        return 1

    def add_free(self, worker: int, count: int) -> int:
        return len(self._placement.instances)

    def add_ready(self, change: int) -> int:
        return 0

    def clear(self, instances: int) -> None:
        pass


class Reporter:
    """In the place of `StoreReporter`: what is reported is known at once, so that a rehearsal takes the same steps."""

    def __init__(self, others: OtherRanks) -> None:
        self._others, self._count = others, 0

    @property
    def finished(self) -> int:
        return self._others.finished(self._count)

    def report(self, count: int, samples: Sequence[bytes] = ()) -> None:
        self._count += count

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class SomePacks(ScoringQueue):
    """Others score the rest."""

    def _packs(self, rollouts: Sequence[Rollout], workers: int) -> list[list[Rollout]]:
        return super()._packs(rollouts, workers)[:PACKS]


class LedHere(TensorParallelGroup):
    """This rank leads: what its leader would say, it says itself."""

    def __init__(self, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None) -> None:
        super().__init__(ranks, rank, group)
        self.is_leader = True

    def parts(self, ranks: int) -> tuple[int, int]:
        """A sample as long as a pack is all that a worker scores, so one replica scores it."""
        return 1, 0
