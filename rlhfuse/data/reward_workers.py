"""The processes that call a reward function: scores by sample id. One call that fails or is late fails everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhfuse.base.errors import RewardError
from rlhfuse.data.call_pool import POLL_SECONDS, CallPool
from rlhfuse.data.reward_function import RewardCall, RewardFunction


class RewardWorkers:
    """Owns `workers` processes that call the function `name`; what it starts itself ends with them. To be closed.

    `progress` is told of calls that have returned while `finish` waits.
    """

    def __init__(
        self,
        name: str,
        signature: str,
        workers: int,
        timeout_seconds: float,
        progress: Callable[[str], None] = lambda _: None,
        load: Callable[[str, str], RewardFunction] = RewardFunction.load,
        pool: Callable[..., CallPool] = CallPool,
    ) -> None:
        self._pool = pool(load, (name, signature), workers, timeout_seconds, "reward.timeout_seconds")
        self._progress, self.under_way = progress, self._pool.under_way
        self._pending: set[int] = set()  # samples
        self._at_once = 1  # samples of the largest call so far
        self._scores: dict[int, float] = {}
        self._untold: dict[int, float] = {}  # of them, since `news`
        self._calls_done, self._call_seconds = 0, 0.0  # since `take_calls`

    def submit(self, calls: Sequence[RewardCall]) -> None:
        """Queue them; returns at once. Raises RewardError when an earlier one is known to have failed."""
        for call in calls:
            self._pending.update(call.sample_ids)
            self._at_once = max(self._at_once, len(call.sample_ids))
        self._pool.submit(calls)
        self._collect(0.0)

    def finish(self) -> dict[int, float]:
        """Wait for all that was submitted: sample id -> score. Raises RewardError."""
        while self._pending:
            if self._collect(POLL_SECONDS):
                self._progress(f"inference: waiting for the reward function, {len(self._pending)} samples left here")
        scores, self._scores, self._untold = self._scores, {}, {}
        return scores

    def news(self) -> dict[int, float]:
        """Sample id -> score of what has returned since the last time; returns at once. Raises RewardError."""
        self._collect(0.0)
        news, self._untold = self._untold, {}
        return news

    def take_calls(self) -> tuple[int, int, float]:
        """Samples scored since the last time, how many a worker has under way at once, and the seconds of them all.

        Each sample of a call takes as long as the call.
        """
        taken = self._calls_done, self._at_once * self._pool.at_once, self._call_seconds
        self._calls_done, self._call_seconds = 0, 0.0
        return taken

    def close(self) -> None:
        """End the processes, and those that the function has started."""
        self._pool.close()

    def _collect(self, seconds: float) -> bool:
        """Take in what is finished within `seconds`; after that what is finished already. Whether there was any."""
        outcomes = self._pool.outcomes(seconds)
        for outcome in outcomes:
            if outcome.error:
                self.close()
                raise RewardError(outcome.error)
            for sample, score in outcome.value.items():
                self._scores[sample] = self._untold[sample] = score
                self._calls_done, self._call_seconds = self._calls_done + 1, self._call_seconds + outcome.seconds
                self._pending.discard(sample)
        return bool(outcomes)
