"""Decoding on one instance: up to the trigger, and the long tail after it (paper section 4).

Before the trigger an instance that has decoded all of its own waits, because the others may need it at the
barrier. In the tail every sample is published as it ends, and an instance without samples leaves.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlhfuse.fusion.inter.inference import Rewarder
from rlhfuse.fusion.inter.iteration_store import StoreReporter
from rlhfuse.fusion.inter.report import RankEvents
from rlhfuse.fusion.inter.tensor_parallel_group import DelayedBroadcast, TensorParallelGroup
from rlhfuse.gen.core.sequence import GenerationResult, SamplingParams
from rlhfuse.gen.engine import Engine
from rlhfuse.ppo.rollout import Rollout

IDLE_SECONDS = 0.002  # sleep of an instance that has nothing left to decode before the trigger
GO_ON, STOP = 0, 1


@dataclass(frozen=True)
class Request:
    """One sample to generate."""

    sample_id: int
    prompt: tuple[int, ...]
    params: SamplingParams


class Generation:
    """Generation of one iteration on this rank's instance."""

    def __init__(
        self,
        engine: Engine,
        group: TensorParallelGroup,
        reporter: StoreReporter | None,
        rewarder: Rewarder | None,
        events: RankEvents,
        total: int,
        progress: Callable[[str], None],
    ) -> None:
        """`reporter` and `rewarder` are the leader's; `total`: samples of the whole batch."""
        self._engine, self._group, self._reporter, self._rewarder = engine, group, reporter, rewarder
        self._events = events
        self._total = total
        self._progress = progress
        self._begin = time.time()
        self._in_engine = 0.0  # seconds of the running step

    def decode_until(self, threshold: int) -> list[Rollout]:
        """Decode until at most `threshold` samples of the whole batch remain; returns those that this instance ended.

        0: until all are done.
        """
        decision, samples, steps = DelayedBroadcast(self._group, GO_ON), [], 0
        start = busy_until = self._begin = time.time()
        while True:
            step_start, decoded = time.perf_counter(), self._engine.has_unfinished()
            if decoded:
                finished = self._step()
                self._report_finished(len(finished))
                samples += finished
                busy_until = time.time()
            else:
                time.sleep(IDLE_SECONDS)
            steps += 1
            reached = self._trigger_reached(threshold, decision, f"generation: step {steps}")
            if decoded:
                self._observe(step_start)
            if reached:
                break
        decision.close()
        self._events.span("generate", start, busy_until)
        self._events.span("wait", busy_until, time.time())
        self._events.generation_seconds = busy_until - self._begin
        return samples

    def decode_tail(self) -> None:
        """Decode what is left here, publishing each sample as it ends."""
        start = time.time()
        while self._engine.has_unfinished():
            step_start = time.perf_counter()
            self._progress(f"generation of the long tail: {len(self._engine.unfinished())} samples left here")
            finished = self._step()
            self._report_finished(len(finished), [pickle.dumps(rollout) for rollout in finished])
            self._observe(step_start)
        self._events.span("generate", start, time.time())
        self._events.generation_seconds = time.time() - self._begin

    def _step(self) -> list[Rollout]:
        start = time.perf_counter()
        results = self._engine.step()
        self._in_engine = time.perf_counter() - start
        for result in results:
            if result.finish_reason == "error":
                raise FloatingPointError(f"sample {result.sample_id}: the actor's logits are not finite")
        rollouts = [as_rollout(result) for result in results]
        if rollouts and self._rewarder and self._group.is_leader:
            self._rewarder.submit(rollouts)
        return rollouts

    def _observe(self, step_start: float) -> None:
        """Record the step that is over now, from boundary to boundary.

        What lies between the engine's steps is theirs: small models spend a good part of their time there.
        """
        stats = self._engine.last_step
        seconds = stats.seconds + time.perf_counter() - step_start - self._in_engine
        if stats.prefill_tokens:
            self._events.observe("prefill", stats.prefill_tokens, stats.batch, seconds)
        else:
            self._events.observe("decode", stats.batch, stats.context_tokens, seconds)

    def _report_finished(self, count: int, samples: Sequence[bytes] = ()) -> None:
        start = time.perf_counter()
        if self._reporter and count:
            self._reporter.report(count, samples)
        self._events.agreement_seconds += time.perf_counter() - start

    def _trigger_reached(self, threshold: int, decision: DelayedBroadcast, doing: str) -> bool:
        """Whether this step boundary is the one to stop at; the same on all tensor ranks."""
        start = time.perf_counter()
        decided = GO_ON
        if self._reporter:
            finished = self._reporter.finished
            self._progress(f"{doing}, {finished} of {self._total} samples finished")
            decided = STOP if self._total - finished <= threshold else GO_ON
        decided = decision.pass_on(decided)
        if self._engine.has_unfinished():  # who has nothing to decode loses nothing by waiting
            self._events.agreement_seconds += time.perf_counter() - start
        return decided == STOP


def as_rollout(result: GenerationResult) -> Rollout:
    """A finished generation as a sample to be scored."""
    return Rollout(
        sample_id=result.sample_id,
        prompt_tokens=tuple(result.prompt_tokens),
        response_tokens=tuple(result.tokens),
        old_logprobs=torch.tensor(result.logprobs, dtype=torch.float32),
        finish_reason=result.finish_reason,
    )
