"""Decoding on one instance: up to the trigger, and the long tail after it (paper section 4).

Before the trigger an instance that has decoded all of its own waits, because the others may need it at the
barrier. In the tail every sample is published as it ends, and an instance without samples leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from rlhfuse.base.clock import Piece
from rlhfuse.base.sample_ids import sample_origin
from rlhfuse.base.token_spans import drawn_spans
from rlhfuse.fusion.inter.group_stream import GroupStream, LiveGroups
from rlhfuse.fusion.inter.inference import Rewarder
from rlhfuse.fusion.inter.iteration_store import IterationStore, StoreReporter
from rlhfuse.fusion.inter.report import RankEvents
from rlhfuse.fusion.inter.request import Request
from rlhfuse.fusion.inter.tensor_parallel_group import DelayedBroadcast, StepDecision, TensorParallelGroup
from rlhfuse.fusion.inter.tools import Pauses, Tools
from rlhfuse.gen.core.sequence import GenerationResult
from rlhfuse.gen.engine import Engine
from rlhfuse.monitor.heartbeat import WaitingForWork
from rlhfuse.ppo.rollout import Rollout

IDLE_SECONDS = 0.002  # sleep of an instance that has nothing left to decode before the trigger


@dataclass(eq=False)
class Generation:
    """Generation of one iteration on this rank's instance."""

    engine: Engine
    group: TensorParallelGroup
    reporter: StoreReporter | None  # the leader's, as `rewarder`
    rewarder: Rewarder | None
    events: RankEvents
    total: int  # samples of the whole batch
    progress: Callable[[str], None]
    load_scorers: Callable[[], None]  # called where weights may come in beneath what is left to decode, again and again
    store: IterationStore
    stream: GroupStream | None = None
    tools: Tools | None = None  # who is paused is unfinished
    began: list[int] = field(default_factory=list)  # ids of the samples that this instance has begun
    _begin: float = 0.0
    _stopping: bool = False  # the leader has decided to stop: what it decides from then on is never heard

    def __post_init__(self) -> None:
        self._clock = self.store.clock
        self._live = None  # of a leader, which decides for its instance which groups begin
        if self.stream and self.reporter and self.rewarder:
            self._live = LiveGroups(self.stream, self.reporter, self.rewarder)
        self._pauses = Pauses(self.tools, self.engine, self.group, self.events, self._clock) if self.tools else None
        self._end = self.stream.selection.end if self.stream else 0  # of the places that are needed

    def add(self, requests: Sequence[Request]) -> None:
        """Begin them here."""
        for request in requests:
            self.engine.add(request.sample_id, request.prompt, request.params)
            self.began.append(request.sample_id)

    def decode_until(self, threshold: int) -> list[Rollout]:
        """Decode until at most `threshold` samples of the whole batch remain; returns those that ended here."""
        decision, samples, steps = DelayedBroadcast(self.group, StepDecision(end=self._end)), [], 0
        with self._clock.work("generate") as busy:
            self._begin = busy.end = busy.start
            reached = False
            while not reached:
                step, decoded = self._clock.begin(), self.engine.has_unfinished()
                if decoded:
                    finished = self._step(step)
                    self._report_finished(len(finished))
                    samples += finished
                    busy.finish()
                else:
                    self._clock.sleep(IDLE_SECONDS)
                steps += 1
                if not threshold and not self.engine.scheduler.waiting:
                    self.load_scorers()
                reached = self._trigger_reached(threshold, decision, steps, decoded)
                if decoded:
                    self._observe(step)
            decision.close()
            if self._pauses:
                self._pauses.stop()
            if last := self._taken(self.engine.settle()):
                self._report_finished(len(last))
                samples += last
                busy.finish()
        self._clock.span("wait", busy.end)
        self.events.generation_seconds = busy.seconds
        return samples

    def decode_tail(self) -> None:
        """Decode what is left here, publishing each sample as it ends."""
        with self._clock.work("generate"):
            self.load_scorers()
            announced = DelayedBroadcast(self.group, StepDecision())
            while self.engine.samples or self.engine.has_unfinished():
                step = self._clock.begin()
                if self._pauses:
                    self._pauses.deliver(announced.pass_on(StepDecision(answers=self._pauses.announce())).answers)
                    if not self.engine.has_unfinished():
                        self.progress(self._pauses.waiting("generation of the long tail"))
                        self._clock.sleep(IDLE_SECONDS)
                        continue
                self.progress(f"generation of the long tail: {self.engine.samples} samples left here")
                finished = self._step(step)
                self._report_finished(len(finished), [rollout.to_bytes() for rollout in finished])
                self._observe(step)
            announced.close()
        self.events.generation_seconds = self._clock.now() - self._begin

    def _step(self, step: Piece) -> list[Rollout]:
        """The engine, which times itself, is not the step's own work."""
        with self._clock.work() as engine:
            results = self.engine.step()
        step.waited = engine.seconds
        return self._taken(results)

    def _taken(self, results: list[GenerationResult]) -> list[Rollout]:
        for result in results:
            if result.finish_reason == "error":
                raise FloatingPointError(f"sample {result.sample_id}: the actor's logits are not finite")
        if self._pauses:
            results = self._pauses.finished(results)
        rollouts = [as_rollout(result, result.sample_id in self._failed) for result in results]
        if rollouts and self.rewarder and self.group.is_leader:
            self.rewarder.submit(rollouts)
        return rollouts

    @property
    def _failed(self) -> Collection[int]:
        return self._pauses.failed if self._pauses else ()

    def _observe(self, step: Piece) -> None:
        stats = self.engine.last_step
        if not stats.batch:  # launched and not read yet: its seconds come with the next step's
            return
        # From boundary to boundary: small models spend a good part of their time between the engine's steps.
        self._clock.observe("step", *stats.observation()._replace(seconds=stats.seconds + step.seconds))

    def _report_finished(self, count: int, samples: Sequence[bytes] = ()) -> None:
        agreeing = self._clock.begin()
        if self.reporter and count:
            self.reporter.report(count, samples)
        self.events.agreement_seconds += agreeing.seconds

    def _trigger_reached(self, threshold: int, decision: DelayedBroadcast, steps: int, decoded: bool) -> bool:
        """Whether this step boundary is the one to stop at; groups begin here and are dropped, and paused samples go
        on; alike on all tensor ranks."""
        agreeing, decided, known = self._clock.begin(), StepDecision(end=self._end), ""
        if self.reporter:
            finished = self.reporter.finished
            known = f", {finished} of {self.total} samples finished"
            decided = self._decide(threshold, finished)
        doing = f"generation: step {steps}{known}"
        if not decoded and self._pauses and self.engine.samples:
            doing = self._pauses.waiting(doing)
        elif not decoded:
            doing = WaitingForWork(f"generation: nothing left to decode here{known}")
        self.progress(doing)
        if self._pauses:
            decided = replace(decided, answers=self._pauses.announce())
        now = decision.pass_on(decided)
        if self.stream:
            self._follow(self.stream, now.place, now.end)
        if self._pauses and not now.stop:
            self._pauses.deliver(now.answers)
        if self.engine.has_unfinished():  # who has nothing to decode loses nothing by waiting
            self.events.agreement_seconds += agreeing.seconds
        return now.stop

    def _decide(self, threshold: int, finished: int) -> StepDecision:
        """The leader's decision, but for answers."""
        if not self._live:
            return StepDecision(self.total - finished <= threshold, end=self._end)
        live = self._live
        live.update(self._failed)
        stops = live.remaining(self.total) <= threshold and (threshold > 0 or live.selection.done)
        self._stopping = self._stopping or stops
        assert self.stream is not None, "it is followed"
        place, free = None, self.engine.options.max_sequences - self.engine.samples
        if not self._stopping and (free >= self.stream.copies or not self.engine.samples):
            place = live.next_place(self.store.begin_places)
        return StepDecision(stops, place, live.selection.end)

    def _follow(self, stream: GroupStream, place: int | None, end: int) -> None:
        """Begin the group of a place, and drop all from `end` on."""
        if place is not None:
            self.progress(f"generation: beginning the group at place {place}")
            self.add(stream.requests(place))
        if end < self._end:
            self._end = end
            dropped = [sample for sample in self.engine.sample_ids if sample_origin(sample)[1] >= end]
            for sample in dropped:
                self.engine.abort(sample)
            self._report_finished(len(dropped))


def as_rollout(result: GenerationResult, failed: bool = False) -> Rollout:
    """A finished generation as a sample to be scored."""
    turns = drawn_spans(result.observed, len(result.tokens))

    def drawn(numbers: Sequence[float]) -> torch.Tensor:
        kept = chain.from_iterable(numbers[start:end] for start, end in turns) if result.observed else numbers
        return torch.tensor([*kept], dtype=torch.float32)

    entropies = drawn(result.entropies) if result.entropies else None
    facts = result.prompt_tokens, result.tokens, drawn(result.logprobs), result.finish_reason
    return Rollout(result.sample_id, *facts, entropies=entropies, observed=result.observed, failed=failed)
