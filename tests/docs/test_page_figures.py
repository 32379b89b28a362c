"""What the pages take from results files, and what they refuse."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from generate_docs import RESULTS as FOLDER
from generate_docs import pages
from page_charts import lines
from page_figures import benchmark_page, claim_row, claims_table, fill_figures, load_results, retired_table, value_text
from page_pictures import picture

from rlhfuse.base.errors import InputError


def figure(value, unit="x", goal="", **ends):
    aim = {"goal": goal, "reached": value >= float(goal.split()[1])} if goal else {}
    return {"value": value, "unit": unit, **ends, **aim}


RESULT = {
    "quick": False,
    "command": "speed.py curve --ranks 2",
    "commit": "abc",
    "dirty": False,
    "date": "2026-01-01",
    "machine": {"cpu": "x", "cores": 2},
    "other_cores": 0.01,
    "figures": {
        "a.ratio": figure(1.264, goal=">= 1.2", least=1.1, most=1.3),
        "b.ratio": figure(0.9, goal=">= 1.2"),
        "c.share": figure(0.051, unit=""),
        "d.seconds": figure(2, unit="s"),
    },
    "tables": {"a": {"title": "A", "columns": ["engine", "ms"], "rows": [["own", "1.5"], ["peer|s", "2"]]}},
}
SAID = {
    "title": "Speed",
    "about": "This page shows speed.",
    "claims": [
        {"figures": "a.ratio", "form": ".2f", "main": True, "says": "Times as fast"},
        {"figures": "?.ratio", "form": ".1f", "says": "Times as fast, both"},
        {"figures": "c.share", "form": ".1%", "says": "Overhead"},
    ],
}
RESULTS = {"speed": {**RESULT, **SAID}}


def test_marks_are_filled_again_and_again():
    page = "It is **<!--fig speed.a.ratio .2f-->9.99<!--/-->**, all <!--fig speed.*.ratio .1f--><!--/-->.\n"
    filled = fill_figures(page, RESULTS)
    assert "**<!--fig speed.a.ratio .2f-->1.26<!--/-->**" in filled and ".1f-->0.9 to 1.3<!--/-->" in filled
    assert fill_figures(filled, RESULTS) == filled
    assert value_text([{"value": value} for value in (1.0, 9.0, 2.0, 3.0)], ".1f") == "1.0 to 9.0, median 2.5"


@pytest.mark.parametrize(
    "mark, message",
    [
        ("fig other.a .2f-->", "results/other.json is not there"),
        ("fig speed.e .2f-->", "has no figure 'e'; it has a.ratio, b.ratio"),
    ],
)
def test_what_is_not_there_is_named(mark, message):
    with pytest.raises(InputError, match=message):
        fill_figures(f"<!--{mark}1<!--/-->", RESULTS)


def test_a_claim_says_its_figure_goal_and_whether_all_cases_reached_it():
    one, both, share = (claim_row(RESULTS, "speed", claim)[1:] for claim in SAID["claims"])
    assert one == ["1.26 (1.10-1.30)", "at least 1.20", "yes"]
    assert both == ["0.9 to 1.3", "at least 1.2", "**no**: 1 of 2"] and share == ["5.1%", "none", ""]
    assert claim_row(RESULTS, "speed", {"figures": "d.*", "form": ".1f", "says": ""})[1] == "2.0 s"


def test_the_page_of_results_has_the_main_claims_alone():
    table = claims_table(RESULTS)
    assert "| Times as fast | 1.26 (1.10-1.30) | at least 1.20 | yes | [`speed.py curve`](results/speed.md) |" in table
    assert table.count("\n") == 3


def test_the_page_of_a_benchmark_says_how_it_was_measured():
    page = benchmark_page(RESULTS, "speed", picture=True)
    assert page.startswith("# Speed\n\nThis page shows speed. ") and "\n    python benchmarks/speed.py curve" in page
    assert "Commit abc, 2026-01-01, x, 2 cores. Other programs took 0.01 cores meanwhile." in page
    assert "| peer/s | 2 |" in page and "| Overhead | 5.1% | none |  |" in page and "(../images/speed.svg)" in page
    assert ".svg" not in benchmark_page(RESULTS, "speed", picture=False)


def test_results_that_are_none_or_of_which_nothing_is_said_are_refused(tmp_path):
    (tmp_path / "claims.yaml").write_text(json.dumps({"speed": SAID}))
    (tmp_path / "speed.json").write_text(json.dumps(RESULT))
    assert load_results(tmp_path) == RESULTS
    (tmp_path / "other.json").write_text(json.dumps(RESULT))
    with pytest.raises(InputError, match="claims.yaml says nothing of other"):
        load_results(tmp_path)
    (tmp_path / "other.json").unlink()
    (tmp_path / "speed.json").write_text(json.dumps({**RESULT, "quick": True}))
    with pytest.raises(InputError, match="speed are of a quick run"):
        load_results(tmp_path)


@pytest.mark.parametrize("name, result", load_results(FOLDER).items())
def test_every_goal_is_told_once(name, result):
    """In a row of its benchmark's page at least; a goal that anything reaches is none."""
    for key, one in result["figures"].items():
        told = [claim for claim in result["claims"] if fnmatchcase(key, claim["figures"])]
        assert len(told) == 1 if one.get("goal", ">= 0") != ">= 0" else len(told) <= 1, f"{name}: {key}"


def test_the_page_of_results_is_one_table_of_at_most_twenty_rows():
    results = load_results(FOLDER)
    assert 2 < claims_table({name: one for name, one in results.items() if not one.get("retired")}).count("\n") <= 22


def test_a_retired_benchmark_has_one_line_and_no_page():
    results = {**RESULTS, "old": {**RESULT, **SAID, "retired": True}}
    table, made = retired_table(results), pages(results)
    assert "| Times as fast | 1.26 (1.10-1.30) | at least 1.20 | yes | `old.json` | abc |" in table
    assert table.count("\n") == 3
    assert [Path(name).stem for name in made if name.startswith("docs/results/")] == ["speed"]


def test_a_picture_is_drawn_anew_when_its_values_change():
    drawing = lines, ({"a": {"b": [(0, 1), (1, 2)]}}, "x", "y", {})
    text = picture("", drawing)
    assert (
        text.startswith("<svg style=") and picture(text.replace("<svg", "<svg id='kept'"), drawing).count("kept") == 1
    )
    assert picture(text, (lines, ({"a": {"b": [(0, 1), (1, 3)]}}, "x", "y", {}))) != text
