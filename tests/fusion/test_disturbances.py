"""Slow ranks and late messages change no bit; what cannot be run is refused before anything is sent."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
from training_job import Plan, build, make_batch, make_plan, write_models

from rlhfuse.errors import InputError
from rlhfuse.schedule.builders import serial_1f1b

STEPS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


class Wrapped:
    """Passes everything on to what it wraps."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


class LateChannels(Wrapped):
    """Waits a random time before each posting: up to 2 ms, one in fifty times 20 ms."""

    def __init__(self, inner, seed: int):
        super().__init__(inner)
        self._random = random.Random(seed)

    def send(self, tensor, to):
        self._sleep()
        self._inner.send(tensor, to)

    def post_receive(self, shape, dtype, source):
        self._sleep()
        return self._inner.post_receive(shape, dtype, source)

    def _sleep(self):
        time.sleep(0.02 if self._random.random() < 0.02 else 0.002 * self._random.random())


class SlowStage(Wrapped):
    """Takes twice as long as it needs."""

    def forward(self, *arguments):
        return self._twice(self._inner.forward, *arguments)

    def backward(self, *arguments):
        return self._twice(self._inner.backward, *arguments)

    def _twice(self, work, *arguments):
        start = time.perf_counter()
        out = work(*arguments)
        time.sleep(time.perf_counter() - start)
        return out


def train(rank: int, folders: dict, plan: Plan, steps: int, late: bool, slow: int | None) -> str:
    job = build(
        rank, folders, plan,
        channels=(lambda inner: LateChannels(inner, seed=rank)) if late else lambda inner: inner,
        stage=SlowStage if rank == slow else lambda stage: stage,
    )  # fmt: skip
    for number in range(steps):
        job.run(number)
    digest = job.digest()
    job.roles.groups.close()
    return digest


@pytest.fixture(scope="module")
def undisturbed(workers, folders):
    return workers.run(train, folders, make_plan(), STEPS, False, None)


@pytest.mark.parametrize("slow", [0, 2])
def test_a_rank_at_half_speed_finishes_with_the_same_bits(workers, folders, undisturbed, slow):
    assert workers.run(train, folders, make_plan(), STEPS, False, slow) == undisturbed


def test_twenty_steps_under_random_delays_have_the_same_bits(workers, folders):
    on_time = workers.run(train, folders, make_plan(), 20, False, None)
    assert workers.run(train, folders, make_plan(), 20, True, None) == on_time


@pytest.mark.slow
@pytest.mark.parametrize("actor,critic", [("d1t1p4", "d2t1p2"), ("d1t2p2", "d2t1p2")])
def test_two_hundred_steps_under_random_delays_have_the_same_bits(workers, folders, actor, critic):
    plan = make_plan(actor, critic)
    on_time = workers.run(train, folders, plan, 200, False, None)
    assert workers.run(train, folders, plan, 200, True, None) == on_time


# refused before the first send --------------------------------------------------------------------------------


class CountingChannels(Wrapped):
    """Counts what is posted."""

    def __init__(self, inner):
        super().__init__(inner)
        self.posted = 0

    def send(self, tensor, to):
        self.posted += 1
        self._inner.send(tensor, to)

    def post_receive(self, shape, dtype, source):
        self.posted += 1
        return self._inner.post_receive(shape, dtype, source)


def refuse(rank: int, folders: dict, plan: Plan, programs) -> tuple[str, int, bool]:
    """What an attempt to build and run raises, how much it posted, and whether the weights are as before."""
    channels, error, job = [], "", None

    def counted(inner):
        channels.append(CountingChannels(inner))
        return channels[0]

    fine = build(rank, folders, plan)
    before = fine.digest()
    try:
        job = build(rank, folders, plan, channels=counted, programs=programs)
        job.run(0)
    except InputError as refusal:
        error = str(refusal)
    after = (job or fine).digest()
    for one in filter(None, (job, fine)):
        one.roles.groups.close()
    return error, channels[0].posted, before == after


def refused(workers, folders, plan: Plan, programs) -> str:
    """The one line that all ranks give; nothing was posted and no weight changed on any of them."""
    results = workers.run(refuse, folders, plan, programs)
    assert [posted for _, posted, _ in results] == [0, 0, 0, 0]
    assert all(untouched for _, _, untouched in results)
    (line,) = {error for error, _, _ in results}
    assert line and "\n" not in line
    return line


def test_programs_for_another_layout_are_refused(workers, folders):
    line = refused(workers, folders, make_plan(), make_plan("d2t1p2", "d1t1p4").programs)
    assert "the programs are for actor d2t1p2 with critic d1t1p4" in line and "actor d1t1p4" in line


def test_stale_programs_are_refused(workers, folders):
    plan = make_plan()
    line = refused(workers, folders, plan, make_plan(build=serial_1f1b).programs)
    assert "of another schedule" in line and plan.programs.fingerprint[:12] in line


def test_programs_that_miss_a_rank_are_refused(workers, folders):
    programs = make_plan().programs
    fewer = dataclasses.replace(programs, by_rank={rank: programs[rank] for rank in (0, 1, 3)})
    assert "programs are for ranks [0, 1, 3], the layout has ranks 0-3" in refused(workers, folders, make_plan(), fewer)


def test_a_microbatch_larger_than_its_buffer_is_refused(workers, folders):
    most = max(make_batch(0).lengths.tolist())  # of one sample: a micro-batch of several has more
    plan = make_plan(buffers={"critic": most})
    line = refused(workers, folders, plan, plan.programs)
    assert "critic: micro-batch" in line and f"its buffer holds {most}" in line


def test_a_buffer_that_is_large_enough_is_accepted(workers, folders, undisturbed):
    plan = make_plan(buffers={"actor": 4096, "critic": 4096})
    assert workers.run(train, folders, plan, STEPS, False, None) == undisturbed


def test_programs_that_went_through_text_are_the_same(workers, folders, undisturbed):
    plan = make_plan()
    again = dataclasses.replace(plan, programs=type(plan.programs).parse(plan.programs.text()))
    assert workers.run(train, folders, again, STEPS, False, None) == undisturbed
