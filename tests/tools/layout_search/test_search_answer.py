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
)
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
