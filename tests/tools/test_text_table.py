"""Cells under each other."""

from text_table import aligned


def test_columns_line_up_at_the_left_or_at_the_right():
    lines = [("a", "bb", "c", "d"), ("100", "2", "long", ""), ("1", "2", "s", "x")]
    assert aligned(lines, left=(2, 3)) == ["  a  bb  c     d", "100   2  long", "  1   2  s     x"]
    assert aligned(lines)[0] == "a    bb  c     d"
