"""Reproductions of papers: published columns follow from settings, timings from constants, and the page says so."""

import re
from html.parser import HTMLParser

import paper_page
import pytest
from markupsafe import escape
from paper.computed import bubbles, time_shared
from paper.page import Content, Row, claim_row, page, value_row, words
from paper.table3 import PRINTED, SETTINGS, TRACED, one_f_one_b_plus_makespan
from paper_page import NEEDED
from testkit.programs import call_main

from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.rules.builders import serial_makespan, serial_peak_memory


@pytest.mark.parametrize("row", range(12))
def test_table_3_follows_from_its_settings(row):
    setting, printed, traced = SETTINGS[row], PRINTED[row], TRACED[row]
    problem = setting.problem()
    serial = serial_makespan(problem)
    assert (serial, serial_peak_memory(problem)) == (traced.serial, traced.serial_memory)
    assert latency_bound(problem) == traced.lower_bound
    assert serial / one_f_one_b_plus_makespan(setting) == pytest.approx(printed.one_f_one_b_plus, abs=0.01)


# the page


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
    assert tags.counts["h2"] == sections + 1 and tags.counts["svg"] >= 5 and tags.counts["tr"] > rows > 100
    assert tags.outside == [] and "<script" not in text and "prefers-color-scheme: dark" in text
    for name in NEEDED:
        assert f"benchmarks/results/{name}.json of 20" in text
    for what, *_ in words()["missing"]:
        assert str(escape(what.split(",")[0])) in text


def test_rows_say_how_far_off_they_are():
    assert value_row("x", "paper", 2.0, 1.9).difference == "-5.0%"
    claims = [claim_row("x", "paper", "a", "b", holds).difference for holds in (True, False)]
    assert claims == ["holds", "does not hold"]
    text = page("<facts>", {}, {"rlhfuse-3": Content([Row("what", "where", "", "1")])})
    assert "&lt;facts&gt;" in text and "Ours: computed with this page." in text and "not at hand" in text


def test_what_formulas_give_is_exact():
    rows = {row.what: row for row in time_shared({}).rows}
    assert {row.difference for row in rows.values()} == {"+0.0%"}
    assert {row.printed for row in rows.values()} >= {"1.273", "1.349", "1.319", "9", "15"}
    shares = [(row.printed, row.difference) for row in bubbles({}).rows]
    assert shares == [("0.429", "+0.0%"), ("0.273", "+0.0%")]


def test_a_missing_result_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(paper_page, "RESULTS", tmp_path)
    told = call_main(paper_page, "--out", tmp_path / "page.html")
    assert told.returncode == 2 and not (tmp_path / "page.html").exists()
    assert f"{tmp_path}/paper_settings.json is not there; check it out" in told.stderr
