"""Groups are chosen by their scores and places alone, whatever was begun, judged and dropped on the way."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfuse.base.errors import JointError
from rlhfuse.tasks.group_selection import GroupSelection

TABLES = st.lists(st.booleans(), min_size=2, max_size=60)


def chosen_by_hand(wanted: int, table: list[bool]) -> tuple[list[int], int]:
    """Places taken, and the first that is not needed, with all scores known."""
    differing = [place for place, differs in enumerate(table) if differs]
    if len(differing) >= wanted:
        return differing[:wanted], differing[wanted - 1] + 1
    others = [place for place, differs in enumerate(table) if not differs]
    return sorted(differing + others[: wanted - len(differing)]), len(table)


def scores(differs: bool) -> list[float]:
    return [0.5, 1.0 if differs else 0.5]


PRIORS, DEVIATIONS = st.sampled_from([0.05, 0.5, 1.0]), st.sampled_from([-0.7, 0.0, 1.5])


@given(st.integers(1, 6), TABLES, st.integers(1, 8), PRIORS, DEVIATIONS, st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_any_order_of_ends_takes_the_same_groups(wanted, table, inflight, prior, deviations, seed):
    wanted, dice = min(wanted, len(table)), random.Random(seed)
    selection, begun, running = GroupSelection(wanted, len(table), prior=prior), 0, set()
    inflight = max(inflight, wanted)
    while not selection.done:
        more = selection.missing(begun, inflight, deviations)
        if more:  # an instance begins what it sees missing, one or all; another may overshoot
            more = min(dice.choice((1, more, more + 1)), len(table) - begun)
            running |= set(range(begun, begun + more))
            begun += more
        running = {place for place in running if place < selection.end}  # the rest is dropped
        assert running, "something is under way as long as it is not done"
        place = dice.choice(sorted(running))
        running.remove(place)
        selection = selection.with_scores({place: scores(table[place])})
    taken, end = chosen_by_hand(wanted, table)
    assert (list(selection.taken(fill=True)), selection.end) == (taken, end)


def test_few_are_begun_where_most_differ_and_many_where_few_do():
    assert GroupSelection(8, 80).missing(0, 80) == 8
    assert GroupSelection(8, 80, prior=0.5).missing(0, 80) == 16
    assert GroupSelection(8, 80, prior=0.5).missing(16, 80) == 0, "those under way are expected to be enough"
    assert GroupSelection(8, 80, prior=0.1).missing(0, 24) == 24, "no more than may be under way"
    known = GroupSelection(2, 20, {0: True, 1: False})
    assert known.missing(2, 20) == 2 and known.missing(3, 20) == 1
    assert known.with_scores({2: [1.0, 0.0]}).missing(3, 20) == 0


def test_a_place_that_is_late_may_take_the_turn_of_a_later_one():
    selection = GroupSelection(2, 20, {1: True, 2: True})
    assert not selection.done and selection.end == 3
    late = selection.with_scores({0: [1.0, 2.0]})
    assert late.done and late.taken(fill=False) == (0, 1) and late.end == 2


def test_fewer_than_two_scores_are_equal():
    """Samples that failed have none."""
    judged = GroupSelection(2, 4).with_scores({0: [], 1: [1.0], 2: [1.0, 2.0]})
    assert judged.differs == {0: False, 1: False, 2: True}


def test_too_few_are_filled_up_or_end_the_run():
    selection = GroupSelection(3, 4, {0: False, 1: True, 2: False, 3: False})
    assert selection.done and selection.taken(fill=True) == (0, 1, 2)
    with pytest.raises(JointError, match="scores differ in 1 of 4 prompts, 3 are wanted; raise max_num_gen_batches"):
        selection.taken(fill=False)


def test_what_became_of_each_place_is_a_letter():
    selection = GroupSelection(2, 20, {0: False, 1: True, 2: True, 3: False, 4: True})
    assert selection.letters(6, selection.taken(fill=False)) == "EAAESX"
    few = GroupSelection(2, 3, {0: False, 1: True, 2: False})
    assert few.letters(3, few.taken(fill=True)) == "FAE"
