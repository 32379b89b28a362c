"""Slow ranks and late messages change no bit, nor do programs that went through text."""

from __future__ import annotations

import random
import time

import pytest
from testkit.training_pair import Plan, build_pair

STEPS = 3


def late(post, drawn: random.Random):
    """Waits a random time before each posting: up to 2 ms, one in fifty times 20 ms."""

    def posted(*arguments):
        time.sleep(0.02 if drawn.random() < 0.02 else 0.002 * drawn.random())
        return post(*arguments)

    return posted


def slow(work):
    """Takes twice as long as it needs."""

    def worked(*arguments):
        start = time.perf_counter()
        out = work(*arguments)
        time.sleep(time.perf_counter() - start)
        return out

    return worked


def train(rank: int, folders: dict, plan: Plan, steps: int, delayed=False, half_speed=None, programs=None) -> str:
    """The digest of a pair whose messages are late, or of whose ranks `half_speed` is slow."""
    pair, drawn = build_pair(rank, folders, plan), random.Random(rank)
    channels = pair.roles.channels
    if delayed:
        channels.send, channels.post_receive = late(channels.send, drawn), late(channels.post_receive, drawn)
    for model in pair.models.values():
        for stage in model.stages.values():
            if rank == half_speed:
                stage.forward, stage.backward = slow(stage.forward), slow(stage.backward)
    pair.set_step(programs=programs)
    for number in range(steps):
        pair.train(number)
    digest = pair.digest()
    pair.close()
    return digest


@pytest.fixture(scope="module")
def undisturbed(workers, folders):
    return workers.run(train, folders, Plan(), STEPS)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_at_half_speed_finishes_with_the_same_bits(workers, folders, undisturbed, rank):
    assert workers.run(train, folders, Plan(), STEPS, False, rank) == undisturbed


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "plan, steps",
    [(Plan(), 20), pytest.param(Plan(), 200, marks=SLOW), pytest.param(Plan("d1t2p2", "d2t1p2"), 200, marks=SLOW)],
)
def test_steps_under_random_delays_have_the_same_bits(workers, folders, plan, steps):
    on_time, delayed = (workers.run(train, folders, plan, steps, late) for late in (False, True))
    assert delayed == on_time


def test_programs_that_went_through_text_are_the_same(workers, folders, undisturbed):
    programs = Plan().programs
    again = type(programs).parse(programs.text())
    assert workers.run(train, folders, Plan(), STEPS, False, None, again) == undisturbed
