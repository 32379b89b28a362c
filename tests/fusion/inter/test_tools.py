"""The turns of samples that wait for tools on one rank, and what is reported of them.

The lives of tests/fusion/inter/test_world.py have tools too; the bits of real ones are compared by
tests/gen/test_turns.py and tests/run/test_tool_runs.py.
"""

from types import SimpleNamespace

import pytest
from testkit.gen_models import engine_of

from rlhfuse.base.clock import Clock
from rlhfuse.fusion.inter.generation import as_rollout
from rlhfuse.fusion.inter.report import GenInferReport, RankEvents, joined, turns_of
from rlhfuse.fusion.inter.tools import Answer, Pauses
from rlhfuse.gen.core.sequence import SamplingParams
from rlhfuse.monitor.heartbeat import Waiting, WaitingOutside


class Alone:
    """The group of one rank."""

    is_leader, size = True, 1

    def broadcast(self, *values: int) -> tuple[int, ...]:
        return values


class ToldTools:
    """Answers when a test says so."""

    def __init__(self) -> None:
        self.submitted, self.ready, self.taken = [], [], []

    def asks(self, turn, number) -> bool:
        return number < 2

    def submit(self, *call) -> None:
        self.submitted.append(call)

    def answers(self) -> list[Answer]:
        return self.ready

    def delivered(self, sample_ids) -> None:
        self.taken += sample_ids
        self.ready = [answer for answer in self.ready if answer.sample_id not in sample_ids]

    def waiting(self) -> str:
        return "tool f of sample 1, turn 0 (3 s)"


@pytest.fixture
def paused():
    """Two samples whose first turns, of a token each, are over."""
    engine, tools, events, clock = engine_of(), ToldTools(), RankEvents(), Clock()
    for sample in (1, 2):
        stop = SamplingParams(max_tokens=20, stop_token_ids=range(301), turns=True)
        engine.add(sample, [9, 10], stop)
    pauses = Pauses(tools, engine, Alone(), events, clock)
    assert pauses.finished(engine.step()) == [] and not engine.has_unfinished()
    assert [(sample, number, len(turn), room) for sample, number, turn, room in tools.submitted] == [
        (1, 0, 1, 18),
        (2, 0, 1, 18),
    ]
    return SimpleNamespace(engine=engine, tools=tools, pauses=pauses, events=events, clock=clock)


def go_on(paused) -> list:
    paused.pauses.deliver(paused.pauses.announce())
    results = []
    while paused.engine.has_unfinished():
        results += paused.pauses.finished(paused.engine.step())
    return results


def test_turns_follow_one_another_to_the_end(paused):
    assert go_on(paused) == [] and not paused.tools.taken
    for number in range(2):
        paused.tools.ready = [Answer(1, (5, 6), seconds=0.25 + number)]
        results = go_on(paused)
    assert [result.sample_id for result in results] == [1] and paused.tools.taken == [1, 1]
    rollout = as_rollout(results[0])
    assert rollout.observed == ((1, 3), (4, 6)) and rollout.finish_reason == "stop" and len(rollout.old_logprobs) == 3
    turns = turns_of([rollout], [paused.events])
    assert turns == {1: [[1, 0.25, 2], [1, 1.25, 2], [1, 0.0, 0]]}
    assert joined([GenInferReport(turns=turns), GenInferReport(turns={7: []})]).turns == turns | {7: []}
    assert paused.clock.observed["pause"] == [[0.25, 2], [1.25, 2]]
    assert [(span.kind, span.args) for span in paused.clock.spans] == [
        ("call", {"sample": 1, "turn": 0}),
        ("call", {"sample": 1, "turn": 1}),
    ]


def test_an_answer_without_room_or_tokens_ends_its_sample_cut(paused):
    paused.tools.ready = [Answer(1, (5,) * 19), Answer(2, (), failed=True)]
    cut, failed = go_on(paused)
    assert cut.finish_reason == failed.finish_reason == "length" and not cut.observed and not failed.observed
    assert paused.pauses.failed == {2} and as_rollout(failed, True).failed and not paused.engine.samples


def test_answers_of_samples_that_were_dropped_go_to_nobody(paused):
    paused.tools.ready = [Answer(1, (5,)), Answer(2, (6,))]
    count = paused.pauses.announce()
    paused.engine.abort(2)
    paused.pauses.deliver(count)
    assert not paused.engine.parked and paused.tools.taken == [1, 2] and paused.engine.samples == 1
    paused.tools.ready = [Answer(7, (5,))]
    assert paused.pauses.announce() == 0 and paused.tools.taken == [1, 2, 7]
    assert len(paused.clock.observed["pause"]) == 1


def test_what_was_announced_and_not_delivered_stays_an_answer(paused):
    paused.tools.ready = [Answer(1, (5,))]
    assert paused.pauses.announce() == 4
    assert paused.pauses.announce() == 0, "one announcement at a time"
    paused.pauses.stop()
    assert paused.pauses.announce() == 4 and not paused.tools.taken


def test_the_watchdog_is_told_what_all_wait_for(paused):
    waiting = paused.pauses.waiting("generation")
    assert waiting == "generation: 2 samples wait for tools, the first for tool f of sample 1, turn 0 (3 s)"
    assert isinstance(waiting, WaitingOutside)
    paused.tools.waiting = str
    assert type(paused.pauses.waiting("here")) is Waiting
