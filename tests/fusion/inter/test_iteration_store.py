"""What ranks tell each other through the store, and what their notes add up to; in one process."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch.distributed as dist

from rlhfuse.decisions.migration import MigrationPlan, Move, MoveCost, SequenceState
from rlhfuse.fusion.inter.iteration_store import Board
from rlhfuse.fusion.inter.migration_barrier import Meeting
from rlhfuse.fusion.inter.report import Diary, HandOver, Stop, longest_pause, merge_hand_overs, summarize
from rlhfuse.fusion.inter.request import FusionLimits
from rlhfuse.fusion.inter.store_reporter import Courier
from rlhfuse.fusion.inter.team import Relay, Team

PLAN = MigrationPlan((1,), (0, 2), (Move(7, 0, 1, "kv", 20), Move(8, 2, 1, "tokens", 0)), (9,))


@pytest.fixture
def board():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return Board(dist.PrefixStore("job", store), 3, timeout_seconds=540)


def test_published_samples_are_taken_once_however_many_workers_try(board):
    for i in range(60):
        board.publish([b"sample %d" % i])
    won: list[tuple[int, int]] = []

    def work(worker: int) -> None:
        own = board.connected_anew()
        while (first := own.taken()) < 60:
            count = min(1 + worker % 2, 60 - first)  # two workers want the same
            if own.take(first, count, worker):
                won.append((first, first + count))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    taken = [i for first, last in won for i in range(first, last)]
    assert sorted(taken) == list(range(60)) and board.taken() == 60
    assert board.fetch(59) == b"sample 59"
    assert not board.take(5, 1, 0), "others were quicker"


def test_what_never_comes_is_named(board):
    board._timeout = 0.2
    board.bring(1, 0, b"note")
    with pytest.raises(TimeoutError, match="sample 0 of the long tail was announced but not sent in 0 s"):
        board.fetch(0)
    with pytest.raises(TimeoutError, match="instance 2 of 2 instances did not come to meeting 1"):
        board.notes(1, (0, 2))
    assert board.notes(1, (0,)) == {0: b"note"}


def test_a_board_leaves_no_key(board):
    board.finish(2), board.publish([b"x"]), board.claim(), board.take(0, 1, 5), board.bring(1, 0, b"n")
    board.note_scoring(1), board.note_waiting(1)
    board.clear(meetings=2, instances=1)
    assert board.finish(0) == board.published() == board.taken() == board.scoring() == 0


def test_a_courier_tells_everything_before_it_ends_and_keeps_the_count(board):
    with Courier(board, poll_seconds=0.001) as courier:
        courier.finish(1)
        courier.finish(2, [b"a", b"b"])
        assert board.finish(4) >= 4  # somebody else's
        while courier.finished < 7:
            time.sleep(0.001)
        courier.finish(3)
    assert board.finish(0) == 10 and board.published() == 2 and {board.fetch(0), board.fetch(1)} == {b"a", b"b"}


def test_a_courier_does_not_keep_its_owner_waiting(board, monkeypatch):
    """The store answers only when the owner is through with all it has to say."""
    own, answers, waited = Board.finish, threading.Event(), []
    monkeypatch.setattr(Board, "finish", lambda *given: (waited.append(answers.wait(120)), own(*given))[1])
    with Courier(board) as courier:
        for _ in range(100):
            courier.finish(1)
            assert courier.finished == 0
        answers.set()
    assert board.finish(0) == 100 and all(waited)


def test_a_courier_that_fails_says_so_to_who_asks(board, monkeypatch):
    def broken(*_):
        raise ConnectionError("the store is gone")

    monkeypatch.setattr(Board, "finish", broken)
    with pytest.raises(ConnectionError, match="the store is gone"), Courier(board) as courier:
        while courier.finished == 0:
            time.sleep(0.001)


def test_a_team_of_one_needs_no_group():
    team = Team((5,), 5, None)
    assert team.leads and team.agree(1, 2) == (1, 2)
    relay = Relay(team, 0)
    assert [relay.pass_on(value) for value in (0, 1)] == [0, 1]


# meetings -----------------------------------------------------------------------------------------------------


def note(states=(), free=10, left=False):
    return json.dumps({"states": states, "free": free, "left": left}).encode()


LIMITS = FusionLimits(4, 1.0, 100.0, 8, MoveCost(1, 0.0, 0.0, 1.0, 1.0), 64)


def test_who_has_left_is_not_in_the_plan():
    notes = {0: note([[7, 20, 19, [1, 2]]]), 2: note(left=True), 3: note([[8, 20, 19, []], [9, 9, 8, []]])}
    meeting = Meeting.of(notes, 4)
    assert meeting.among == (0, 3) and meeting.free_blocks == (10, 0, 10, 10)
    plan = meeting.plan(4, LIMITS)
    assert plan.destinations == (3,) and plan.freed == (0,) and plan.stays == (8, 9)
    assert meeting.bytes_needed(plan, 8, 100) == 300
    alone = Meeting.of({0: note([[7, 20, 19, []]]), 3: note(left=True)}, 4)
    assert alone.plan(4, LIMITS) is None and Meeting.of({0: note(), 1: note()}, 2).plan(4, LIMITS) is None


def test_shared_blocks_are_needed_once_by_a_destination():
    states = tuple(SequenceState(i, i // 2, 20, 20, (1, 2)) for i in range(4))
    moves = tuple(Move(i, i // 2, 2, "kv", 20) for i in range(4))
    meeting = Meeting((0, 1, 2), states, (9, 9, 9))
    assert meeting.bytes_needed(MigrationPlan((2,), (0, 1), moves, ()), 8, 1) == 2 * (3 + 1)


# the report ---------------------------------------------------------------------------------------------------


def test_of_the_two_sides_of_a_hand_over_the_one_that_did_not_wait_counts():
    sides = [HandOver(0, 0, 1, 640, 0.5), HandOver(0, 0, 1, 0, 0.2), HandOver(1, 2, 1, 0, 0.1)]
    assert merge_hand_overs(sides) == [HandOver(0, 0, 1, 640, 0.2), HandOver(1, 2, 1, 0, 0.1)]


def test_a_pause_is_from_the_step_here_to_the_step_there():
    stops = [Stop(0, 0, 10.0, 11.0), Stop(0, 1, 10.2, 10.9), Stop(0, 2, 10.1, 10.3)]
    assert longest_pause(stops, [PLAN]) == pytest.approx(0.9) and longest_pause([], []) == 0.0


def test_the_report_adds_up_what_ranks_tell():
    freed, stays = Diary(leads=True, plans=[PLAN]), Diary(leads=True, plans=[PLAN, PLAN])
    freed.observe("score", 10, 2, 0.5, "decoding")
    freed.hand_overs.append(HandOver(0, 0, 1, 640, 0.5))
    freed.scored_early, stays.scored_early = 2, 1
    freed.agreement_seconds, stays.generation_seconds, stays.bytes_needed = 0.01, 4.0, 700
    freed.stops += [Stop(0, 0, 1.0, 2.0), Stop(0, 2, 1.0, 2.0), Stop(1, 0, 5.0, 6.0), Stop(1, 2, 5.0, 6.0)]
    stays.stops += [Stop(0, 1, 1.0, 2.0), Stop(1, 1, 5.0, 6.0)]
    freed.met(0, 0.75)
    stays.met(0, 0.3125)  # came last, and moved nothing itself
    stays.met(1, 0.5)
    report = summarize([json.loads(one.to_json({})) for one in (freed, stays)])
    assert report.plans == (PLAN, PLAN) and report.migrated_samples == 4 and report.recomputed_samples == 2
    assert report.migrated_bytes == 640 and report.bytes_needed == 700 and report.scored_before_generation_end == 3
    assert report.agreement_seconds == 0.01 and report.generation_seconds == 4.0
    assert report.observations["score"] == [[10, 2, 0.5, "decoding"]]
    assert report.observations["migration"] == [[640, 0.5, "decoding"]]
    assert report.observations["meeting"] == [[0.25], [0.5]], "without what was moved; of each, who waited least"
