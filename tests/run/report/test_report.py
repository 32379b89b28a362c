"""The report page: whole in itself, honest about what is missing, and readable by a browser."""

import shutil
import subprocess
from contextlib import closing
from html.parser import HTMLParser

import pytest

from rlhfuse.base.errors import InputError
from rlhfuse.monitor.metrics import MetricsWriter
from rlhfuse.monitor.samples import SampleText, SampleWriter, read_samples
from rlhfuse.monitor.trace import Span, save_trace
from rlhfuse.run.report import charts
from rlhfuse.run.report.phase_times import phase_times, render_phase_times, samples_per_second
from rlhfuse.run.report.report import accepted_share, compare_plan, render_report
from rlhfuse.run.report.run_files import RunFiles
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
    for words in ("a run & more", "<b>not bold</b>", "<script>x</script>", "3 (cut)", "not finished", "generation"):
        assert words in reader.text, words
    assert page.count("<svg") == 2 + 4, "score and speed; time, timeline, schedule, R_t"
    assert page == render_report(RunFiles.read(folder)), "the same run gives the same page"


GUESSES = ("share of guesses that were right", "tokens of a sample in a step with guesses", "seconds saved by guesses")


def write_guesses(folder, iterations, guessed, **more):
    """Metrics of so many iterations, of which those in `guessed` had guesses."""
    (folder / "metrics.jsonl").unlink()
    with closing(MetricsWriter(folder / "metrics.jsonl")) as writer:
        for i in range(iterations):
            found = {"drafted": 8, "accepted": i + 1, "tokens_per_step": 1.5, **more} if i in guessed else {}
            writer.write(row(i, **{f"speculation/{name}": value for name, value in found.items()}))


def test_curves_of_guesses_only_where_there_were_some(folder):
    shown = [words in read(render_report(RunFiles.read(folder))).text for words in GUESSES]
    assert shown == [False] * 3
    write_guesses(folder, 3, {0, 2}, seconds_saved=-0.1)  # they may cost more than they save
    page = render_report(RunFiles.read(folder))
    assert [words in read(page).text for words in GUESSES] == [True] * 3 and page.count("<svg") == 6 + 3
    rows = RunFiles.read(folder).rows
    assert [accepted_share(row) for row in rows] == [
        {"speculation/accepted_share": 1 / 8},
        {},
        {"speculation/accepted_share": 3 / 8},
    ]
    write_guesses(folder, 3, {1})  # R_t knew no costs yet: nothing says what was saved
    assert [words in read(render_report(RunFiles.read(folder))).text for words in GUESSES] == [True, True, False]


@pytest.mark.parametrize("iterations", [9, 90])
def test_a_value_between_two_gaps_is_seen(folder, iterations):
    write_guesses(folder, iterations, {2, 5})
    svg = charts.curve(RunFiles.read(folder).rows, ("speculation/tokens_per_step",), "guesses")
    assert svg.count("fill: #1f77b4") == 2, "as a dot each"


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


def test_plan_stands_beside_the_mean_of_what_was_measured(folder):
    (folder / "plan.json").write_text(
        '{"seconds": {"weight_moves": 0.25, "gen_infer_fused": 1.0, "training_fused": 0.6}, "world_size": 2,'
        ' "hardware": "cpu", "dtype": "float32", "reasons": ["because"], "schedule": {"source": "made",'
        ' "makespan_seconds": 1,'
        ' "lower_bound_seconds": 1, "serial_makespan_seconds": 2}}'
    )
    run = RunFiles.read(folder)
    pairs = [(one.predicted, one.measured) for one in compare_plan(run)]
    assert pairs == [(0.25, 0.0), (1.0, 1.25), (0.6, 0.5), (1.85, 2.0)]
    assert compare_plan(run)[1].error == pytest.approx(-0.2)
    run.plan["seconds"]["capture"] = 0.25  # in every iteration
    assert [one.predicted for one in compare_plan(run)] == [0.25, 1.25, 0.6, 2.1]
    assert "because" in read(render_report(run)).text


def test_samples_of_repeated_iterations_are_dropped(tmp_path):
    path = tmp_path / "samples.jsonl"
    texts = [SampleText(i, i, "p", "r", 0.0, 1, "stop") for i in range(4)]
    writer = SampleWriter(path)
    writer.write(texts)
    writer.close()
    kept = sum(map(len, path.read_bytes().splitlines(keepends=True)[:2]))
    path.write_text(path.read_text() + '{"iteration": 4, "sam')  # killed while it wrote
    again = SampleWriter(path, keep_bytes=kept)
    again.write([texts[3]])
    again.close()
    assert read_samples(path) == [texts[0], texts[1], texts[3]]
    path.write_text("{}\n")
    with pytest.raises(InputError, match="samples.jsonl:1"):
        read_samples(path)


@pytest.mark.parametrize("missing, words", [("metrics.jsonl", "metrics.jsonl"), ("config.yaml", "config.yaml")])
def test_a_folder_that_is_no_run_is_refused(folder, missing, words):
    (folder / missing).unlink()
    with pytest.raises(InputError, match=words):
        RunFiles.read(folder)


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
    assert shown.count("<svg") == 6 and "Where the time went" in shown
