"""The reproduction page: it holds what it says, by itself, and its rows follow from results and formulas."""

import re
from html.parser import HTMLParser

import paper_page
import pytest
from markupsafe import escape
from paper import of_puzzle, of_real, of_rlhfuse
from paper.page import Row, Section, claim_row, page, range_row, value_row
from paper_page import MISSING, NEEDED
from testkit.programs import call_main

from rlhfuse.planning.meshes.search import best_plan


class Tags(HTMLParser):
    """Counts of tags, and what they refer to outside of the page."""

    def __init__(self):
        super().__init__()
        self.counts, self.outside = {}, []

    def handle_starttag(self, tag, attributes):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.outside += [value for key, value in attributes if key in ("src", "href", "xlink:href") and value[0] != "#"]


@pytest.mark.ci
def test_one_command_makes_one_page(tmp_path):
    finished = call_main(paper_page, "--out", tmp_path / "page.html")
    assert finished.returncode == 0, finished.stderr
    sections, rows = map(int, re.search(r"(\d+) sections, (\d+) rows", finished.stdout).groups())
    tags, text = Tags(), (tmp_path / "page.html").read_text()
    tags.feed(text)
    assert tags.counts["h2"] == sections + 1 and tags.counts["svg"] >= 6 and tags.counts["tr"] > rows > 150
    assert tags.outside == [] and "<script" not in text and "prefers-color-scheme: dark" in text
    for name in NEEDED:
        assert f"benchmarks/results/{name}.json of 20" in text
    for what, *_ in MISSING:
        assert str(escape(what.split(",")[0])) in text


def test_rows_say_how_far_off_they_are():
    assert value_row("x", "paper", 2.0, 1.9).difference == "-5.0%"
    inside = Row("x", "paper", "1.2-1.6", "1.16-1.70", "2 of 3 inside")
    assert range_row("x", "paper", (1.2, 1.6), (1.16, 1.3, 1.7)) == inside
    claims = [claim_row("x", "paper", "a", "b", holds).difference for holds in (True, False)]
    assert claims == ["holds", "does not hold"]
    section = Section("x", "A <title>", "computed", rows=(Row("what", "where", "", "1"),))
    text = page("t", "f", [section], [("gone", "paper", "why")])
    assert "A &lt;title&gt;" in text and "not at hand" in text and "gone" in text


def test_what_formulas_give_is_exact():
    rows = {row.what: row for row in of_puzzle.time_shared().rows}
    assert {row.difference for row in rows.values()} == {"+0.0%"}
    assert {row.printed for row in rows.values()} >= {"1.273", "1.349", "1.319", "9", "15"}
    bubbles = [(row.printed, row.difference) for row in of_rlhfuse.bubbles().rows]
    assert bubbles == [("0.429", "+0.0%"), ("0.273", "+0.0%")]


def test_a_missing_result_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(paper_page, "RESULTS", tmp_path)
    told = call_main(paper_page, "--out", tmp_path / "page.html")
    assert told.returncode == 2 and not (tmp_path / "page.html").exists()
    assert f"{tmp_path}/paper_settings.json is not there; run benchmarks/paper_settings.py" in told.stderr


@pytest.mark.parametrize("actor, critic, gpus", [("7B", "7B", 8), ("7B", "70B", 64), ("70B", "7B", 64)])
def test_no_heuristic_beats_the_search(actor, critic, gpus):
    problem = of_real.problem_of(actor, critic, gpus, 384)
    assert of_real.heuristic_seconds(problem) > best_plan(problem).seconds
