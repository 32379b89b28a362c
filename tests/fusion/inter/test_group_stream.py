"""What a leader knows of a round's groups, and what it begins and drops, with made-up news of other leaders."""

import json
from types import SimpleNamespace

import pytest

from rlhfuse.base.clock import Clock
from rlhfuse.base.sample_ids import sample_id
from rlhfuse.decisions.group_selection import GroupSelection
from rlhfuse.fusion.inter.generation import GO_ON, NO_PLACE, Generation
from rlhfuse.fusion.inter.group_stream import GroupStream, LiveGroups, complete_groups

COPIES = 2


class Elsewhere:
    """A reporter to whom other leaders and the store have said what a test says; the store counts places."""

    clock = Clock()

    def __init__(self) -> None:
        self.finished = self.places = 0
        self.letters = []

    def take_scores(self) -> list[str]:
        letters, self.letters = self.letters, []
        return letters

    def judge(self, place: int, *scores: float) -> None:
        self.letters.append(json.dumps([[sample_id(0, place, copy), score] for copy, score in enumerate(scores)]))

    def begin_places(self, count: int) -> int:
        self.places += count
        return self.places


class RunningSamples:
    """An engine that runs nothing."""

    options = SimpleNamespace(max_sequences=8)

    def __init__(self, running: list[int]) -> None:
        self._running = running

    @property
    def samples(self) -> int:
        return len(self._running)

    @property
    def sample_ids(self) -> tuple[int, ...]:
        return tuple(self._running)

    def add(self, sample: int, *_) -> None:
        self._running.append(sample)

    def abort(self, sample: int) -> None:
        self._running.remove(sample)


def requests(place: int) -> list:
    return [SimpleNamespace(sample_id=sample_id(0, place, copy), prompt=(1,), params=None) for copy in range(COPIES)]


@pytest.fixture
def case():
    """Three groups are wanted of the first eight places, of which three have begun; what this instance runs."""
    reporter = Elsewhere()
    running = [one.sample_id for place in range(3) for one in requests(place)]
    engine = RunningSamples(running)
    stream = GroupStream(GroupSelection(3, 8), 3, COPIES, 6, requests, lambda scores: scores)
    rewarder = SimpleNamespace(news=dict, submit=lambda rollouts: None)
    group = SimpleNamespace(is_leader=True, size=1)
    events = SimpleNamespace(agreement_seconds=0.0)
    given = engine, group, reporter, rewarder, events, 3 * COPIES, lambda text: None, lambda: None, reporter, stream
    return SimpleNamespace(generation=Generation(*given), reporter=reporter, running=running, rewarder=rewarder)


def test_a_group_of_equal_scores_has_others_begin_once(case):
    generation, reporter = case.generation, case.reporter
    assert generation._decide(0, 0) == (GO_ON, NO_PLACE, 8), "three are under way"
    reporter.judge(1, 0.5, 0.5)
    reporter.finished = COPIES
    assert generation._decide(0, 2) == (GO_ON, 3, 8)
    assert generation._decide(0, 2) == (GO_ON, 4, 8), "of three one may be of equal scores again"
    assert generation._decide(0, 2) == (GO_ON, NO_PLACE, 8), "they have begun, wherever"
    generation._follow(generation.stream, 3, 8)
    assert case.running[-2:] == [sample_id(0, 3, 0), sample_id(0, 3, 1)] == generation.began


def test_samples_of_groups_that_must_yet_begin_remain(case):
    generation, reporter = case.generation, case.reporter
    reporter.finished = 2 * COPIES
    for place in range(2):
        reporter.judge(place, 1.0, 1.0)
    generation._decide(2, 4)
    live = generation._live
    assert live.missing >= 2 and live.remaining(6) == 6 + (reporter.places + live.missing) * COPIES - 4


def test_a_leader_waits_for_no_group_that_nobody_begins(case):
    """Another leader has stopped with the third group unfinished; of the others one is equal and one differs."""
    selection = GroupSelection(2, 8, {0: False, 1: True})
    stream = GroupStream(selection, 3, COPIES, 4, requests, lambda scores: scores)
    live = LiveGroups(stream, case.reporter, case.rewarder)
    case.reporter.finished = 2 * COPIES
    assert selection.missing(3, 8) == 1, "in the mean case another group would be needed"
    assert live.next_place(case.reporter.begin_places) is None and live.remaining(3 * COPIES) == COPIES


def test_a_group_of_which_some_were_dropped_is_none():
    assert complete_groups([sample_id(0, place, copy) for place, copy in ((0, 0), (0, 1), (1, 1))], 2) == {0}
