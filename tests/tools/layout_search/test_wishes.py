"""What it costs to insist: each wish is the first of the tables that the search has priced and that has it."""

import pytest
from layout_search.wishes import DECISIONS, Wish, wishes
from testkit.search_cases import known

from rlhfuse.planning.search.search import Ranking

GIVEN = dict(world_size=4, parallel__generation="d2t2p1", parallel__sequence_parallel=False)


@pytest.mark.parametrize("keys", [{}, GIVEN])
def test_another_value_of_each_decision_is_the_first_priced_table_that_has_one(keys):
    made, rows = known(**keys)
    ranking = Ranking(made)
    best = ranking.fastest(4).best
    priced = [row for row in rows if row in ranking.priced]
    found = {wish.wanted.split("=")[0]: wish for wish in wishes(ranking, best)}
    assert found and priced[0] == best
    for name, value in DECISIONS.items():
        others = [row for row in priced if value(row.table) != value(best.table)]
        assert (name in found) == bool(others)
        if others:
            word = str(value(others[0].table))
            assert found[name] == Wish(f"{name}={word.lower() if word in ('True', 'False') else word}", best, others[0])
            assert found[name].cost == pytest.approx(others[0].seconds / best.seconds - 1) and found[name].cost >= 0
