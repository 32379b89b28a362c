"""The text and search.json of a search say what it found, and how sure that is."""

import json
from dataclasses import replace
from math import inf

import pytest
from layout_search.search_answer import (
    PHASES,
    answer_of,
    best_tables,
    by_phase,
    doubts_of,
    proof,
    wishes_table,
)
from layout_search.wishes import Wish
from testkit.flat_profile import of_degree
from testkit.search_cases import GPUS, ROWS, TRAINED, setting, table_of

from rlhfuse.costs.profile_files import TensorProfiles
from rlhfuse.planning.search.search import Ranking
from rlhfuse.planning.search.setting import Setting


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    return Ranking(setting(4, parallel__generation="d2t2p1", **GPUS))


@pytest.fixture(scope="module")
def answer(ranking):
    return answer_of(ranking, ranking.fastest(4))


def test_the_table_has_a_line_for_each_of_the_best(answer):
    head, *lines = best_tables(answer.fastest.rows)
    columns = head.split()
    assert len(lines) == 4
    for number, (line, row) in enumerate(zip(lines, answer.fastest.rows), start=1):
        cells = line.split()
        assert cells[0] == str(number) and float(cells[1]) == pytest.approx(row.seconds, rel=1e-3)
        assert float(cells[2]) == pytest.approx(row.bound, rel=1e-3) and row.bound <= row.seconds
        parts = [float(cells[2 + at]) for at in range(1, 1 + len(PHASES))]
        assert sum(parts) == pytest.approx(row.seconds, rel=0.02)
        assert str(row.table.actor_train) in cells and row.fullest.phase in cells
    assert columns[: 2 + len(PHASES)] == ["seconds", "bound", *PHASES]


def test_no_part_of_a_price_is_left_out_of_the_columns(answer):
    for row in answer.fastest.rows:
        assert sum(by_phase(row.price.parts).values()) == pytest.approx(row.seconds)
    assert sorted(name for names in PHASES.values() for name in names) == sorted(answer.fastest.best.price.parts)


def test_the_proof_says_the_bound_or_that_nothing_else_fits(answer):
    refused, looked, bound = proof(answer.fastest)
    assert all(f"{count:,} {rule}" in refused for rule, count in answer.fastest.refused.items())
    assert f"others reach {answer.fastest.reached:.4g} s or more: none that was reached is faster" in looked
    assert f"all others have a bound of {answer.fastest.bound:.4g} s or more: none takes less" in bound
    alone = replace(answer.fastest, bound=inf, refused={})
    looked = f"  priced exactly: {alone.priced}; memory checked: {alone.drafted}; no other table fits"
    assert proof(alone) == ("  refused: none", looked)


def test_json_says_the_same_without_rounding(answer):
    raw = json.loads(json.dumps(answer.to_dict(), allow_nan=False))
    assert raw["version"] == 2 and raw["world_size"] == 4 and raw["bound"] == answer.fastest.bound
    assert raw["reached"] == answer.fastest.reached >= raw["bound"]
    for table, row in zip(raw["tables"], answer.fastest.rows, strict=True):
        assert table_of(table["overrides"]) == row.table and table["overrides"][0] == "parallel=auto"
        assert table["seconds"] == row.seconds and table["parts"] == dict(row.price.parts)
        assert table["bound"] == row.bound
        assert table["needed_bytes"] == row.needed_bytes <= table["limit_bytes"]
    for wish, made in zip(raw["wishes"], answer.wishes, strict=True):
        assert wish["wanted"] == made.wanted and wish["cost"] == made.cost
        assert wish["table"]["seconds"] == made.row.seconds
    unbounded = replace(answer, fastest=replace(answer.fastest, bound=inf))
    assert json.loads(json.dumps(unbounded.to_dict()))["bound"] is None


def test_wishes_are_told_with_what_they_cost_and_why(answer):
    best = answer.fastest.rows[0]
    last = max((wish.row for wish in answer.wishes), key=lambda row: row.seconds)
    wish = Wish("another", best, last)
    lines = wishes_table([wish, Wish("the same", best, best)])
    assert lines[0].split("  ")[0] == "if you insist on"
    assert wish.because is not None and wish.because[0] in lines[1]
    assert f"{last.seconds / best.seconds - 1:+.1%}" in lines[1] and "+0.0%" in lines[2]


def test_the_whole_is_told_in_order(answer):
    text = answer.render()
    marks = ["searched ", "lengths are assumed", "refused:", "priced exactly", "gen+inf", "if you insist"]
    marks += ["memory against"]
    places = [text.index(mark) for mark in [*marks, "sure of it?", "best and second differ"]]
    assert places == sorted(places)
    assert text == answer.render() and not any(line.endswith(" ") for line in text.splitlines())


def test_where_nothing_was_measured_it_is_said_with_the_degrees(ranking, answer):
    following, measured = doubts_of(ranking, answer.fastest)
    share = answer.fastest.rows[1].seconds / answer.fastest.rows[0].seconds - 1
    assert following == f"best and second differ by {share:.1%}"
    assert "nothing was measured" in measured and "tools/profile_costs.py --tensor 1,2,4 " in measured
    one = replace(answer.fastest, rows=answer.fastest.rows[:1])
    assert doubts_of(ranking, one)[0].startswith("others reach ")
    assert doubts_of(ranking, replace(one, bound=inf))[0] == "no other table fits"


@pytest.fixture(scope="module")
def profiled() -> Setting:
    """The setting of a run that names a profile."""
    keys = dict(fusion__actor_microbatches=1, trainer__recompute="none", parallel__sequence_parallel=False)
    made = setting(4, **keys, **GPUS)
    return replace(made, run=made.run.with_config(made.run.config.with_(fusion={"profile": "profile.json"})))


def measured(made: Setting, *degrees: int, largest: float = 1e6) -> Ranking:
    """Its search where every call was measured to take as many seconds as its tensor degree, counts up to `largest`."""
    given = made.run.config.with_(parallel=dict.fromkeys((*ROWS, *TRAINED), "d4t1p1"))
    profiles = tuple(of_degree(given, made.run.specs, degree, largest) for degree in degrees)
    return Ranking(replace(made, inputs=replace(made.inputs, measured=TensorProfiles(profiles))))


def test_tables_whose_degrees_were_not_measured_are_counted(profiled):
    partly, wholly = measured(profiled, 1, 2), measured(profiled, 1, 2, 4)
    told = doubts_of(partly, partly.fastest(2))[1]
    count = partly.refused["not measured"]
    assert (
        told == f"fusion.profile=profile.json has tensor degrees 1, 2: {count:,} tables with 4 left out" and count > 0
    )
    told = doubts_of(wholly, wholly.fastest(2))[1]
    assert told == "fusion.profile=profile.json has every tensor degree of these tables: 1, 2, 4"


def test_what_is_larger_than_anything_measured_is_named(profiled):
    made, ranking = profiled, measured(profiled, 1, 2, 4, largest=10.0)
    found = ranking.fastest(2)
    draft = made.draft(found.best.table)
    longest = draft.generation.limits.longest
    told = doubts_of(ranking, found)[1].partition("; beyond what was measured the best table has ")[2].split(", ")
    assert told[0] == f"{longest} tokens of a context (measured: 10)"  # an instance has fewer sequences
    kinds = [one.partition(" ")[2].partition(" (")[0] for one in told[1:]]
    scored = [f"tokens of a pack for {role}" for role in made.run.config.scorers()]
    trained = [f"tokens of a micro-batch of {role}" for role in made.run.config.trained()]
    assert kinds == ["tokens of a prefill", *scored, *trained]
