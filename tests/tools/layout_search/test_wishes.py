"""What it costs to insist: each wish is the first of the whole ranked list that has it, or a search's own answer."""

import pytest
from layout_search.wishes import (
    DECISIONS,
    LESS_MEMORY,
    RULE_DEPTHS,
    Wish,
    by_rule,
    cheap_wishes,
    dear_wishes,
    less_memory,
    limited,
    one_changes,
    serial,
)
from testkit.search_cases import GPUS, LARGE_SPECS, all_rows, known, setting

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.planning.search.search import Ranking, Row

SETTINGS = {
    "cpu": {},
    "gpus": dict(world_size=4, **GPUS),
    "gpus that are nearly full": dict(world_size=4, large=True, trainer__memory_limit_gb=25, **GPUS),
    "rows that are given": dict(world_size=4, parallel__generation="d2t2p1", parallel__sequence_parallel=False),
}
LONG = {"gpus": pytest.mark.slow, "gpus that are nearly full": pytest.mark.ci}


def value(name: str, row: Row):
    return row.table.cut.value if name == "microbatch_tokens" else getattr(row.table, name)


@pytest.mark.parametrize("name", [pytest.param(one, marks=LONG.get(one, ())) for one in SETTINGS])
def test_another_value_of_each_decision_is_the_first_of_all_tables_that_has_one(name):
    made, rows = known(**SETTINGS[name])
    ranking = Ranking(made)
    best = ranking.fastest(1).best
    assert best == rows[0]
    wishes = {wish.wanted.split("=")[0].split(" ")[0]: wish for wish in one_changes(ranking, best)}
    space = ranking.space
    pairs = [(training, generation) for training in space.training for generation in space.generation]
    several = {name for name, of in DECISIONS.items() if len({of(*pair) for pair in pairs}) > 1}
    assert wishes.keys() == several
    for name, wish in wishes.items():
        others = [row for row in rows if value(name, row) != value(name, best)]
        assert wish.row == (others[0] if others else None), name
        if wish.row:
            assert wish.cost == pytest.approx(wish.row.seconds / rows[0].seconds - 1) and wish.cost >= 0
            word = str(value(name, wish.row))
            assert wish.wanted == f"{name}={word.lower() if name == 'sequence_parallel' else word}"


def test_a_wish_that_no_table_can_grant_says_so():
    tight = limited(setting(4, LARGE_SPECS, **GPUS), 22.5)
    ranking = Ranking(tight)
    best = ranking.fastest(1).best
    refused = [wish for wish in one_changes(ranking, best) if wish.row is None]
    assert refused and all(" other than " in wish.wanted for wish in refused)
    assert all(wish.cost is None and wish.because is None for wish in refused)
    rows = all_rows(tight)
    for wish in refused:
        name = wish.wanted.split(" ")[0]
        assert {value(name, row) for row in rows} == {value(name, best)}


def test_because_names_the_part_that_grows_most():
    _, rows = known(4, parallel__generation="d2t2p1", **GPUS)
    parts, because = [row.price.parts for row in rows], [Wish("any", rows[0], row).because for row in rows]
    for some, why in zip(parts[1:40], because[1:40]):
        grown = {name: some[name] - parts[0][name] for name in some}
        assert (why is None) == (max(grown.values()) <= 0)
        if why:
            name, seconds, before = why
            assert seconds - before == max(grown.values()) and (seconds, before) == (some[name], parts[0][name])
    assert Wish("nothing else", rows[0], rows[0]).because is None


def is_ruled(row: Row, most: int, depth: int) -> bool:
    table = row.table
    training = {(layout.tp, layout.pp, layout.chunks) for layout in (table.actor_train, table.critic_train)}
    return training == {(most, depth, 1)} and (table.generation.tp, table.inference.tp) == (most, most)


@pytest.mark.ci
@pytest.mark.parametrize("world_size", [16, 32])
def test_by_rule_is_the_table_that_is_laid_out_by_hand(world_size, most=4):
    """The models have four groups of keys: four tensor ranks are the most."""
    keys = dict(fusion__actor_microbatches=1, trainer__recompute="none", parallel__inference=f"d{world_size // 4}t4p1")
    made, rows = known(world_size, rollout__prompts_per_iteration=32, **{**GPUS, **keys})
    ranking = Ranking(made)
    best = ranking.fastest(1).best
    wish = by_rule(ranking, best)
    assert wish is not None and wish.row is not None and wish.wanted == "by rule (most tensor ranks, pp 4)"
    assert wish.row == next(row for row in rows if is_ruled(row, most, 4))


def test_by_rule_takes_the_shallowest_pipelines_that_fit():
    keys = dict(fusion__actor_microbatches=1, parallel__generation="d8t4p1", parallel__actor_train="d1t4p8")
    made, rows = known(32, rollout__prompts_per_iteration=8, **{**GPUS, **keys})
    wish = by_rule(Ranking(made), rows[0])
    assert wish is not None and wish.row is not None and wish.row.table.critic_train == ParallelLayout(1, 4, 8)
    assert wish.wanted == "by rule (most tensor ranks, pp 8)" and 8 in RULE_DEPTHS


def test_there_is_no_rule_for_so_few_ranks():
    ranking = Ranking(setting(2))
    assert by_rule(ranking, ranking.fastest(1).best) is None
    assert not any("by rule" in wish.wanted for wish in cheap_wishes(ranking, ranking.fastest(1).best))


GIVEN = dict(world_size=4, parallel__generation="d2t2p1", fusion__actor_microbatches=1, **GPUS)


@pytest.mark.parametrize("keys", [{}, GIVEN])
def test_serial_is_the_best_of_tables_priced_as_serial_runs(keys):
    made, (best, *_) = known(**keys)
    again, unfused = known(**keys, fusion__inter_stage=False, fusion__intra_stage="serial")
    wish = serial(made, best)
    assert wish is not None and wish.row == unfused[0]
    assert serial(again, unfused[0]) is None


def test_less_memory_is_searched_anew_for_each_limit():
    keys = dict(rollout__max_response_tokens=3000, rollout__prompts_per_iteration=16, fusion__actor_microbatches=1)
    keys |= dict(parallel__generation="d1t4p1", parallel__inference="d1t4p1", trainer__recompute="none", **GPUS)
    made, (best, *_) = known(4, True, **keys)
    wishes = list(less_memory(made, best))
    assert len(wishes) == len(LESS_MEMORY)
    for share, wish in zip(LESS_MEMORY, wishes):
        key, _, text = wish.wanted.partition("=")
        limit = float(text)
        assert key == "trainer.memory_limit_gb" and limit == pytest.approx(share * best.needed_bytes / 1e9, rel=0.06)
        rows = known(4, True, trainer__memory_limit_gb=limit, **keys)[1]
        assert wish.row == (rows[0] if rows else None)
        assert wish.row is None or wish.row.needed_bytes <= limit * 1e9
    assert [wish.row is None for wish in wishes] == [False, True, True], "what fits and what does not are looked at"


def test_dear_wishes_are_those_of_other_searches():
    made, (best, *_) = known()
    wanted = [wish.wanted for wish in dear_wishes(made, best)]
    assert wanted[0] == "serial (no fusion)" and len(wanted) == 1 + len(LESS_MEMORY)
