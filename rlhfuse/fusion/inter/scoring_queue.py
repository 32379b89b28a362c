"""Who scores what. Each sample is scored once, by whichever worker takes it; the numbers don't depend on it.

Serial work is dealt beforehand. After a trigger it is drawn: first the packs of the samples known at the first
meeting, longest first and smaller towards the end, by ticket; then the long tail's, as they are published, several
together where several wait. Only the leader of a worker looks at the board; a worker that has nothing to do waits
for no rank in particular, and for none in a collective for long.

Knows nothing of generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rlhfuse.decisions.packing import deal, scoring_packs, streamed_pack
from rlhfuse.fusion.inter.inference import PackWork, Scorer
from rlhfuse.fusion.inter.iteration_store import FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, Board
from rlhfuse.fusion.inter.report import Diary
from rlhfuse.fusion.inter.team import Team
from rlhfuse.ppo.rollout import Rollout

TELL_SECONDS = 5.0  # a leader that waits for work lets its team know, so that no collective times out
KNOWN, STREAMED, WAIT, DONE = 0, 1, 2, 3
Work = tuple[int, int, int]  # which kind, and first and last + 1 of the packs or samples


class ScoringDesk:
    """One worker's way through the samples of an iteration."""

    def __init__(
        self,
        board: Board,
        team: Team,
        scorer: Scorer,
        worker: int,
        workers: int,
        score_tokens: int,
        diary: Diary,
        progress: Callable[[str], None],
    ) -> None:
        self._board, self._team, self._scorer = board, team, scorer
        self._worker, self._workers, self._budget = worker, workers, score_tokens
        self._diary, self._progress = diary, progress
        self._scored: list[Rollout] = []
        self._fetched: dict[int, Rollout] = {}
        self._asked = 0.0  # when the leader last looked for work and found some
        self._known_left = True
        self._joined = False

    def score_share(self, known: Sequence[Rollout]) -> list[Rollout]:
        """Serial: this worker's share of all samples, balanced by tokens."""
        own = [known[i] for i in deal([tokens_of(one) for one in known], self._workers)[self._worker]]
        neighbour = "scoring" if self._workers > 1 else "idle"
        for pack in self._packs(own, 1):
            self._asked = time.perf_counter()
            self._progress(f"inference: {len(self._scored)} of {len(own)} samples scored here")
            work, waited = self._score(pack)
            self._observe(work, waited, neighbour)
        return self._finish(neighbour)

    def join(self) -> None:
        """Begin to load the models, work or not: there will be some."""
        if self._team.leads and not self._joined:
            self._board.note_scoring(1)
        self._joined = True
        self._scorer.begin_load()

    def draw(self, known: Sequence[Rollout], streamed: int, total: int) -> list[Rollout]:
        """Fused: score what this worker can get of `known`, then of the `streamed` samples of the tail.

        `known` is the same on all workers; `total`: samples of the whole batch. A worker that has not joined loads
        no models before it has work.
        """
        packs = self._packs(known, self._workers)
        generating = self._generating(total)
        while True:
            kind, first, last = self._team.agree(*(self._next(packs, streamed) if self._team.leads else (WAIT, 0, 0)))
            if kind == DONE:
                return self._finish("decoding" if generating else "scoring")
            if kind == WAIT:
                continue
            if not self._team.leads:
                self._asked = time.perf_counter()
            self.join()
            pack = packs[first] if kind == KNOWN else [self._fetch(index) for index in range(first, last)]
            self._progress(f"inference: {'pack' if kind == KNOWN else 'long tail'} {first}")
            work, waited = self._score(pack)
            neighbour, generating = "decoding" if generating else "scoring", self._generating(total)
            self._observe(work, waited, neighbour)
            if generating:
                self._diary.scored_early += len(pack) * self._team.leads

    # the leader's choice --------------------------------------------------------------------------------------

    def _next(self, packs: Sequence[Sequence[Rollout]], streamed: int) -> Work:
        self._asked = time.perf_counter()
        if self._known_left:
            ticket = self._board.claim()
            if ticket < len(packs):
                return KNOWN, ticket, ticket + 1
            self._known_left = False
        start = time.time()
        self._stand_by(1)
        work = self._take_streamed(streamed)
        self._stand_by(-1)
        self._diary.span("wait", start, time.time())
        return work

    def _take_streamed(self, streamed: int) -> Work:
        deadline, pause = time.monotonic() + TELL_SECONDS, FIRST_PAUSE_SECONDS
        while time.monotonic() < deadline:
            self._asked = time.perf_counter()
            taken, published = self._board.taken(), self._board.published()
            if taken == streamed:
                return DONE, 0, 0
            if published > taken:
                lengths = [tokens_of(self._fetch(index)) for index in range(taken, published)]
                workers = self._board.note_waiting(0) + self._board.scoring()  # who is busy wants work soon
                count = streamed_pack(lengths, max(1, workers), self._budget)
                if self._board.take(taken, count, self._worker):
                    return STREAMED, taken, taken + count
                continue  # another worker was quicker
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)
        return WAIT, 0, 0

    def _stand_by(self, change: int) -> None:
        """From now on this worker waits, or waits no more."""
        if self._joined:
            self._board.note_scoring(-change)
        self._board.note_waiting(change)

    def _generating(self, total: int) -> bool:
        return self._team.leads and self._board.finish(0) < total

    # scoring --------------------------------------------------------------------------------------------------

    def _fetch(self, index: int) -> Rollout:
        if index not in self._fetched:
            self._fetched[index] = Rollout.from_bytes(self._board.fetch(index))
        return self._fetched[index]

    def _score(self, pack: Sequence[Rollout]) -> tuple[PackWork, float]:
        """The pack's work, and seconds that passed waiting for weights."""
        start = time.time()
        if not self._scored:
            self._scorer.wait_for_first()
            self._diary.span("load", start, time.time())
        loaded = time.time()
        scored, work = self._scorer.score(pack)
        end = time.time()
        self._scored += scored
        self._diary.span("score", loaded, end)
        return work, end - start - work.seconds

    def _observe(self, work: PackWork, waited: float, neighbour: str) -> None:
        """Note the pack that was asked for last and is over now, from one draw to the next.

        Drawing and fetching are the pack's; waiting for work or for weights is not.
        """
        seconds = time.perf_counter() - self._asked - waited
        self._diary.observe("score", work.tokens, work.samples, max(seconds, work.seconds), neighbour)

    def _finish(self, neighbour: str) -> list[Rollout]:
        """This worker's samples, from its leader."""
        if self._scored:  # all models have been waited for
            self._diary.observe("load", self._scorer.load_seconds, neighbour)
        self._scorer.release()
        return self._scored if self._team.leads else []

    def _packs(self, rollouts: Sequence[Rollout], workers: int) -> list[list[Rollout]]:
        packs = scoring_packs([tokens_of(one) for one in rollouts], workers, self._budget)
        return [[rollouts[i] for i in pack] for pack in packs]


def tokens_of(rollout: Rollout) -> int:
    return len(rollout.prompt_tokens) + len(rollout.response_tokens)
