"""Who scores what: each sample once, by whichever worker takes it; the numbers don't depend on it.

Serial work is dealt beforehand. After the trigger it is pulled: first the packs of the samples finished at the
barrier, longest first and smaller towards the end, by ticket; then the long tail's, as they are published, several
together where several wait, by who has its models if anybody free has. Only a worker's leader looks at the store, and
no rank waits long in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhfuse.fusion.inter.inference import Scorer
from rlhfuse.fusion.inter.iteration_store import FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, IterationStore
from rlhfuse.fusion.inter.rank_place import RankPlace
from rlhfuse.fusion.inter.report import RankEvents
from rlhfuse.monitor.heartbeat import WaitingForWork
from rlhfuse.ppo.rollout import Rollout
from rlhfuse.tasks.packing import deal, scoring_packs, streamed_pack

WAIT_SECONDS = 5.0  # a leader that waits for work lets its group know, so that no collective times out
PACK, STREAMED, WAIT, DONE = 0, 1, 2, 3
Work = tuple[int, int, int]  # which kind, and first and last + 1 of the packs or samples


@dataclass(eq=False)
class ScoringQueue:
    """One worker's end of the queue: pulls samples of an iteration and scores them."""

    store: IterationStore
    place: RankPlace
    scorer: Scorer
    score_tokens: int
    events: RankEvents
    progress: Callable[[str], None]

    def __post_init__(self) -> None:
        self._group, self._worker, self._workers = (
            self.place.scorers,
            self.place.worker,
            len(self.place.placement.workers),
        )
        self._clock = self.store.clock
        self._scored: list[Rollout] = []
        self._fetched: dict[int, Rollout] = {}
        self._asked = self._clock.begin()  # when the leader last looked for work and found some
        self._packs_left = True
        self._joined = False

    def score_share(self, finished: Sequence[Rollout]) -> list[Rollout]:
        """Serial: this worker's share of all samples, balanced by tokens."""
        own = [finished[i] for i in deal([tokens_of(sample) for sample in finished], self._workers)[self._worker]]
        for pack in self._packs(own, 1):
            self._asked = self._clock.begin()
            self.progress(f"inference: {len(self._scored)} of {len(own)} samples scored here")
            self._score(pack)
        return self._finish()

    def register(self) -> None:
        """Count as a worker and begin to load the models, work or not: there will be some."""
        self._join()
        self.scorer.begin_load()

    def pull(self, finished: Sequence[Rollout], streamed: int, total: int) -> list[Rollout]:
        """Fused: score what this worker can get of `finished`, then of the `streamed` samples of the tail.

        `finished` is the same on all workers; `total`: samples of the whole batch. A worker that has not registered
        loads no models before it has work.
        """
        self._wait_for_instances()
        packs = self._packs(finished, self._workers)
        while True:
            self.progress(WaitingForWork("inference: waiting for work"))
            choice = self._next(packs, streamed) if self._group.is_leader else (WAIT, 0, 0)
            kind, first, last = self._group.broadcast(*choice)
            if kind == DONE:
                return self._finish()
            if kind == WAIT:
                continue
            if not self._group.is_leader:
                self._asked = self._clock.begin()
            self.register()
            pack = packs[first] if kind == PACK else [self._fetch(index) for index in range(first, last)]
            self.progress(f"inference: {'pack' if kind == PACK else 'long tail'} {first}")
            self._score(pack)
            if self._group.is_leader and self.store.add_finished(0) < total:
                self.events.scored_early += len(pack)

    def _wait_for_instances(self) -> None:
        """Until all instances that this worker spans decode no more. Its leader takes no work before."""
        spanned = len(self.place.spanned)
        if spanned == 1:
            return
        with self._clock.work("wait"):
            self.store.add_free(self._worker, int(self.place.decoders.is_leader))
            pause = FIRST_PAUSE_SECONDS
            while self.store.add_free(self._worker, 0) < spanned:
                self.progress(WaitingForWork("inference: waiting for instances of this worker that decode"))
                self._clock.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE_SECONDS)

    def _next(self, packs: Sequence[Sequence[Rollout]], streamed: int) -> Work:
        self._asked = self._clock.begin()
        self._join()
        if self._packs_left:
            ticket = self.store.next_ticket()
            if ticket < len(packs):
                return PACK, ticket, ticket + 1
            self._packs_left = False
        with self._clock.work("wait"):
            ready = bool(self._scored)
            self.store.add_ready(ready)
            work = self._take_streamed(streamed)
            self.store.add_ready(-ready)
        return work

    def _take_streamed(self, streamed: int) -> Work:
        deadline, pause = self._clock.now() + WAIT_SECONDS, FIRST_PAUSE_SECONDS
        while self._clock.now() < deadline:
            self._asked = self._clock.begin()
            taken, published = self.store.taken(), self.store.published()
            if taken == streamed:
                return DONE, 0, 0
            # who would load first leaves it to those that need not: often a destination, with the last of its samples
            if published > taken and (self._scored or not self.store.add_ready(0)):
                lengths = [tokens_of(self._fetch(index)) for index in range(taken, published)]
                workers = self.store.add_workers(0)  # who is busy wants work soon
                count = streamed_pack(lengths, sum(lengths), workers, self.score_tokens)
                if self.store.try_take(taken, count, self._worker):
                    return STREAMED, taken, taken + count
                continue  # another worker was quicker
            self._clock.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)
        return WAIT, 0, 0

    def _join(self) -> None:
        if self._group.is_leader and not self._joined:
            self.store.add_workers(1)
        self._joined = True

    def _fetch(self, index: int) -> Rollout:
        if index not in self._fetched:
            self._fetched[index] = Rollout.from_bytes(self.store.fetch(index))
        return self._fetched[index]

    def _score(self, pack: Sequence[Rollout]) -> None:
        """Score the pack that was asked for last. Pulling and fetching are its time, waiting for weights is not."""
        waited = self.scorer.waited_seconds
        if not self._scored:
            with self._clock.work("load"):
                self.scorer.wait_for_first()
        with self._clock.work("score"):
            self._scored += self.scorer.score(pack, self._group)
        self._asked.waited = self.scorer.waited_seconds - waited
        self._clock.observe("score", sum(map(tokens_of, pack)), len(pack), self._asked.seconds)

    def _finish(self) -> list[Rollout]:
        """This worker's samples, from its leader."""
        if self._scored:  # all models have been waited for
            self._clock.observe("load", self.scorer.load_seconds)
        self.scorer.release()
        return self._scored if self._group.is_leader else []

    def _packs(self, rollouts: Sequence[Rollout], workers: int) -> list[list[Rollout]]:
        packs = scoring_packs([tokens_of(sample) for sample in rollouts], workers, self.score_tokens)
        return [[rollouts[i] for i in pack] for pack in packs]


def tokens_of(rollout: Rollout) -> int:
    return len(rollout.prompt_tokens) + len(rollout.response_tokens)
