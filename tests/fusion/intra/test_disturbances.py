"""Slow ranks and late messages change no bit; what cannot be run is refused before anything is sent."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
from testkit.disturbed_pair import Plan, disturbed, new_step, plan, write_models

from rlhfuse.base.errors import InputError

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


def train(rank: int, folders: dict, what: Plan, steps: int, late: bool, slow: int | None) -> str:
    pair = disturbed(
        rank,
        folders,
        what,
        channels=(lambda inner: LateChannels(inner, seed=rank)) if late else lambda inner: inner,
        stage=SlowStage if rank == slow else lambda stage: stage,
    )
    for number in range(steps):
        pair.train(number)
    digest = pair.digest()
    pair.close()
    return digest


@pytest.fixture(scope="module")
def undisturbed(workers, folders):
    return workers.run(train, folders, plan(), STEPS, False, None)


@pytest.mark.parametrize("slow", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_at_half_speed_finishes_with_the_same_bits(workers, folders, undisturbed, slow):
    assert workers.run(train, folders, plan(), STEPS, False, slow) == undisturbed


def test_twenty_steps_under_random_delays_have_the_same_bits(workers, folders):
    on_time = workers.run(train, folders, plan(), 20, False, None)
    assert workers.run(train, folders, plan(), 20, True, None) == on_time


@pytest.mark.slow
@pytest.mark.parametrize("actor,critic", [("d1t1p4", "d2t1p2"), ("d1t2p2", "d2t1p2")])
def test_two_hundred_steps_under_random_delays_have_the_same_bits(workers, folders, actor, critic):
    what = plan(actor, critic)
    on_time = workers.run(train, folders, what, 200, False, None)
    assert workers.run(train, folders, what, 200, True, None) == on_time


def listen(rank: int, folders: dict, what: Plan) -> list[str]:
    """All that a rank says it is doing in one step."""
    said: list[str] = []
    pair = disturbed(rank, folders, what, progress=said.append)
    pair.train(0)
    pair.close()
    return said


def test_a_rank_names_every_instruction_and_what_it_waits_for(workers, folders):
    what = plan()
    for rank, said in enumerate(workers.run(listen, folders, what)):
        texts = [f"training instruction {n}: {i}" for n, i in enumerate(what.programs[rank].instructions)]
        assert list(dict.fromkeys(text.partition(" waits")[0] for text in said)) == texts
        received = [text.rpartition(" waits for ")[2] for text in said if " waits for " in text and "<" in text]
        assert received == [str(i) for i in computed_from(what.programs[rank].instructions)]
        sends = [text for text, i in zip(texts, what.programs[rank].instructions) if ">" in str(i)]
        assert [text.partition(" waits until")[0] for text in said if " waits until" in text] == sends


def computed_from(instructions) -> list:
    """The receives of a program in the order in which their tensors are used."""
    receives = {
        (i.action.pipeline, i.action.stage, i.action.kind.value[1], i.action.microbatch): i
        for i in instructions
        if "<" in str(i)
    }
    used = [(i.action.pipeline, i.action.stage, i.action.kind.value, i.action.microbatch) for i in instructions]
    return [receives[key] for key in used if key in receives]


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


def refuse(rank: int, folders: dict, what: Plan, programs) -> tuple[str, int, bool]:
    """What an attempt to run `programs` in the place of `what` raises and posts, and whether the state is the same."""
    pair = disturbed(rank, folders, what)
    counting = CountingChannels(pair.roles.channels)
    before, error = pair.digest(), ""
    try:
        pair.step = new_step(rank, pair, programs, channels=lambda _: counting)
        pair.train(0)
    except InputError as refusal:
        error = str(refusal)
    untouched = pair.digest() == before
    pair.close()
    return error, counting.posted, untouched


def refused(workers, folders, what: Plan, programs) -> str:
    """The one line that all ranks give; nothing was posted and no weight changed on any of them."""
    results = workers.run(refuse, folders, what, programs)
    assert [posted for _, posted, _ in results] == [0, 0, 0, 0]
    assert all(untouched for _, _, untouched in results)
    (line,) = {error for error, _, _ in results}
    assert line and "\n" not in line
    return line


def test_programs_for_another_layout_are_refused(workers, folders):
    line = refused(workers, folders, plan(), plan("d2t1p2", "d1t1p4").programs)
    assert "the programs are for actor d2t1p2 with critic d1t1p4" in line and "actor d1t1p4" in line


def test_stale_programs_are_refused(workers, folders):
    what = plan()
    line = refused(workers, folders, what, plan(kind="serial").programs)
    assert "of another schedule" in line and what.programs.fingerprint[:12] in line


def test_programs_that_miss_a_rank_are_refused(workers, folders):
    programs = plan().programs
    fewer = dataclasses.replace(programs, by_rank={rank: programs[rank] for rank in (0, 1, 3)})
    assert "programs are for ranks [0, 1, 3], the layout has ranks 0-3" in refused(workers, folders, plan(), fewer)


def test_programs_that_went_through_text_are_the_same(workers, folders, undisturbed):
    what = plan()
    again = dataclasses.replace(what, programs=type(what.programs).parse(what.programs.text()))
    assert workers.run(train, folders, again, STEPS, False, None) == undisturbed
