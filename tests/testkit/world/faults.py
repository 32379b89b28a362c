"""Faults that somebody could make in the inter-stage code, each as a patch that a test puts into place.

`PLANTED` names them. A suite that does not find one of them could not find another of its kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhfuse.fusion.inter import generation, group_stream, iteration_store, scoring_queue, tensor_parallel_group
from rlhfuse.run.sampling.function_reward import FunctionRewarder
from rlhfuse.run.sampling.tool_caller import ToolCaller
from testkit.world import stand_ins

Patch = tuple[Any, str, Any]  # (owner, name, what stands there instead)


def waits_for_more_than_begins() -> Patch:
    """A leader waits for groups that no leader would begin."""

    def remaining(self: Any, first: int) -> int:
        missing = self.selection.missing(self.begun, self.selection.most)
        added = self.begun - self._stream.begun
        return first + (added + missing) * self._stream.copies - self._reporter.finished

    return group_stream.LiveGroups, "remaining", remaining


def score_letter_lost() -> Patch:
    """Letters about scores are overwritten: their number is not counted."""

    def send(self: Any, instance: int | str, text: str) -> None:
        index = self._add(f"mail/{instance}", 0)
        self._add(f"mail/{instance}", 1)
        self._store.set(f"{self._prefix}mail/{instance}/{index}", text)

    return iteration_store.IterationStore, "send", send


def ticket_read_and_written_apart() -> Patch:
    def next_ticket(self: Any) -> int:
        ticket = self._add("tickets", 0)
        self._add("tickets", 1)
        return ticket

    return iteration_store.IterationStore, "next_ticket", next_ticket


def published_after_it_was_counted() -> Patch:
    def exchange(self: Any) -> None:
        samples, self._samples = self._samples, []
        original(self)
        if samples:
            self._store.publish(samples)

    original = iteration_store.StoreReporter._exchange
    return iteration_store.StoreReporter, "_exchange", exchange


def stop_heard_by_one_tensor_rank() -> Patch:
    """The leader's decision is in force on the leader at once."""

    def pass_on(self: Any, decision: Any) -> Any:
        heard = original(self, decision)
        return decision if self._group.is_leader else heard

    original = tensor_parallel_group.DelayedBroadcast.pass_on
    return tensor_parallel_group.DelayedBroadcast, "pass_on", pass_on


def answer_stays_at_the_source() -> Patch:
    """The answers of samples that left in a pause are not sent after them."""
    return ToolCaller, "_send_late", lambda self, store: None


def taken_without_comparing() -> Patch:
    def try_take(self: Any, first: int, count: int, worker: int) -> bool:
        _, taken = self._read_taken()
        if taken == first:
            self._store.set(self._prefix + "taken", f"{first + count} {worker}")
        return taken == first

    return iteration_store.IterationStore, "try_take", try_take


def place_begun_by_two_leaders() -> Patch:
    def begin_places(self: Any, count: int) -> int:
        before = self._add("places", 0)
        self._add("places", count)
        return before + count

    return iteration_store.IterationStore, "begin_places", begin_places


def dropped_samples_not_counted() -> Patch:
    def follow(self: Any, stream: Any, place: int, end: int) -> None:
        report, self._report_finished = self._report_finished, lambda *_: None
        original(self, stream, place, end)
        self._report_finished = report

    original = generation.Generation._follow
    return generation.Generation, "_follow", follow


def sample_scored_where_it_ended() -> Patch:
    """A sample of the tail is not sent to the instance that calls the reward function for it."""

    def take(self: Any, samples: Any) -> None:
        here = {
            sample: one for sample, one in samples.items() if not self._met or self._homes[sample] == self._met.instance
        }
        original(self, here)

    original = FunctionRewarder._take
    return FunctionRewarder, "_take", take


def paused_samples_not_counted() -> Patch:
    """An instance leaves the tail while samples of it wait for tools."""

    def decode_tail(self: Any) -> None:
        samples = type(self.engine).samples
        type(self.engine).samples = property(lambda engine: len(engine._samples) - len(engine.parked))
        try:
            original(self)
        finally:
            type(self.engine).samples = samples

    original = generation.Generation.decode_tail
    return generation.Generation, "decode_tail", decode_tail


def free_instance_not_counted() -> Patch:
    """Two instances of a worker that are done at the same time count as one."""

    def add_free(self: Any, worker: int, count: int) -> int:
        before = self._add(f"free/{worker}", 0)
        if count:
            self._store.set(f"{self._prefix}free/{worker}", str(before + count))
        return before + count

    return iteration_store.IterationStore, "add_free", add_free


def works_before_it_is_whole() -> Patch:
    """A worker takes work while one of the instances that it spans still decodes."""
    return scoring_queue.ScoringQueue, "_wait_for_instances", lambda self: None


def loaded_before_they_arrive() -> Patch:
    """Models are loaded from copies in host memory that are not there yet."""
    return stand_ins.StandInModel, "await_values", lambda self: None


PLANTED: tuple[Callable[[], Patch], ...] = (
    waits_for_more_than_begins,
    score_letter_lost,
    ticket_read_and_written_apart,
    published_after_it_was_counted,
    stop_heard_by_one_tensor_rank,
    answer_stays_at_the_source,
    taken_without_comparing,
    place_begun_by_two_leaders,
    dropped_samples_not_counted,
    sample_scored_where_it_ended,
    paused_samples_not_counted,
    free_instance_not_counted,
    loaded_before_they_arrive,
    works_before_it_is_whole,
)
