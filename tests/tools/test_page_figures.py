"""What the pages take from results files, and what they refuse."""

import json

import pytest
from page_figures import fill_figures, load_results, results_page

from rlhfuse.base.errors import InputError

RESULT = {
    "quick": False,
    "command": "speed.py",
    "commit": "abc",
    "dirty": False,
    "date": "2026-01-01",
    "machine": {"cpu": "x", "cores": 2},
    "other_cores": 0.01,
    "figures": {"a.ratio": {"value": 1.264, "unit": "x", "least": 1.1, "most": 1.3, "goal": ">= 1.2", "reached": True}},
    "tables": {"a": {"title": "A", "columns": ["engine", "ms"], "rows": [["own", "1.5"], ["peer|s", "2"]]}},
}
RESULTS = {"speed": RESULT}


def test_marks_are_filled_again_and_again():
    page = (
        "It is **<!--fig speed.a.ratio .2f-->9.99<!--/-->** (from <!--fig speed.a.ratio.least .1f--><!--/--> on) at "
        "<!--fig speed.measured.commit-->?<!--/-->.\n\n<!--table speed.a-->old<!--/-->\n"
    )
    filled = fill_figures(page, RESULTS)
    assert "**<!--fig speed.a.ratio .2f-->1.26<!--/-->**" in filled and ".least .1f-->1.1<!--/-->" in filled
    assert "commit-->abc<!--/-->" in filled and "\n\n| engine | ms |\n| --- | --- |\n| own | 1.5 |\n" in filled
    assert fill_figures(filled, RESULTS) == filled


@pytest.mark.parametrize(
    "mark, message",
    [
        ("fig other.a-->", "results/other.json is not there"),
        ("fig speed.b .2f-->", "has no figure 'b'; it has a.ratio"),
        ("table speed.b-->", "has no table 'b'; it has a"),
    ],
)
def test_what_is_not_there_is_named(mark, message):
    with pytest.raises(InputError, match=message):
        fill_figures(f"<!--{mark}1<!--/-->", RESULTS)


def test_the_page_of_results_says_how_they_were_measured(tmp_path):
    page = results_page(RESULTS)
    assert "`python benchmarks/speed.py`: commit abc, 2026-01-01, x, 2 cores; other programs 0.01 cores." in page
    assert "| peer/s | 2 |" in page and "| a.ratio | 1.26 x | >= 1.2 | yes |" in page
    (tmp_path / "speed.json").write_text(json.dumps(RESULT))
    assert load_results(tmp_path) == RESULTS
    (tmp_path / "speed.json").write_text(json.dumps({**RESULT, "quick": True}))
    with pytest.raises(InputError, match="speed are of a quick run"):
        load_results(tmp_path)
