"""Samples that wait for tools: the same bits whatever R_t, whoever waits how long, and whether it moves meanwhile."""

import random
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
from testkit.gen_models import engine_of
from testkit.inter_stage_case import clean_up, iterate, write_models
from testkit.scripted_tools import HELD, TURNS, ScriptedTools, ToolCase

from rlhfuse.fusion.inter.generation import as_rollout
from rlhfuse.fusion.inter.report import GenInferReport, RankEvents, joined, turns_of
from rlhfuse.fusion.inter.tools import Answer, Pauses
from rlhfuse.gen.core.sequence import SamplingParams
from rlhfuse.monitor.heartbeat import Waiting, WaitingOutside

LENGTHS = tuple(random.Random(4).choice((8, 15, 30, 60, 120)) for _ in range(20))


TOOLS: list[ScriptedTools] = []  # of this rank


def with_tools(stage, scorer, made, case, store) -> None:
    TOOLS[:] = [ScriptedTools(case, store.clone())]
    object.__setattr__(stage, "tools", TOOLS[0])


def run_rank(rank: int, folders, case: ToolCase, number: int) -> dict:
    found = iterate(rank, folders, case, number, with_tools)
    tools = TOOLS[0]
    assert not tools._done and not tools._gone and not tools._pending and not tools._adopted
    return found | {"handed": tools.handed_over, "taken": tools.taken_over}


@pytest.fixture(scope="module")
def run(workers, tmp_path_factory):
    folders, numbers = write_models(tmp_path_factory.mktemp("models")), count(5000)

    def call(case: ToolCase) -> list[dict]:
        results = workers.run(run_rank, folders, case, next(numbers))
        assert len({one["digest"] for one in results}) == 1
        return results

    yield call
    workers.run(clean_up)


@pytest.mark.parametrize("layout", ["d4t1p1", "d2t2p1"])
def test_one_set_of_bits(run, layout):
    base = ToolCase(LENGTHS, layout=layout, scorers=("reference", "critic"))
    serial = run(base)[0]
    assert sum(len(rollout.observed) for rollout in serial["rollouts"]) > 20
    for rollout in serial["rollouts"]:
        drawn = sum(end - start for start, end in rollout.turns)
        assert len(rollout.ref_logprobs) == len(rollout.values) == drawn
    for threshold, by, slowest in (
        (0, "kv", 0.1),
        (3, "kv", 0.2),
        (7, "tokens", 0.1),
        (14, "kv", 0.1),
        (20, "kv", 0.05),
    ):
        fused = run(replace(base, threshold=threshold, by=by, slowest=slowest))
        assert fused[0]["digest"] == serial["digest"], (threshold, by, slowest)
        assert sum(one["handed"] for one in fused) == sum(one["taken"] for one in fused)


@pytest.mark.parametrize("layout, by", [("d4t1p1", "kv"), ("d4t1p1", "tokens"), ("d2t2p1", "kv")])
def test_who_moves_in_its_pause_gets_its_answer(run, layout, by):
    """All that is left at the trigger waits, for answers that come when everybody has left for the barrier."""
    base = ToolCase(tuple(120 if 1000 + i in HELD else 20 for i in range(20)), layout=layout, guesses=False)
    held = replace(base, threshold=len(HELD), by=by, holds=True, bs_max=16)
    fused = run(held)
    assert fused[0]["digest"] == run(base)[0]["digest"]
    report, taken = fused[0]["report"], sum(one["taken"] for one in fused)
    assert taken == sum(one["handed"] for one in fused) == report.migrated_samples >= 2
    assert (report.recomputed_samples < taken, report.migrated_bytes > 0) == (by == "kv", by == "kv")


def test_a_sample_whose_tool_fails_keeps_its_place(run):
    base = ToolCase(LENGTHS, scorers=("reference",))
    failing = next(rollout.sample_id for rollout in run(base)[0]["rollouts"] if len(rollout.observed) > 2)
    case = replace(base, failing=failing, slowest=0.05)
    serial, fused = run(case)[0], run(replace(case, threshold=12))[0]
    assert serial["digest"] == fused["digest"]
    assert [one.sample_id for one in serial["rollouts"] if one.failed] == [failing]
    lost = next(rollout for rollout in serial["rollouts"] if rollout.failed)
    assert len(lost.observed) == 1 and not lost.truncated


def test_what_is_reported_of_turns(run):
    ranks = run(ToolCase(LENGTHS, scorers=("reference",), threshold=10, slowest=0.02))
    report = ranks[0]["report"]
    for rollout in ranks[0]["rollouts"]:
        drawn, pauses, observed = zip(*report.turns[rollout.sample_id])
        assert sum(drawn) + sum(observed) == len(rollout.response_tokens) and sum(drawn) == len(rollout.old_logprobs)
        assert len(drawn) == len(rollout.turns) and (pauses[-1], observed[-1]) == (0.0, 0)
        assert all(0 < seconds < 0.02 for seconds in pauses[:-1])
    rows = report.observations["pause"]
    assert len(rows) >= sum(len(turns) - 1 for turns in report.turns.values()) > 20
    spans = [span for one in ranks for span in one["report"].spans if span.kind == "call"]
    assert len(spans) == len(rows) and all(span.args["turn"] < TURNS for span in spans)
    assert joined([report, replace(report, turns={7: [[1, 0.0, 0]]})]).turns.keys() == {7, *report.turns}


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
    engine, tools, events = engine_of(), ToldTools(), RankEvents(0, True)
    for sample in (1, 2):
        stop = SamplingParams(max_tokens=20, stop_token_ids=range(301), turns=True)
        engine.add(sample, [9, 10], stop)
    pauses = Pauses(tools, engine, Alone(), events)
    assert pauses.finished(engine.step()) == [] and not engine.has_unfinished()
    assert [(sample, number, len(turn), room) for sample, number, turn, room in tools.submitted] == [
        (1, 0, 1, 18),
        (2, 0, 1, 18),
    ]
    return SimpleNamespace(engine=engine, tools=tools, pauses=pauses, events=events)


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
    assert turns_of([rollout], [paused.events]) == {1: [[1, 0.25, 2], [1, 1.25, 2], [1, 0.0, 0]]}
    assert paused.events.observed["pause"] == [[0.25, 2], [1.25, 2]]
    assert [(span.kind, span.args) for span in paused.events.spans] == [
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
    assert len(paused.events.observed["pause"]) == 1


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


def test_nothing_to_join():
    assert joined([GenInferReport(), GenInferReport()]).turns == {}
