"""A run on one page: did it learn, where the time went, what fusion brought, plan against measured; then all curves.

The page holds everything itself: pictures are SVG in it, there are no scripts, and nothing is fetched, so that it
opens offline and can be sent to somebody. The words and their order stand in report.html; here is what fills them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import mean

import jinja2
from run_report import charts
from run_report.charts import CURVES, accepted_share, held_out_curve
from run_report.forecast import NAMES, PHASES, Forecast, Forecaster
from run_report.fusion_gain import gen_infer_gain, training_gain
from run_report.idle_shares import idle_shares
from run_report.iteration_picture import iteration_figure
from run_report.learning import Learning
from run_report.run_files import RunFiles
from schedule_drawing import draw_timelines
from svg_text import svg_text

from rlhfuse.base.errors import InputError
from rlhfuse.base.readable_bytes import readable_bytes
from rlhfuse.monitor.memory_table import MemoryTable
from rlhfuse.monitor.phase_times import after_warm_up, phase_times, samples_per_second
from rlhfuse.monitor.samples import SampleText
from rlhfuse.planning.training.training_problem import TICK_SECONDS
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.tasks.group_selection import PLACES

TIMES = ("forward", "backward", "weight_gradient")  # of a pipeline's stages
MOST_SAMPLES = 24  # beside the best and worst: the first and the last iterations'
FORECASTS = 20  # iterations, the last ones, that are simulated again


def render_report(run: RunFiles) -> str:
    """The page as HTML text."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"seconds": readable_seconds, "bytes": readable_bytes}
    rows, evaluations = run.rows, run.evaluations
    forecaster, unpredicted = _forecaster(run)
    forecasts = [forecaster.forecast(number) for number in forecaster.iterations[-FORECASTS:]] if forecaster else []
    drawn = [row | accepted_share(row) for row in rows]
    panels = [(curve, drawn) for curve in CURVES]
    panels.insert(1, (held_out_curve(evaluations), [*evaluations]))
    missing: dict[str, list[str]] = defaultdict(list)
    for curve, values in panels:
        if not curve.values(values):
            missing[curve.why_not(values)].append(curve.title)
    shown, more = chosen_samples(run.samples)
    return environment.get_template("report.html").render(
        run=run,
        name=run.folder.resolve().name,
        iterations=len(rows),
        asked=run.setting("trainer", "iterations"),
        algorithm=run.setting("algorithm", "name"),
        speed=samples_per_second(rows),
        plan=run.plan,
        learning=(learning := Learning.of(rows, evaluations)),
        learned=learning.sentences((run.setting("actor", "optim") or {}).get("lr")),
        score=charts.score_chart(rows, evaluations),
        phases=phase_times(rows),
        warm=len(after_warm_up(rows)),
        idle=idle_shares(run.traced_iterations(), rows),
        phase_bars=charts.phase_bars(rows) if rows else "",
        gains=[gen_infer_gain(run, forecasts, unpredicted), training_gain(run, forecaster, unpredicted)],
        comparisons=compare_phases(run, forecasts),
        forecast_iterations=[one.iteration for one in forecasts],
        unpredicted=unpredicted,
        memory=MemoryTable.of(run.plan, rows),
        curves=[charts.draw_curve(values, curve) for curve, values in panels if curve.values(values)],
        missing=missing,
        timeline=_timeline(run, forecaster),
        schedule=_schedule(run.schedule) if run.schedule and run.schedule.problem.nodes > 1 else "",
        threshold=charts.threshold_history(rows) if any(row.get("fusion/threshold") for row in rows) else "",
        groups=[row for row in rows if PLACES in row][-FORECASTS:],
        samples=shown,
        more_samples=more,
    )


def readable_seconds(seconds: float) -> str:
    """0.0123 -> "0.012 s", 1234.5 -> "1,234 s"."""
    return f"{seconds:,.{0 if seconds >= 1000 else 1 if seconds >= 100 else 3}f} s"


def compare_phases(run: RunFiles, forecasts: Sequence[Forecast]) -> list[tuple[str, float | None, float | None, float]]:
    """List each phase: name, seconds by plan.json, mean by the forecasts, and as measured in the same iterations.

    Without forecasts, as measured after warm-up. Empty without plan.json.
    """
    if run.plan is None or not run.rows:
        return []
    numbers = {one.iteration for one in forecasts}
    kept = [row for row in run.rows if row["iteration"] in numbers] or after_warm_up(run.rows)
    seconds = {name: value for name, value in run.plan["seconds"].items() if value is not None}
    moves, both, training = (seconds[part] for part in ("weight_moves", "gen_infer_fused", "training_fused"))
    capture = seconds.get("capture", 0.0)
    planned = {"reshard": moves, "train": training, "step": moves + capture + both + training}
    if generation := seconds.get("generation_fused"):
        planned |= {"gen": capture + generation, "infer": both - generation}
    found = []
    for phase in (phase for phase in PHASES if all(f"timing_s/{phase}" in row for row in kept)):
        predicted = mean(one.seconds[phase] for one in forecasts) if forecasts else None
        found.append((NAMES[phase], planned.get(phase), predicted, mean(row[f"timing_s/{phase}"] for row in kept)))
    return found


def chosen_samples(samples: Sequence[SampleText]) -> tuple[list[SampleText], list[SampleText]]:
    """The best and the worst of the first and of the last iteration; and more, of the others the first and last."""
    trained = [sample for sample in samples if sample.split == "train"]
    iterations = [[*group] for _, group in groupby(trained, key=lambda sample: sample.iteration)]
    shown: list[SampleText] = []
    for group in (*iterations[:1], *iterations[1:][-1:]):
        ordered = sorted(group, key=lambda sample: (sample.score is None, -(sample.score or 0.0)))
        shown += [ordered[0], *ordered[1:][-1:]]
    others = [sample for sample in samples if sample not in shown]
    half = MOST_SAMPLES // 2
    return shown, others if len(others) <= MOST_SAMPLES else [*others[:half], *others[-half:]]


def _forecaster(run: RunFiles) -> tuple[Forecaster | None, str]:
    """None where a file is missing; and why no iteration can be predicted, if so."""
    try:
        forecaster = Forecaster(run)
    except InputError as error:
        return None, str(error)
    one = "" if forecaster.iterations else "the run has one iteration, and each is predicted from those before"
    return forecaster, one


def _timeline(run: RunFiles, forecaster: Forecaster | None) -> str:
    """The last iteration of the trace as a picture, the predicted one above it where there is one; '' without."""
    if not (traced := run.traced_iterations()):
        return ""
    last = max(traced)
    predicted = forecaster.spans(last) if forecaster and last in forecaster.iterations else []
    title = f"iteration {last}" + (", predicted above measured" if predicted else "")
    return svg_text(iteration_figure([*predicted, *traced[last]], title=title))


def _schedule(schedule: Schedule) -> str:
    """One mini-batch as it was planned, in milliseconds."""
    problem, unit = schedule.problem, 1000 * TICK_SECONDS
    pipelines = [
        replace(one, **{name: tuple(unit * time for time in times) for name in TIMES if (times := getattr(one, name))})
        for one in problem.pipelines
    ]
    problem = replace(problem, pipelines=tuple(pipelines), transfer=unit * problem.transfer)
    svg = draw_timelines({"milliseconds": Schedule(problem, schedule.orders)}, "svg").decode()
    return svg[svg.index("<svg") :]  # without the declarations of a file of its own
