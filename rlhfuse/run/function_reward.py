"""The reward function of a run as the runtime asks for it: rollouts in, scores by sample id out.

Decodes the sampled tokens for the function; nothing is ever encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhfuse.data.prompts import Prompt
from rlhfuse.data.reward_function import RewardCall
from rlhfuse.data.reward_workers import RewardWorkers
from rlhfuse.data.sampler import sample_origin
from rlhfuse.gen.stop_text import text_before_stop
from rlhfuse.ppo.rollout import Rollout
from rlhfuse.run.preflight import RunInputs


class FunctionRewarder:
    """A `Rewarder` that calls the function of the configuration, in processes of its own."""

    def __init__(self, inputs: RunInputs, progress: Callable[[str], None]) -> None:
        reward = inputs.config.reward
        self._tokenizer, self._stops = inputs.tokenizer, inputs.config.rollout.stop
        self._prompts: Sequence[Prompt] = ()
        self._workers = RewardWorkers(
            reward.function, reward.signature, reward.workers, reward.timeout_seconds, progress
        )

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """From now on samples are of these prompts: of each the one at its place in the draw."""
        self._prompts = prompts

    def submit(self, rollouts: Sequence[Rollout]) -> None:
        """Queue finished samples; returns at once. Raises RewardError when an earlier one failed."""
        self._workers.submit([self._call(rollout) for rollout in rollouts])

    def finish(self) -> dict[int, float]:
        """Sample id -> what the function said of everything submitted; waits. Raises RewardError."""
        return self._workers.finish()

    def take_calls(self) -> tuple[int, int, float]:
        """As `RewardWorkers.take_calls`."""
        return self._workers.take_calls()

    def close(self) -> None:
        """End the processes."""
        self._workers.close()

    def _call(self, rollout: Rollout) -> RewardCall:
        _, place, _ = sample_origin(rollout.sample_id)
        prompt = self._prompts[place]
        text = text_before_stop(list(rollout.response_tokens), self._stops, self._tokenizer.decode)
        return RewardCall(rollout.sample_id, prompt.row, prompt.text, text, rollout.response_tokens, prompt.where)
