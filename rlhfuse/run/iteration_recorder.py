"""Turns an iteration that has run into metrics, spans and samples, and shows it to the threshold controller.

Its time, and that of the log of the iteration before, is `timing_s/books`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from rlhfuse.base.clock import Clock, Piece, Span
from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.costs.flops import IterationFlops
from rlhfuse.fusion.inter.report import GenInferReport
from rlhfuse.fusion.intra.training_step import MinibatchResult
from rlhfuse.monitor.pace import PacedClock
from rlhfuse.monitor.samples import SampleText, TurnText
from rlhfuse.ppo.rollout import Rollout, RolloutBatch, given
from rlhfuse.run.iteration_metrics import (
    IterationStats,
    failing_tools,
    fusion_metrics,
    lengths_of,
    memory_metrics,
    mfu_metrics,
    reward_metrics,
    rollout_metrics,
    spared_metrics,
    speculation_metrics,
    speed_metrics,
    tool_metrics,
    training_metrics,
    turn_metrics,
)
from rlhfuse.run.preflight import RunInputs
from rlhfuse.run.threshold_controller import ThresholdController, step_observations


class IterationRecord(NamedTuple):
    """What is written down of an iteration."""

    metrics: dict[str, Any]
    spans: list[Span]  # of every rank
    samples: list[SampleText]


@dataclass
class IterationResult:
    """An iteration on this rank: every block adds what it gives."""

    number: int
    work: Piece  # all of it so far
    threshold: int  # R_t
    report: GenInferReport = field(init=False)
    filtered: Mapping[str, Any] = field(init=False)  # metrics of groups that were filtered
    batch: RolloutBatch = field(init=False)
    algorithm: AlgorithmConfig = field(init=False)  # as in force
    minibatches: list[MinibatchResult] = field(init=False)
    stats: IterationStats = field(init=False)


class IterationRecorder:
    """Records iterations on rank 0; the other ranks keep time alone."""

    def __init__(
        self,
        inputs: RunInputs,
        threshold: ThresholdController,
        peak_flops: float | None,
        clock: Clock,
    ) -> None:
        self._inputs, self._config, self._plan = inputs, inputs.config, inputs.plan
        self._threshold, self._peak_flops = threshold, peak_flops
        self._clock = clock
        self._log: Piece | None = None  # what follows an iteration's metrics
        self._logging = 0.0  # seconds of that, behind the last iteration
        self._failing: set[str] = set()  # tools that were said to fail

    def begin(self) -> Piece:
        """Begin an iteration, now."""
        self._logging = self._log.seconds if self._log else 0.0
        self._clock.forget()
        return self._clock.begin()

    def skip(self, seconds: float) -> None:
        """So long after the last iteration something ran that is none of its books."""
        if self._log:
            self._log.waited += seconds

    def record(self, done: IterationResult, ranks: Sequence[IterationStats]) -> IterationRecord:
        """The record of an iteration, of which `ranks` are the measurements of each rank. Rank 0 alone."""
        number = done.number
        metrics = {"iteration": number, **rollout_metrics(done.batch, done.algorithm)}
        metrics |= spared_metrics(done.batch, done.algorithm, done.minibatches)
        metrics |= turn_metrics(done.batch, done.report) | self._metrics(done, ranks)
        books = self._clock.begin()
        metrics |= speed_metrics(done.batch, done.work.seconds)
        if isinstance(self._clock, PacedClock):
            paces, cores = [stats.pace for stats in ranks if stats.pace], self._plan.cores
            metrics |= self._clock.pace_metrics(paces, metrics["timing_s/step"], cores)
        specs, lengths = self._inputs.models.specs, lengths_of(done.batch).trained
        passes = [pair for result in done.minibatches for pair in result.lengths]
        flops = IterationFlops.of(specs, self._config.trained(), self._config.scorers(), lengths, passes)
        metrics |= mfu_metrics(flops, metrics, self._inputs.world_size, self._peak_flops)
        message = self._threshold.observe(number, done.report, done.batch)
        if message:
            print(message, flush=True)
        steps = step_observations(done.report.observations["step"])
        metrics |= speculation_metrics(steps, self._threshold.plain_decode())
        spans = [span for stats in ranks for span in stats.spans]
        first = done.report.rollouts[: self._config.trainer.sample_texts]
        scores, turns = given(done.batch.scores).tolist(), done.report.turns
        samples = sample_texts(self._inputs.tokenizer, number, first, scores, turns)
        metrics["timing_s/books"] = self._logging + books.seconds
        self._log = self._clock.begin()
        return IterationRecord(metrics, spans, samples)

    def _metrics(self, done: IterationResult, ranks: Sequence[IterationStats]) -> dict[str, Any]:
        metrics = training_metrics(done.minibatches, ranks) | reward_metrics(done.report)
        leaders = [stats.tools for stats in ranks if stats.tools]
        metrics |= tool_metrics(done.report, leaders)
        for tool, error in failing_tools(leaders).items():
            if tool not in self._failing:
                self._failing.add(tool)
                print(f"warning: tool {tool} has failed in all its calls, the last with: {error}", flush=True)
        metrics |= fusion_metrics(done.report, done.threshold, self._plan.batch.instances)
        seconds = ranks[0].seconds  # of one rank, so that the blocks add up to the iteration
        names = (block.name for block in self._plan.iteration.blocks if block.name in seconds)
        metrics |= {f"timing_s/{name}": seconds[name] for name in names}
        metrics["perf/microbatch_tokens"] = max(max(result.parts_tokens) for result in done.minibatches)
        rungs = [self._plan.batch.cut.rung_of(result.parts_tokens) for result in done.minibatches]
        metrics["fusion/microbatches"] = fmean(rungs)
        metrics["fusion/makespan_predicted_seconds"] = sum(map(self._plan.makespan_seconds, rungs))
        metrics["fusion/makespan_measured_seconds"] = max(stats.program_seconds for stats in ranks)
        return metrics | memory_metrics(ranks) | dict(done.filtered)


def sample_texts(
    tokenizer: Any,
    iteration: int,
    rollouts: Sequence[Rollout],
    scores: Sequence[float],
    turns: Mapping[int, Sequence[Sequence[float]]],
    split: str = "train",
) -> list[SampleText]:
    """Samples of one iteration for people to read; of `scores` the first are theirs. `turns`: the report's."""
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    samples = []
    for rollout, score in zip(rollouts, scores):
        prompt, response = decode(rollout.prompt_tokens), decode(rollout.response_tokens)
        length, reason = len(rollout.response_tokens), rollout.finish_reason
        told, at = [], 0
        for drawn, pause, observed in turns.get(rollout.sample_id, ()) if rollout.observed else ():
            end, at, start = at + int(drawn), at + int(drawn + observed), at
            said, answered = decode(rollout.response_tokens[start:end]), decode(rollout.response_tokens[end:at])
            told.append(TurnText(said, answered, pause))
        samples.append(
            SampleText(iteration, rollout.sample_id, prompt, response, score, length, reason, split, tuple(told))
        )
    return samples
