"""The migration plan: m's formula, nothing lost, room kept, the same plan from the same numbers, text forms."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.base.errors import InputError
from rlhfuse.tasks.instance_limits import InstanceLimits, SampleMoveCost
from rlhfuse.tasks.migration import MigrationPlan, SampleMove, UnfinishedSample, plan_migration

FAST_LINK = SampleMoveCost(100.0, 0.0, 1e-9, 1e-3)
SLOW_LINK = SampleMoveCost(100.0, 0.0, 1.0, 1e-3)
BLOCK = 16


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


@pytest.mark.parametrize(
    "threshold, bs_max, sample, capacity, instances, expected",
    [
        (102, 16, 1.0, 1000.0, 32, 7),  # 102 / 16 = 6.4: the batch decides
        (102, 16, 100.0, 1000.0, 32, 11),  # 102 x 100 / 1000 = 10.2: memory decides
        (102, 16, 1000.0, 1000.0, 32, 31),  # clamped to n - 1
        (1, 64, 1.0, 1000.0, 2, 1),  # clamped to 1
        (0, 64, 1.0, 1000.0, 4, 1),
        (30, 10, 0.1, 1.0, 8, 3),  # exact quotients do not round up
    ],
)
def test_destination_count(threshold, bs_max, sample, capacity, instances, expected):
    limits = InstanceLimits(64, capacity, sample / 2, BLOCK, bs_max, 1, 1, 64)
    assert limits.destinations(threshold, instances) == expected
    pausing = replace(limits, active_share=0.5)
    assert pausing.destinations(2 * threshold, instances) == expected, "half of the time needs half of the room"
    with pytest.raises(InputError, match="1 generation instance"):
        limits.destinations(threshold, 1)  # has no one to free


def test_the_fullest_stay_and_the_others_are_dealt_by_blocks():
    states = [
        *(UnfinishedSample(i, 0, 32, 32) for i in range(3)),  # 6 blocks
        *(UnfinishedSample(10 + i, 1, 16, 16) for i in range(3)),  # 3 blocks
        UnfinishedSample(20, 2, 160, 160),
        UnfinishedSample(21, 2, 16, 16),
        UnfinishedSample(30, 3, 48, 0),  # waits
    ]
    plan = str(plan_migration(states, 2, [100] * 4, BLOCK, FAST_LINK)).splitlines()
    assert plan[:3] == ["destinations 0 1", "freed 2 3", "stays 0 1 2 10 11 12"]
    assert plan[3:] == ["move 21:2>0 kv 16", "move 30:3>0 tokens 0", "move 20:2>1 kv 160"]


@pytest.mark.parametrize(
    "places, count, free, link, moves",
    [
        (((20,),) * 4, 2, [9] * 4, FAST_LINK, ["2:2>0 kv 20", "3:3>1 kv 20"]),  # a tie goes to the lower instance
        (((50, 50), (9, 9), (40,)), 2, [3, 2, 0], FAST_LINK, ["4:2>0 kv 40"]),  # fuller, with room: the cache stays
        (((90, 90), (40,)), 1, [3, 0], FAST_LINK, ["2:1>0 kv 40"]),  # 40 tokens and the next one need 3 blocks
        (((90, 90), (40,)), 1, [2, 0], FAST_LINK, ["2:1>0 tokens 0"]),
        (((90, 90), (40,)), 1, [9, 9], SLOW_LINK, ["2:1>0 tokens 0"]),  # which is quicker
    ],
)
def test_a_sample_moves_where_there_is_room_the_quicker_way(places, count, free, link, moves):
    """`places`: tokens of the samples of each instance."""
    held = [(instance, tokens) for instance, samples in enumerate(places) for tokens in samples]
    states = [UnfinishedSample(number, instance, tokens, tokens) for number, (instance, tokens) in enumerate(held)]
    assert [str(move) for move in plan_migration(states, count, free, BLOCK, link).moves] == moves


def test_shared_blocks_are_sent_and_stored_once():
    """Four samples of one prompt, 3 blocks of it shared: 4 + 1 + 1 + 1 blocks are room for all, one less is not."""
    states = [UnfinishedSample(i, 0, 60, 59, (7, 8, 9)) for i in range(4)]
    states += [UnfinishedSample(10 + i, 1, 16, 16) for i in range(5)]
    for free, modes in ((7, ["kv"] * 4), (6, ["kv"] * 3 + ["tokens"])):
        assert [m.mode for m in plan_migration(states, 1, [0, free], BLOCK, FAST_LINK).moves] == modes
    # 0.1 s before the first byte: worth it for 59 tokens of 5 ms, not for the 11 that the others have to themselves.
    slow_start = SampleMoveCost(100.0, 0.1, 1e-9, 5e-3)
    modes = [m.mode for m in plan_migration(states, 1, [0, 99], BLOCK, slow_start).moves]
    assert modes == ["kv", "tokens", "tokens", "tokens"]
    # Two that go to different places share nothing on the way.
    apart = [UnfinishedSample(i, 0, 60, 59, (7, 8, 9)) for i in range(2)]
    apart += [UnfinishedSample(10 + i, 1 + i % 2, 16, 16) for i in range(6)]
    moves = plan_migration(apart, 2, [0, 99, 99], BLOCK, slow_start).moves
    assert [str(m) for m in moves] == ["0:0>1 kv 59", "1:0>2 kv 59"]


@st.composite
def problems(draw):
    instances = draw(st.integers(2, 8))
    rows = draw(st.lists(st.tuples(st.integers(0, instances - 1), st.integers(1, 300), st.booleans()), max_size=40))
    states = [UnfinishedSample(i, where, tokens, 0 if wait else tokens) for i, (where, tokens, wait) in enumerate(rows)]
    free = draw(st.lists(st.integers(0, 30), min_size=instances, max_size=instances))
    return states, instances, draw(st.integers(1, instances - 1)), free


@examples(150)
@given(problems(), st.randoms(use_true_random=False))
def test_invariants(problem, shuffler: random.Random):
    states, instances, count, free = problem
    plan = plan_migration(states, count, free, BLOCK, FAST_LINK)
    by_id = {state.sample_id: state for state in states}
    moved = [move.sample_id for move in plan.moves]
    assert sorted([*moved, *plan.stays]) == sorted(by_id)  # nothing lost, nothing twice
    assert len(plan.destinations) == count
    assert sorted((*plan.destinations, *plan.freed)) == list(range(instances))
    held = {i: sum(s.instance == i for s in states) for i in range(instances)}
    assert min(held[i] for i in plan.destinations) >= max(held[i] for i in plan.freed)
    assert all(by_id[i].instance in plan.destinations for i in plan.stays)
    for move in plan.moves:
        assert move.source == by_id[move.sample_id].instance and move.source in plan.freed
        assert move.destination in plan.destinations
        assert move.kv_tokens == (by_id[move.sample_id].kv_tokens if move.mode == "kv" else 0)
        assert move.mode == "tokens" or by_id[move.sample_id].kv_tokens
    for instance in plan.destinations:
        arriving = [m for m in plan.moves if m.destination == instance and m.mode == "kv"]
        assert sum(blocks(m.kv_tokens + 1) for m in arriving) <= free[instance]
    shuffled = list(states)
    shuffler.shuffle(shuffled)
    assert plan_migration(shuffled, count, free, BLOCK, FAST_LINK) == plan  # order of arrival is nothing
    assert MigrationPlan.parse(str(plan)) == plan


@pytest.mark.parametrize("text", ["", "17:3>0 kv", "17:3>0 page 4", "a:3>0 kv 4"])
def test_malformed_moves_are_refused(text):
    with pytest.raises(InputError, match="not of the form"):
        SampleMove.parse(text)


def test_malformed_plans_are_refused():
    for text, message in ("destination 0\nfreed 1\nstays", "'destination 0'"), ("freed 1\nstays 2", "all needed"):
        with pytest.raises(InputError, match=message):
            MigrationPlan.parse(text)
    with pytest.raises(InputError, match="share a sample id"):
        plan_migration([UnfinishedSample(1, 0, 5, 5)] * 2, 1, [9, 9], BLOCK, FAST_LINK)
    with pytest.raises(InputError, match="at least 1 and at most n - 1"):
        plan_migration([], 2, [9, 9], BLOCK, FAST_LINK)
