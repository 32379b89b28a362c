"""Memory against time: what is left is beaten by nothing in both, and beats all that is not."""

from hypothesis import given
from hypothesis import strategies as st
from layout_search.search_answer import draw_memory_curve, memory_curve
from testkit.search_cases import known, with_price

PRICES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20)


@given(PRICES)
def test_the_curve_is_what_nothing_beats(prices):
    row = known(1)[1][0]
    rows = [with_price(row, float(seconds), float(needed)) for seconds, needed in prices]
    curve = [(round(row.seconds, 9), row.needed_bytes) for row in memory_curve(rows)]
    beaten = {(s, n) for s, n in prices if any(p != (s, n) and p[0] <= s and p[1] <= n for p in prices)}
    assert curve == sorted(set(prices) - beaten)


def test_it_is_drawn():
    rows = known(2)[1][:20]
    picture, other = draw_memory_curve(rows, memory_curve(rows)), draw_memory_curve(rows, memory_curve(rows[3:]))
    assert picture.startswith(b"\x89PNG") and picture != other
    assert picture == draw_memory_curve(rows, memory_curve(rows)), "the same bytes every time"
