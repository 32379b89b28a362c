"""What it costs to insist: each wish is the first of the tables that the search has priced and that has it."""

import pytest
from layout_search.wishes import Wish, decisions, wishes
from testkit.search_cases import known

from rlhfuse.planning.search.search import Ranking

GIVEN = dict(world_size=4, parallel__generation="d2t2p1", parallel__sequence_parallel=False)


@pytest.mark.parametrize("keys", [{}, GIVEN])
def test_another_value_of_each_decision_is_the_first_priced_table_that_has_one(keys):
    made, rows = known(**keys)
    ranking = Ranking(made)
    best = ranking.fastest(4).best
    priced = [row for row in rows if row in ranking.priced]
    found, wanted = [*wishes(ranking, best)], []
    assert found and priced[0] == best
    for own, *others in zip(*(decisions(row.table) for row in priced)):
        first = next((number for number, other in enumerate(others, start=1) if other != own), None)
        if first is not None:
            wanted.append(Wish(others[first - 1], best, priced[first]))
    assert found == wanted
    assert all(wish.cost == pytest.approx(wish.row.seconds / best.seconds - 1) and wish.cost >= 0 for wish in found)
