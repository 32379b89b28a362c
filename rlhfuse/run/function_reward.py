"""The reward function of a run as the runtime asks for it: rollouts in, scores by sample id out.

Decodes the sampled tokens for the function; nothing is ever encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhfuse.data.reward_function import RewardCall
from rlhfuse.data.reward_workers import RewardWorkers
from rlhfuse.data.sampler import PromptSampler, sample_origin
from rlhfuse.gen.stop_text import text_before_stop
from rlhfuse.ppo.rollout import Rollout
from rlhfuse.run.preflight import RunInputs


class FunctionRewarder:
    """A `Rewarder` that calls the function of the configuration, in processes of its own."""

    def __init__(self, inputs: RunInputs, sampler: PromptSampler, progress: Callable[[str], None]) -> None:
        config, reward = inputs.config, inputs.config.reward
        self._prompts, self._tokenizer, self._sampler = inputs.prompts, inputs.tokenizer, sampler
        self._stops = config.rollout.stop
        self._count = config.rollout.prompts_per_iteration
        self._drawn: tuple[int, list[int]] = (-1, [])  # the iteration asked for last, and its prompts
        self._workers = RewardWorkers(
            reward.function, reward.signature, reward.workers, reward.timeout_seconds, progress
        )

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
        iteration, place, _ = sample_origin(rollout.sample_id)
        if self._drawn[0] != iteration:
            self._drawn = iteration, self._sampler.prompts_of(iteration, self._count)
        prompt = self._prompts[self._drawn[1][place]]
        text = text_before_stop(list(rollout.response_tokens), self._stops, self._tokenizer.decode)
        return RewardCall(rollout.sample_id, prompt.row, prompt.text, text, rollout.response_tokens, prompt.where)
