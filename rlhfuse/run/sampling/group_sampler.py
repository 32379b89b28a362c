"""The samples of an iteration: prompts drawn, generated and scored; where groups are filtered, until enough differ.

A round begins the groups that are expected to be missing. Where a reward function alone scores it goes on as groups are
judged (`GroupStream`); else what is still missing is a further round, with its share of R_t. Which groups are taken
depends on their scores by place alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlhfuse.base.sample_ids import sample_origin
from rlhfuse.data.prompts import Prompt, prompts_from
from rlhfuse.fusion.inter.group_stream import GroupStream
from rlhfuse.fusion.inter.inter_stage import InterStage
from rlhfuse.fusion.inter.report import GenInferReport, joined
from rlhfuse.fusion.inter.request import Request
from rlhfuse.ppo.rollout import RolloutBatch, given
from rlhfuse.ppo.token_rewards import combine_rewards, weighted_scores
from rlhfuse.run.preflight import RunInputs
from rlhfuse.run.sampling.function_reward import FunctionRewarder
from rlhfuse.run.sampling.tool_caller import ToolCaller
from rlhfuse.tasks.group_selection import BEGUN, EQUAL, PLACES, PREFIX, SURPLUS, GroupSelection
from rlhfuse.tasks.instance_limits import InstanceLimits


class GroupSampler:
    """Draws on this rank; holds how many prompts of the stream are used, and what part of groups differed lately."""

    def __init__(
        self,
        inputs: RunInputs,
        stage: InterStage,
        rewarder: FunctionRewarder | None,
        caller: ToolCaller | None,
        requests: Callable[[int, Sequence[Prompt], int], list[Request]],
        prepare: Callable[[], None],
    ) -> None:
        """`requests`: samples of prompts at the places from one on, in an iteration; `prepare`: makes the engine ready
        for a further round of it."""
        self._inputs, self._stage, self._rewarder, self._prepare = inputs, stage, rewarder, prepare
        self._requests, self._caller = requests, caller
        self._config, self._rule = inputs.config, inputs.config.algorithm.filter_groups
        self.drawn = 0  # prompts, by all iterations
        self.share = 1.0

    def run(self, iteration: int, threshold: int, limits: InstanceLimits) -> tuple[GenInferReport, dict[str, Any]]:
        """All samples of an iteration, and metrics of how groups were filtered; a collective. The engine is ready.

        Raises JointError where too few differ and that is an error, and as `InterStage.run`.
        """
        wanted, rounds = self._config.rollout.prompts_per_iteration, []
        if not self._rule.enable:
            prompts = self._draw(wanted)
            self.drawn += wanted
            return self._round(iteration, prompts, 0, wanted, threshold, limits), {}
        selection = GroupSelection(wanted, wanted * self._rule.max_num_gen_batches, prior=self.share)
        prompts, begun, inflight = self._draw(selection.most), 0, wanted * self._rule.max_inflight_gen_batches
        while not selection.done:
            if rounds:
                self._prepare()
            end = begun + selection.missing(begun, inflight)
            stream = self._stream(iteration, prompts, selection, end, inflight) if self._streams else None
            rounds.append(self._round(iteration, prompts, begun, end, threshold, limits, stream, len(rounds)))
            selection = selection.with_scores(self._scores(rounds[-1]))
            begun += rounds[-1].begun // self._config.rollout.samples_per_prompt
        taken, report = {*selection.taken(self._rule.on_shortage == "fill")}, joined(rounds)
        self.drawn, self.share = self.drawn + selection.end, selection.share
        every = zip(report.rollouts, prompt_places(report))
        report.rollouts = [rollout for rollout, place in every if place in taken]
        return report, self._metrics(selection, report, len(rounds))

    @property
    def _streams(self) -> bool:
        reward = self._config.reward
        return self._rule.streaming and bool(reward.function) and not reward.path

    def _draw(self, count: int) -> list[Prompt]:
        """The prompts of an iteration, in the order of their places."""
        prompts, seed = self._inputs.prompts, self._config.trainer.seed
        return [prompts[index] for index in prompts_from(len(prompts), seed, self.drawn, count)]

    def _round(
        self,
        iteration: int,
        prompts: Sequence[Prompt],
        first: int,
        end: int,
        threshold: int,
        limits: InstanceLimits,
        stream: GroupStream | None = None,
        number: int = 0,
    ) -> GenInferReport:
        requests = self._requests(iteration, prompts[first:end], first)
        if self._rewarder:
            self._rewarder.begin(prompts, self._config.rollout.samples_per_prompt)
        share = min(threshold, threshold * len(requests) // self._config.samples_per_iteration)
        name = f"{iteration}/round-{number}" if number else f"{iteration}"
        if self._caller:
            self._caller.begin(name, prompts)
        return self._stage.run(name, requests, share, limits, stream)

    def _stream(
        self, iteration: int, prompts: Sequence[Prompt], selection: GroupSelection, begun: int, inflight: int
    ) -> GroupStream:
        return GroupStream(
            selection,
            begun,
            self._config.rollout.samples_per_prompt,
            inflight,
            lambda place: self._requests(iteration, prompts[place : place + 1], place),
            lambda scores: weighted_scores(scores, self._config.reward).tolist(),
        )

    def _scores(self, report: GenInferReport) -> dict[int, list[float]]:
        """By place, as they count; of samples that failed none."""
        batch = RolloutBatch.from_rollouts(report.rollouts)
        batch = combine_rewards(batch, report.function_scores, self._config.reward)
        batch.check_finite()
        scores: dict[int, list[float]] = {place: [] for place in prompt_places(report)}
        for sample, score in zip(batch.intact.sample_ids.tolist(), given(batch.intact.scores).tolist()):
            scores[sample_origin(sample)[1]].append(score)
        return scores

    def _metrics(self, selection: GroupSelection, report: GenInferReport, rounds: int) -> dict[str, Any]:
        """Under the names that are known; and a letter for each place, of what became of it."""
        copies, taken = self._config.rollout.samples_per_prompt, {*prompt_places(report)}
        begun = report.begun // copies
        letters = selection.letters(begun, taken)
        return {
            f"{PREFIX}evicted_samples": letters.count(EQUAL) * copies,
            f"{PREFIX}discarded_surplus_samples": letters.count(SURPLUS) * copies,
            f"{PREFIX}aborted_samples": report.aborted,
            BEGUN: begun / selection.wanted,
            f"{PREFIX}rounds": rounds,
            f"{PREFIX}accepted_share": sum(selection.differs.values()) / len(selection.differs),
            PLACES: letters,
        }


def prompt_places(report: GenInferReport) -> Iterator[int]:
    """The place of each sample."""
    return (sample_origin(rollout.sample_id)[1] for rollout in report.rollouts)
