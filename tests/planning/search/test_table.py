"""A table of layouts prints as overrides that a run takes."""

import random

import pytest
from testkit.profiles import share
from testkit.search_cases import drawn_table, random_case, space_of_setting, tables_of

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.auto_layouts import searched_keys
from rlhfuse.planning.search.table import TOKENS, CutSetting, Table


@pytest.mark.parametrize("seed", range(share(20)))
def test_overrides_make_a_run_have_the_table(seed):
    case = random_case(seed)
    table = drawn_table(space_of_setting(case.setting), random.Random(seed))
    made = table.of(case.config)
    assert not searched_keys(made)
    values = {key: str(value).lower() for key, value, _ in made.leaves()}
    for word in table.overrides():
        key, _, value = word.partition("=")
        assert values[key] == value
    scored = {f"{role}_inference": getattr(made.parallel, f"{role}_inference") for role in made.scorers()}
    assert scored == {row: str(layout) for row, layout in table.inference if row != "inference"}


def test_texts_are_in_the_order_of_the_space_and_no_two_are_alike():
    for seed in range(share(20)):
        texts = [table.text for table in tables_of(space_of_setting(random_case(seed).setting))]
        assert texts == sorted(set(texts))


def test_more_tokens_come_after_fewer():
    layout = ParallelLayout.parse("d4t1p1")
    cuts = (CutSetting(TOKENS, tokens) for tokens in (900, 1000))
    few, many = (Table(layout, (("inference", layout),), layout, None, cut, "none", False) for cut in cuts)
    assert few.text < many.text
