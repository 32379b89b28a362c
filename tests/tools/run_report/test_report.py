"""The report page: whole in itself, honest about what is missing, and readable by a browser."""

import json
import re
import shutil
import subprocess
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from run_report import charts
from run_report.charts import CURVES, Curve, accepted_share, held_out_curve
from run_report.idle_shares import idle_shares
from run_report.report import chosen_samples, compare_phases, readable_seconds, render_report
from run_report.run_files import RunFiles
from testkit.finished_run import write_run

from rlhfuse.base.clock import Span
from rlhfuse.base.errors import InputError
from rlhfuse.monitor.metrics import MetricsWriter
from rlhfuse.monitor.phase_times import phase_times, render_phase_times, samples_per_second
from rlhfuse.monitor.samples import SampleText, SampleWriter, TurnText
from rlhfuse.monitor.trace import save_trace
from rlhfuse.planning.report.report import PlanReport
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


GUESSES = ("guessed tokens that were right", "tokens of a sample in a step with guesses", "time saved by guesses")


def is_drawn(page, title):
    """In a picture; beside them stand the titles of those that are not shown."""
    return any(title in svg for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL))


def write_guesses(folder, iterations, guessed, **more):
    """Metrics of so many iterations, of which those in `guessed` had guesses."""
    (folder / "metrics.jsonl").unlink()
    with closing(MetricsWriter(folder / "metrics.jsonl")) as writer:
        for i in range(iterations):
            found = {"drafted": 8, "accepted": i + 1, "tokens_per_step": 1.5, **more} if i in guessed else {}
            writer.write(row(i, **{f"speculation/{name}": value for name, value in found.items()}))


def test_curves_of_guesses_only_where_there_were_some(folder):
    page = render_report(RunFiles.read(folder))
    assert [is_drawn(page, words) for words in GUESSES] == [False] * 3
    assert f"{GUESSES[0]}, {GUESSES[1]} (no tokens were guessed)" in page
    write_guesses(folder, 3, {0, 2}, seconds_saved=-0.1)  # they may cost more than they save
    page = render_report(RunFiles.read(folder))
    assert [is_drawn(page, words) for words in GUESSES] == [True] * 3 and page.count("<svg") == 7 + 3
    shares = [accepted_share(row).get("speculation/accepted_share") for row in RunFiles.read(folder).rows]
    assert shares == [1 / 8, None, 3 / 8]
    write_guesses(folder, 3, {1})  # R_t knew no costs yet: nothing says what was saved
    page = render_report(RunFiles.read(folder))
    assert [is_drawn(page, words) for words in GUESSES] == [True, True, False]


@pytest.mark.parametrize("iterations", [9, 90])
def test_a_value_between_two_gaps_is_seen(folder, iterations):
    write_guesses(folder, iterations, {2, 5})
    curve = Curve("guesses", "tokens", {"speculation/tokens_per_step": "t"})
    svg = charts.draw_curve(RunFiles.read(folder).rows, curve)
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
    bounds = {"makespan_seconds": 1, "lower_bound_seconds": 1, "serial_makespan_seconds": 2}
    plan = {
        "seconds": {"weight_moves": 0.25, "gen_infer_fused": 1.0, "training_fused": 0.6},
        "version": PlanReport.version,
    }
    plan |= {"schedule": {"source": "made", **bounds, "peak_activation_bytes": 28277800}}
    plan |= {"ranks": {"count": 2, "hardware": "cpu", "dtype": "float32"}, "reasons": ["because"]}
    plan |= {"threshold": {"reasons": ["as it is"]}}
    (folder / "plan.json").write_text(json.dumps(plan))
    run = RunFiles.read(folder)
    assert compare_phases(run, []) == [
        ("generation", None, None, 1.0),
        ("inference beyond it", None, None, 0.25),
        ("training", 0.6, None, 0.5),
        ("whole iteration", 1.85, None, 2.0),
    ]
    run.plan["seconds"] |= {"capture": 0.25, "generation_fused": 0.75}  # graphs are recorded in every iteration
    assert [planned for _, planned, _, _ in compare_phases(run, [])] == [1.0, 0.25, 0.6, 2.1]
    text = read(render_report(run)).text
    assert "because" in text and "27 MiB" in text and "Nothing is predicted for the lengths that were" in text


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


def test_a_resumed_run_that_starts_slowly_is_judged_by_medians_too(whole):
    rows = [*whole.rows[:3], whole.rows[3] | {"timing_s/step": 90.0}, *whole.rows[4:]]
    times = {one.name: one for one in phase_times(rows)}["iteration"]
    assert times.seconds > 15 and times.median == pytest.approx(whole.rows[5]["timing_s/step"], rel=0.1)
    assert "90" in readable_seconds(90.0) and readable_seconds(1234.5) == "1,234 s"


def test_idle_is_what_no_rank_worked_on():
    spans = [Span("reshard", "reshard", rank, 0.0, 1.0, args={"iteration": 1}) for rank in (0, 1)]
    spans += [Span("generate", "generate", 0, 1.0, 2.0), Span("wait", "wait", 1, 1.5, 2.0)]
    spans += [Span("generate", "generate", 1, 1.0, 1.5), Span("score", "score", 0, 2.0, 2.25)]
    spans += [Span("adv", "adv", rank, 2.25, 2.5) for rank in (0, 1)]
    spans += [Span("actor:0F0", "actor F", 0, 2.5, 3.5), Span("actor:0F1", "actor F", 1, 2.75, 2.875)]
    shares = idle_shares({1: spans}, [row(1, **{"timing_s/train": 1.0})])
    assert shares == {"generation": 0.25, "inference beyond it": 0.5, "training": 1 - 1.125 / 2}
    assert idle_shares({1: spans[:-3]}, [row(2)]) == {}


def test_curves_have_units_and_the_colour_of_the_page():
    assert all(curve.unit and curve.missing for curve in CURVES)
    memory = next(curve for curve in CURVES if curve.unit == "GiB")
    rows = [row(number, **{"perf/peak_memory_gb/training": 1.073741824}) for number in range(2)]
    assert memory.values(rows) == {"training": [pytest.approx(1.0)] * 2}
    svg = charts.draw_curve(rows, memory)
    assert ">GiB<" in svg and "currentColor" in svg and "#000000" not in svg and "#ffffff" not in svg
    best = held_out_curve([{"iteration": 1, "val/score/mean": 0.5, "val/score/best@4/mean": 0.75}])
    assert list(best.metrics.values()) == ["mean", "best@4/mean"]


def test_the_best_and_worst_samples_of_both_ends_are_shown():
    texts = [
        SampleText(i, 10 * i + n, "p", "r", score, 1, "stop") for i in (0, 1, 2) for n, score in enumerate((1, 3, 2))
    ]
    held_out = SampleText(2, 99, "p", "r", 9.0, 1, "stop", "val")
    shown, more = chosen_samples([*texts, held_out])
    assert [(one.iteration, one.score) for one in shown] == [(0, 3), (0, 1), (2, 3), (2, 1)]
    assert len(more) == 6 and more[-1] is held_out
    assert len(chosen_samples(40 * texts)[1]) == 24 and chosen_samples([]) == ([], [])
    assert chosen_samples(texts[:1]) == (texts[:1], [])
