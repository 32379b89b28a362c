"""The report page: whole in itself, honest about what is missing, and readable by a browser."""

import shutil
import subprocess
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from run_report.report import render_report
from run_report.run_files import RunFiles
from testkit.finished_run import write_run

from rlhfuse.base.clock import Span
from rlhfuse.base.errors import InputError
from rlhfuse.monitor.metrics import MetricsWriter
from rlhfuse.monitor.phase_times import phase_times, render_phase_times, samples_per_second
from rlhfuse.monitor.samples import SampleText, SampleWriter, TurnText
from rlhfuse.monitor.trace import save_trace
from rlhfuse.schedule.io import save_schedule
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import serial_1f1b

BROWSERS = ("chromium", "google-chrome", "chromium-browser")
VOID = {"meta", "br", "link", "img", "use", "path", "rect", "line", "circle", "image"}


def row(iteration, **more):
    times = {"timing_s/gen": 1.0, "timing_s/infer": 0.25, "timing_s/train": 0.5, "timing_s/step": 2.0}
    return {
        "iteration": iteration,
        "critic/score/mean": 0.1 * iteration,
        "perf/samples_per_second": 8.0,
        "fusion/threshold": 4,
        "fusion/gen_infer_seconds": 1.25,
        **times,
        **more,
    }


@pytest.fixture()
def folder(tmp_path):
    """A run directory with everything in it; the first iteration is slow."""
    run = tmp_path / "a run & more"
    run.mkdir()
    (run / "config.yaml").write_text("trainer: {iterations: 3}\n# <b>not bold</b>\n")
    with closing(MetricsWriter(run / "metrics.jsonl")) as writer:
        for i in range(3):
            writer.write(row(i) if i else row(0, **{"timing_s/step": 20.0}))
    problem = FusionProblem(nodes=2, pipelines=(Pipeline("actor", "actor", (0, 1), 2, (1, 1), (2, 2), (1, 1)),))
    save_schedule(run / "schedule.json", serial_1f1b(problem))
    spans = [Span("reshard", "reshard", rank, 1.0, 1.1, args={"iteration": 2}) for rank in (0, 1)]
    save_trace([*spans, Span("score", "score", 0, 1.2, 1.4)], run / "trace.json")
    return run


class Reader(HTMLParser):
    """Checks that tags close in order, and notes whatever a browser would fetch or run."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.scripts, self.text = [], [], 0, ""

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.fetched += [v for k, v in attrs if k in ("src", "href", "xlink:href", "action") and not v.startswith("#")]
        self.fetched += [v for k, v in attrs if k == "style" and "url(" in v and "url(#" not in v]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
            self.open.pop()

    def handle_data(self, data):
        self.text += data


def read(page):
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_the_page_holds_everything_itself(folder):
    SampleWriter(folder / "samples.jsonl").write([SampleText(0, 7, "<script>x</script>", " & so", 0.5, 3, "length")])
    page = render_report(RunFiles.read(folder))
    reader = read(page)
    assert reader.fetched == [] and reader.scripts == 0
    shown = ("a run & more", "<b>not bold</b>", "<script>x</script>", "3 tokens (cut)", "not finished", "generation")
    assert all(words in reader.text for words in shown), reader.text
    assert page.count("<svg") == 2 + 5, "score and speed; score with its spread, time, R_t, timeline, schedule"
    asked = [page.index(f'id="{part}"') for part in ("learned", "time", "fusion", "plan", "curves", "timeline")]
    assert asked == sorted(asked), "what people ask comes first"
    assert page == render_report(RunFiles.read(folder)), "the same run gives the same page"


def test_turns_are_told_from_what_tools_answered(folder):
    turns = TurnText("<call>2+2", "4 <b>", 0.25), TurnText("four", "", 0.0)
    sample = SampleText(0, 7, "p", "<call>2+24 <b>four", 0.5, 9, "stop", turns=turns)
    SampleWriter(folder / "samples.jsonl").write([sample])
    page = render_report(RunFiles.read(folder))
    assert '&lt;call&gt;2+2<i title="observed after 0.25 s">4 &lt;b&gt;</i>four' in page
    assert "2 turns; what tools answered is slanted, after 0.25 s" in read(page).text


def test_parts_that_a_run_did_not_keep_are_named(folder):
    for name in ("schedule.json", "trace.json"):
        (folder / name).unlink()
    text = read(render_report(RunFiles.read(folder))).text
    for name in ("trace.json", "schedule.json", "plan.json", "samples.jsonl"):
        assert f"kept no {name}" in text


def test_where_the_time_went_leaves_the_first_iteration_out():
    rows = [row(0, **{"timing_s/step": 20.0}), row(1), row(2)]
    table = {one.name: (one.seconds, one.share) for one in phase_times(rows)}
    assert table["generation"] == (1.0, 0.5) and table["other"] == (0.25, 0.125) and table["iteration"] == (2.0, 1.0)
    assert "weights moved" not in table
    assert samples_per_second(rows) == 8.0
    assert "mean of 2 iterations, 8 samples per second" in render_phase_times(rows)
    assert phase_times(rows[:1])[-1].seconds == 20.0
    booked = [row(1, **{"timing_s/books": 2.0})]  # after the step: the iteration is so much longer
    table = {one.name: one.seconds for one in phase_times(booked)}
    assert table["books and logs"] == 2.0 and table["other"] == 0.25 and table["iteration"] == 4.0
    assert samples_per_second(booked) == 4.0


def test_a_folder_that_is_no_run_is_one_clear_line(folder):
    lines, config = folder / "metrics.jsonl", folder / "config.yaml"
    kept = lines.read_text()
    for spoil, message in (
        (lambda: config.write_text("trainer: {"), "config.yaml is not valid YAML"),
        (config.unlink, "config.yaml"),
        (lambda: lines.write_text(""), "metrics.jsonl holds no iteration yet"),
        (lines.unlink, "metrics.jsonl"),
    ):
        lines.write_text(kept)
        spoil()
        with pytest.raises(InputError, match=message):
            render_report(RunFiles.read(folder))


def test_a_browser_shows_it(folder, tmp_path):
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    page = tmp_path / "report.html"
    page.write_text(render_report(RunFiles.read(folder)))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [browser, *flags, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=540, check=True
    ).stdout
    assert shown.count("<svg") == 7 and "Where did the time go?" in shown


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return RunFiles.read(write_run(tmp_path_factory.mktemp("whole") / "run", iterations=6))


def test_the_plan_stands_beside_a_prediction_at_the_lengths_that_were(whole):
    text = " ".join(read(render_report(whole).replace("<br>", " ")).text.split())
    assert "predicted for its lengths" in text and "iteration by iteration (1 to 5)" in text
    assert "Yes: the score rose by 0.300, from +0.100" in text, "the first three of six iterations, and the last three"
    assert "generation with inference: " in text and "switched off (fusion.intra_stage=serial)" in text


def test_a_run_without_a_finite_score_or_an_iteration_or_with_one_has_a_page(whole):
    nulls = tuple(row | {"critic/score/mean": None, "critic/score/std": None} for row in whole.rows)
    tested = ({"iteration": -1, "val/score/mean": None}, {"iteration": 2, "val/score/mean": 0.5})
    page = render_report(replace(whole, rows=nulls, evaluations=tested))
    assert "takes two iterations with a score" in page and "score (never a finite number)" in read(page).text
    page = render_report(replace(whole, rows=(), spans=(), evaluations=tested[1:]))
    assert "No iteration is over yet" in page and "<svg" not in page[: page.index('id="timeline"')]
    page = render_report(replace(whole, rows=whole.rows[:1], spans=()))
    assert "It takes two iterations to draw a curve" in page and page.count("<svg") == 1, "the schedule"
