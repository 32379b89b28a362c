"""A run on one page: curves, where the time went, timeline, fused schedule, R_t, samples, plan against measured.

The page holds everything itself: pictures are SVG in it, there are no scripts, and nothing is fetched, so that it
opens offline and can be sent to somebody. The words and their order stand in report.html; here is what fills them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from rlhfuse.monitor.trace import iteration_figure
from rlhfuse.run.report import charts
from rlhfuse.run.report.forecast import predicted_spans
from rlhfuse.run.report.memory_table import MemoryTable
from rlhfuse.run.report.phase_times import after_warm_up, phase_times, samples_per_second
from rlhfuse.run.report.run_files import RunFiles
from rlhfuse.schedule.draw import draw_schedule

CURVES = (  # title, metrics drawn together
    ("score", ("critic/score/mean",)),
    ("KL to the reference", ("actor/ref_kl",)),
    ("response tokens", ("response_length/mean", "response_length/max")),
    ("entropy", ("actor/entropy",)),
    ("policy loss", ("actor/pg_loss",)),
    ("clipped share of tokens", ("actor/pg_clipfrac", "critic/vf_clipfrac")),
    ("value loss", ("critic/vf_loss",)),
    ("explained variance of values", ("critic/vf_explained_var",)),
    ("gradient norm", ("actor/grad_norm", "critic/grad_norm")),
    ("learning rate", ("actor/lr", "critic/lr")),
    ("log-probability, generation against training", ("rollout/train_logprob_abs_diff",)),
    ("samples per second", ("perf/samples_per_second",)),
    ("share of guesses that were right", ("speculation/accepted_share",)),
    ("tokens of a sample in a step with guesses", ("speculation/tokens_per_step",)),
    ("seconds saved by guesses", ("speculation/seconds_saved",)),
    ("model FLOP utilisation", ("perf/mfu/actor", "perf/mfu/critic", "perf/mfu/gen_infer")),
    ("peak memory, GB", tuple(f"perf/peak_memory_gb/{phase}" for phase in ("generation", "inference", "training"))),
)
MOST_SAMPLES = 24  # shown: the first and the last iterations' are what people compare


@dataclass(frozen=True)
class PlannedSeconds:
    """Seconds of an iteration by the plan, beside those that were measured."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


def render_report(run: RunFiles) -> str:
    """The page as HTML text."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    rows, held_out = run.rows, run.evaluations
    ends = [*held_out[:1], *held_out[1:][-1:]]
    timeline, reason = _timeline(run)
    drawn = [row | accepted_share(row) for row in rows]
    curves = [held_out_curve(held_out), *(charts.curve(drawn, metrics, title) for title, metrics in CURVES)]
    return environment.get_template("report.html").render(
        run=run,
        name=run.folder.resolve().name,
        iterations=len(rows),
        speed=samples_per_second(rows),
        score=tuple(row.get("critic/score/mean") for row in (*rows[:1], *rows[-1:])),
        held_out=[(row["val/score/mean"], row.get("val/score/std_error")) for row in ends],
        plan=run.plan,
        curves=[svg for svg in curves if svg],
        phases=phase_times(rows),
        phase_bars=charts.phase_bars(rows) if rows else "",
        timeline=timeline,
        unpredicted=reason,
        schedule=charts.inline(draw_schedule(run.schedule, "svg").decode()) if run.schedule else "",
        threshold=charts.threshold_history(rows) if rows else "",
        comparisons=compare_plan(run),
        memory=MemoryTable.of(run.plan, rows),
        samples=_chosen(run.samples),
    )


def held_out_curve(evaluations: Sequence[dict[str, Any]]) -> str:
    """Mean score of the held-out prompts, and where there were several samples of each, of the best of them."""
    names = {name for row in evaluations for name in row if name.startswith("val/score/best@")}
    return charts.curve(evaluations, ("val/score/mean", *sorted(names)), "held-out score")


def accepted_share(row: dict[str, Any]) -> dict[str, float]:
    """Of the guesses in an iteration, those that were right; nothing where there were none."""
    drafted = row.get("speculation/drafted")
    return {"speculation/accepted_share": row["speculation/accepted"] / drafted} if drafted else {}


def compare_plan(run: RunFiles) -> list[PlannedSeconds]:
    """What plan.json predicted before the run beside the mean of the iterations after warm-up."""
    if run.plan is None or not run.rows:
        return []
    seconds, kept = run.plan["seconds"], after_warm_up(run.rows)

    def mean(name: str) -> float:
        return sum(row.get(name) or 0.0 for row in kept) / len(kept)

    moves, gen_infer, training = (seconds[part] for part in ("weight_moves", "gen_infer_fused", "training_fused"))
    gen_infer += seconds.get("capture", 0.0)
    return [
        PlannedSeconds("weights moved", moves, mean("timing_s/reshard")),
        PlannedSeconds("generation and inference", gen_infer, mean("fusion/gen_infer_seconds")),
        PlannedSeconds("training", training, mean("timing_s/train")),
        PlannedSeconds("iteration", moves + gen_infer + training, mean("timing_s/step")),
    ]


def _timeline(run: RunFiles) -> tuple[str, str]:
    """The last iteration of the trace as a picture, '' without one; and why nothing is predicted above it, if so."""
    if not (traced := run.traced_iterations()):
        return "", ""
    last = max(traced)
    predicted, reason = predicted_spans(run, last)
    title = "last iteration of the trace" + (", predicted above measured" if predicted else "")
    return charts.svg_text(iteration_figure([*predicted, *traced[last]], title=title)), reason


def _chosen(samples: Sequence[Any]) -> list[Any]:
    """The first and last of them, in order."""
    if len(samples) <= MOST_SAMPLES:
        return list(samples)
    return [*samples[: MOST_SAMPLES // 2], *samples[-(MOST_SAMPLES // 2) :]]
