"""The processes that call reward functions: scores by sample id. One call that fails or is late fails everything."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfuse.base.errors import InputError, RewardError
from rlhfuse.data.call_pool import POLL_SECONDS, CallPool
from rlhfuse.data.reward_function import RewardCall, RewardFunction
from rlhfuse.data.tool_set import REWARD, environment_reward

Progress = Callable[[str], None]


@dataclass(frozen=True)
class RewardSum:
    """One reward function, or several whose weighted scores are added, None as nothing, as in TRL: a `Callee`."""

    functions: tuple[RewardFunction, ...]
    weights: tuple[float, ...]
    is_async: bool

    @staticmethod
    def load(names: Sequence[str], signature: str, weights: Sequence[float] = (), tools: str = "") -> RewardSum:
        """Import them; the first three as in the group `reward`, `tools`: the file of get_reward. Raises InputError."""
        # an environment first: its module has one name in all processes
        found = {name: environment_reward(tools) for name in names if name == REWARD}
        found |= {name: RewardFunction.load(name, signature) for name in names if name != REWARD}
        kinds = {(function.signature == "trl", function.is_async): name for name, function in found.items()}
        if len(kinds) > 1:
            told = f"{' and '.join(kinds.values())} differ: of one sample or of all of a prompt, async or not"
            raise InputError(f"reward.function: {told}; write all functions of a list alike")
        functions = tuple(found[name] for name in names)
        return RewardSum(functions, tuple(weights) or (1.0,) * len(names), functions[0].is_async)

    def about(self, call: RewardCall, samples: Sequence[int] = ()) -> str:
        """As `RewardCall.about`, with the names of all."""
        return call.about(" and ".join(function.name for function in self.functions), samples)

    def invoke(self, call: RewardCall) -> Any:
        """What each gives, by sample; to be awaited with `is_async`."""
        if self.is_async:
            return asyncio.gather(*(function.awaited(call) for function in self.functions))
        return [function.scores(call) for function in self.functions]

    def result(self, returned: Sequence[Mapping[int, float | None]], call: RewardCall) -> dict[int, float]:
        """Sample id -> score. Raises RewardError for a sample to which no function gave one."""
        joint: dict[int, float] = {}
        for sample in call.sample_ids:
            given = zip(self.weights, (scores[sample] for scores in returned))
            parts = [weight * score for weight, score in given if score is not None]
            if not parts:
                raise RewardError(f"{self.about(call, [sample])} returned None, not a number")
            joint[sample] = sum(parts[1:], parts[0])  # sum() of a single -0.0 would be 0.0
        return joint

    def failed(self, error: BaseException, call: RewardCall) -> str:
        """A message about what was raised, which names the function that was called."""
        own = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        return next((one for one in own if isinstance(one, RewardFunction)), self.functions[0]).failed(error, call)


class RewardWorkers:
    """Owns `workers` processes that call RewardSum.load(*asked); what they start ends with them. To be closed.

    `progress` is told of calls that have returned while `finish` waits.
    """

    def __init__(
        self,
        asked: Sequence[Any],
        workers: int,
        timeout_seconds: float,
        progress: Progress = lambda _: None,
        pool: Callable[..., CallPool] = CallPool,
    ) -> None:
        self._pool = pool(RewardSum.load, asked, workers, timeout_seconds, "reward.timeout_seconds")
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
