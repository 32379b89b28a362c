"""Decoding on one instance: up to the first trigger, and the long tail after it.

Before the first trigger an instance that has decoded all of its own waits for the others, because they may need to
meet. In the tail every sample is published as it ends, and an instance without samples leaves.

The leader reads how many samples of the whole batch are finished; what it decides holds for all tensor ranks at the
same step boundary (`Relay`). Knows nothing of who is freed, and of scoring but for what it is observed beside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from rlhfuse.fusion.inter.inference import Rewarder
from rlhfuse.fusion.inter.report import Diary
from rlhfuse.fusion.inter.request import Request
from rlhfuse.fusion.inter.store_reporter import Courier
from rlhfuse.fusion.inter.team import Relay, Team
from rlhfuse.gen.engine import Engine
from rlhfuse.gen.sequence import GenerationResult
from rlhfuse.ppo.rollout import Rollout

IDLE_SECONDS = 0.002  # sleep of an instance that has nothing left to decode before the trigger
GO_ON, MEET = 0, 1


class Generation:
    """Generation of one iteration on this rank's instance."""

    def __init__(
        self,
        engine: Engine,
        team: Team,
        courier: Courier | None,
        rewarder: Rewarder | None,
        diary: Diary,
        instances: int,
        total: int,
        progress: Callable[[str], None],
    ) -> None:
        """`courier` and `rewarder` are the leader's; `total`: samples of the whole batch."""
        self._engine, self._team, self._courier, self._rewarder = engine, team, courier, rewarder
        self._diary = diary
        self._instances, self._total = instances, total
        self._progress = progress
        self._begin = time.time()
        self._in_engine = 0.0  # seconds of the running step

    def add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._engine.add(request.sample_id, request.prompt, request.params)

    def head(self, trigger: int) -> list[Rollout]:
        """Decode until at most `trigger` samples of the whole batch remain (0: all are done); returns this share's."""
        relay, done, steps = Relay(self._team, GO_ON), [], 0
        neighbour = "decoding" if self._instances > 1 else "idle"
        start = busy_until = self._begin = time.time()
        while True:
            begun, decoded = time.perf_counter(), self._engine.has_unfinished()
            if decoded:
                finished = self._step()
                self._tell(len(finished))
                done += finished
                busy_until = time.time()
            else:
                time.sleep(IDLE_SECONDS)
            steps += 1
            reached = self._reached(trigger, relay, f"generation: step {steps}")
            if decoded:
                self._observe(begun, neighbour)
            if reached:
                break
        relay.close()
        self._diary.span("generate", start, busy_until)
        self._diary.span("wait", busy_until, time.time())
        self._diary.generation_seconds = busy_until - self._begin
        return done

    def tail(self, trigger: int, others: int) -> None:
        """Decode what is left here, publishing each sample as it ends, or until at most `trigger` samples remain.

        `others`: how many more instances decode.
        """
        relay, start = Relay(self._team, GO_ON), time.time()
        if self._courier:
            self._courier.watch_scoring()
        while self._engine.has_unfinished():
            begun = time.perf_counter()
            left = len(self._engine.unfinished())
            if trigger and self._reached(trigger, relay, f"generation of the long tail: {left} samples left here"):
                break
            if not trigger:
                self._progress(f"generation of the long tail: {left} samples left here")
            neighbour = self._tail_neighbour(others)
            finished = self._step()
            self._tell(len(finished), [rollout.to_bytes() for rollout in finished])
            self._observe(begun, neighbour)
        relay.close()
        self._diary.span("generate", start, time.time())
        self._diary.generation_seconds = time.time() - self._begin

    def _step(self) -> list[Rollout]:
        start = time.perf_counter()
        results = self._engine.step()
        self._in_engine = time.perf_counter() - start
        for result in results:
            if result.finish_reason == "error":
                raise FloatingPointError(f"sample {result.sample_id}: the actor's logits are not finite")
        rollouts = [as_rollout(result) for result in results]
        if rollouts and self._rewarder and self._team.leads:
            self._rewarder.submit(rollouts)
        return rollouts

    def _observe(self, begun: float, neighbour: str) -> None:
        """Note the step that began at `begun` and is over now, from boundary to boundary.

        What lies between the engine's steps is theirs: small models spend a good part of their time there.
        """
        stats = self._engine.last_step
        seconds = stats.seconds + time.perf_counter() - begun - self._in_engine
        if stats.prefill_tokens:
            self._diary.observe("prefill", stats.prefill_tokens, stats.batch, seconds, neighbour)
        else:
            self._diary.observe("decode", stats.batch, stats.context_tokens, seconds, neighbour)

    def _tell(self, count: int, samples: Sequence[bytes] = ()) -> None:
        start = time.perf_counter()
        if self._courier and count:
            self._courier.finish(count, samples)
        self._diary.agreement_seconds += time.perf_counter() - start

    def _reached(self, trigger: int, relay: Relay, doing: str) -> bool:
        """Whether this step boundary is the one to meet at; the same on all tensor ranks."""
        start = time.perf_counter()
        decision = GO_ON
        if self._courier:
            finished = self._courier.finished
            self._progress(f"{doing}, {finished} of {self._total} samples finished")
            decision = MEET if self._total - finished <= trigger else GO_ON
        decision = relay.pass_on(decision)
        if self._engine.has_unfinished():  # who has nothing to decode loses nothing by waiting
            self._diary.agreement_seconds += time.perf_counter() - start
        return decision == MEET

    def _tail_neighbour(self, others: int) -> str:
        if self._courier and self._courier.scoring:
            return "scoring"
        return "decoding" if others else "idle"


def as_rollout(result: GenerationResult) -> Rollout:
    """A finished generation as a sample to be scored."""
    return Rollout(
        sample_id=result.sample_id,
        prompt_tokens=tuple(result.prompt_tokens),
        response_tokens=tuple(result.tokens),
        old_logprobs=torch.tensor(result.logprobs, dtype=torch.float32),
        finish_reason=result.finish_reason,
    )
