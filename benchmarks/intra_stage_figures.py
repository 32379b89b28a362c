"""From runs to figures: speedups beside what the schedules promise, actions beside their profile, table and trace.

A speedup is the median, over rounds, of a baseline's seconds over the fused run's seconds of the same round. Knows
nothing of how runs were made.
"""

from __future__ import annotations

import statistics
from typing import Any, Iterable, Mapping, Sequence

from intra_stage_cases import BASELINES, FUSED, MEGATRON, MICROSECONDS, NO_BARRIER, SERIAL, Case, Schedules, Times
from intra_stage_ranks import Round

from rlhfuse.monitor.trace import Span
from rlhfuse.schedule.evaluate import evaluate
from rlhfuse.schedule.schedule import Schedule

GAP_SECONDS = 0.05  # between two runs in the trace
NEEDED = 0.95  # of the predicted speedup


Rounds = Mapping[str, Sequence[Round]]  # by side


def speedup(rounds: Rounds, baseline: str) -> dict[str, float]:
    """Of fused training against `baseline`: median, least and most over the rounds."""
    ratios = [slow.seconds / fast.seconds for slow, fast in zip(rounds[baseline], rounds[FUSED])]
    return {"speedup": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def case_figures(case: Case, schedules: Schedules, times: Times, rounds: Rounds) -> dict[str, Any]:
    """Everything measured in a case, for the JSON object."""
    medians = {side: statistics.median(r.seconds for r in runs) for side, runs in rounds.items()}
    predicted = {
        SERIAL: schedules.serial_time / MICROSECONDS,
        NO_BARRIER: schedules.no_barrier_time / MICROSECONDS,
        FUSED: schedules.fused_time / MICROSECONDS,
    }
    promised = {
        **dict.fromkeys(BASELINES, predicted[SERIAL] / predicted[FUSED]),
        NO_BARRIER: predicted[NO_BARRIER] / predicted[FUSED],
    }
    ratios = {}
    for side in rounds:
        if side != FUSED:
            found = speedup(rounds, side)
            ratios[side] = {**found, "predicted": promised[side], "of_predicted": found["speedup"] / promised[side]}
    baseline = min((side for side in BASELINES if side in rounds), key=medians.__getitem__)
    return {
        "case": case.name,
        "layers": list(case.sizes.layers),
        "microbatches": case.microbatches,
        "microbatch_tokens": case.sizes.microbatch_tokens,
        "headline": {"baseline": baseline, **ratios[baseline]},
        "speedups": ratios,
        "bound": schedules.serial_time / schedules.bound,
        "seconds": {
            side: {
                "median": medians[side],
                "least": min(r.seconds for r in runs),
                "most": max(r.seconds for r in runs),
                "predicted": predicted.get(side, predicted[SERIAL]),
            }
            for side, runs in rounds.items()
        },
        "actions": action_rows(times, rounds),
        "schedule": schedules.fused.text().splitlines(),
    }


def action_rows(times: Times, rounds: Rounds) -> list[dict[str, Any]]:
    """Median seconds of each kind of action in fused and in serial runs, beside the profile of the schedule."""
    rows = []
    for key, profiled in sorted(times.seconds.items()):
        row: dict[str, Any] = {"action": f"{key[0]}:{key[1]}{key[2]}", "profile_seconds": profiled}
        for side in (FUSED, SERIAL):
            seconds = [a.end - a.start for r in rounds[side] for a in r.actions if a.key == key]
            row[f"{side}_seconds"] = statistics.median(seconds)
            row[f"{side}_ratio"] = row[f"{side}_seconds"] / profiled
        rows.append(row)
    return rows


def goals(cases: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The goals that this run measured, and whether they are reached."""
    return [
        {
            "case": case["case"],
            "figure": f"speedup against {case['headline']['baseline']} over the predicted speedup",
            "goal": NEEDED,
            "measured": case["headline"]["of_predicted"],
            "reached": case["headline"]["of_predicted"] >= NEEDED,
        }
        for case in cases
    ]


def markdown(cases: Iterable[Mapping[str, Any]]) -> str:
    """The table of the documentation."""
    lines = [
        "| models | M | Megatron 1F1B | serial | no barrier | fused | speedup | predicted | of it | bound |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        head, seconds = case["headline"], case["seconds"]

        def cell(side: str) -> str:
            return f"{seconds[side]['median']:.3f} s" if side in seconds else "-"

        lines.append(
            f"| {case['case'].split()[0]} | {case['microbatches']} | {cell(MEGATRON)} | {cell(SERIAL)} "
            f"| {cell(NO_BARRIER)} | {cell(FUSED)} | **{head['speedup']:.2f}** ({head['least']:.2f}-{head['most']:.2f}) "
            f"| {head['predicted']:.2f} | {head['of_predicted']:.3f} | {case['bound']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def trace_spans(case: Case, schedules: Schedules, rounds: Rounds, begin: float) -> list[Span]:
    """The median run of the serial and of the fused side, predicted and measured, one after the other."""
    spans: list[Span] = []
    for side, schedule in ((NO_BARRIER, schedules.serial), (FUSED, schedules.fused)):
        runs = sorted(rounds[side], key=lambda run: run.seconds)
        run, facts = runs[len(runs) // 2], {"case": case.name, "side": side}
        spans += predicted_spans(schedule, begin, facts)
        for action in run.actions:
            kind = f"{action.key[0]} {action.key[2]}"
            spans.append(
                Span(action.text, kind, action.rank, begin + action.start, begin + action.end, "measured", facts)
            )
        begin = max(span.end_seconds for span in spans) + GAP_SECONDS
    return spans


def predicted_spans(schedule: Schedule, begin: float, facts: dict[str, Any]) -> list[Span]:
    timeline = evaluate(schedule)
    return [
        Span(
            str(action), f"{action.pipeline} {action.kind}", node, begin + first / MICROSECONDS,
            begin + last / MICROSECONDS, "predicted", facts,
        )  # fmt: skip
        for node, order in enumerate(schedule.orders)
        for action, first, last in zip(order, timeline.starts[node], timeline.ends[node])
    ]
