"""What a leader waits for and what it would begin; which groups are whole."""

from types import SimpleNamespace

from rlhfuse.base.sample_ids import sample_id
from rlhfuse.decisions.group_selection import GroupSelection
from rlhfuse.fusion.inter.group_stream import GroupStream, LiveGroups, complete_groups

COPIES = 2


class Elsewhere:
    """A reporter and a store; nobody has sent anything."""

    finished = places = 0

    def begin_places(self, count: int) -> int:
        self.places += count
        return self.places


def requests(place: int) -> list:
    return [SimpleNamespace(sample_id=sample_id(0, place, copy), prompt=(1,), params=None) for copy in range(COPIES)]


def test_a_leader_waits_for_no_group_that_nobody_begins():
    """Another leader has stopped with the third group unfinished; of the others one is equal and one differs."""
    reporter, selection = Elsewhere(), GroupSelection(2, 8, {0: False, 1: True})
    stream = GroupStream(selection, 3, COPIES, 4, requests, lambda scores: scores)
    live = LiveGroups(stream, reporter, SimpleNamespace(news=dict))
    reporter.finished = 2 * COPIES
    assert selection.missing(3, 8) == 1, "in the mean case another group would be needed"
    assert live.next_place(reporter.begin_places) is None and live.remaining(3 * COPIES) == COPIES


def test_a_group_of_which_some_were_dropped_is_none():
    assert complete_groups([sample_id(0, place, copy) for place, copy in ((0, 0), (0, 1), (1, 1))], 2) == {0}
