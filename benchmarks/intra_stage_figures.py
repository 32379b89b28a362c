"""From runs to figures: speedups beside what the schedules promise, actions beside their profile, table and trace.

A speedup is the median, over rounds, of a baseline's seconds over the fused run's seconds of the same round. Knows
nothing of how runs were made.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from intra_stage_cases import (
    BASELINES,
    FUSED,
    FUSED_STEP,
    MEGATRON,
    MICROSECONDS,
    NO_BARRIER,
    SERIAL,
    SERIAL_STEP,
    Case,
    Schedules,
    Times,
)
from intra_stage_ranks import Round, Run

from rlhfuse.monitor.trace import Span
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.schedule import Schedule

GAP_SECONDS = 0.05  # between two runs in the trace
NEEDED = 0.95  # of the predicted speedup
OVERHEAD_GOAL = 60e-6  # seconds of the executor's own Python per instruction
SHARE_GOAL = 0.03  # of a rank's time
SENDS, RECEIVES = ("SF", "SB"), ("RF", "RB")

Rounds = Mapping[str, Sequence[Round]]  # by side


def speedup(rounds: Rounds, slow: str, fast: str) -> dict[str, float]:
    """Of one side over another: median, least and most over the rounds."""
    ratios = [before.seconds / after.seconds for before, after in zip(rounds[slow], rounds[fast])]
    return {"speedup": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def case_figures(case: Case, schedules: Schedules, times: Times, rounds: Rounds) -> dict[str, Any]:
    """Everything measured in a case, for the JSON object."""
    medians = {side: statistics.median(r.seconds for r in runs) for side, runs in rounds.items()}
    predicted = {
        SERIAL: schedules.serial_time / MICROSECONDS,
        NO_BARRIER: schedules.no_barrier_time / MICROSECONDS,
        FUSED: schedules.fused_time / MICROSECONDS,
    }
    predicted[MEGATRON] = predicted[SERIAL]
    promised = {
        **dict.fromkeys(BASELINES, schedules.serial_time / schedules.fused_time),
        NO_BARRIER: schedules.no_barrier_time / schedules.fused_time,
    }
    ratios = {}
    for side, promise in promised.items():
        found = speedup(rounds, side, FUSED)
        ratios[side] = {**found, "predicted": promise, "of_predicted": found["speedup"] / promise}
    baseline = min(BASELINES, key=medians.__getitem__)
    return {
        "case": case.name,
        "layers": list(case.sizes.layers),
        "microbatches": case.microbatches,
        "microbatch_tokens": case.sizes.microbatch_tokens,
        "headline": {"baseline": baseline, **ratios[baseline]},
        "speedups": ratios,
        "bound": schedules.serial_time / schedules.bound,
        "with_optimizer_steps": speedup(rounds, SERIAL_STEP, FUSED_STEP),
        "seconds": {
            side: {
                "median": medians[side],
                "least": min(r.seconds for r in runs),
                "most": max(r.seconds for r in runs),
                "predicted": predicted.get(side),
            }
            for side, runs in rounds.items()
        },
        "actions": action_rows(times, rounds),
        "executor": executor_figures(rounds[FUSED]),
        "ranks": rank_rows(schedules, rounds[FUSED]),
        "cpu_share": min(cpu_share(rounds[side]) for side in (SERIAL, FUSED)),
        "schedule": schedules.fused.text().splitlines(),
    }


def executor_figures(rounds: Sequence[Round]) -> dict[str, float]:
    """The executor's own time in fused runs: medians over all ranks' runs, in seconds."""
    runs = [run for one in rounds for run in one.runs]

    def per(run: Run, name: str, kinds: Sequence[str] = ()) -> float:
        spent = [spent for kind, spent in run.spent if not kinds or kind in kinds]
        return sum(getattr(entry, name) for entry in spent) / sum(entry.count for entry in spent)

    return {
        "instruction_seconds": statistics.median(per(run, "overhead") for run in runs),
        "send_seconds": statistics.median(per(run, "transport", SENDS) for run in runs),
        "receive_seconds": statistics.median(per(run, "transport", RECEIVES) for run in runs),
        "share": statistics.median(sum(spent.overhead for _, spent in run.spent) / run.seconds for run in runs),
    }


def rank_rows(schedules: Schedules, rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Of each rank in fused runs: how long it computed and waited beside what the schedule says, in seconds."""
    timeline = evaluate(schedules.fused)
    rows = []
    for rank, (starts, ends) in enumerate(zip(timeline.starts, timeline.ends)):
        runs = [one.runs[rank] for one in rounds]
        busy = sum(end - start for start, end in zip(starts, ends)) / MICROSECONDS
        rows.append(
            {
                "rank": rank,
                "busy_seconds": statistics.median(run.busy_seconds for run in runs),
                "busy_predicted": busy,
                "waiting_seconds": statistics.median(sum(spent.waiting for _, spent in run.spent) for run in runs),
                "waiting_predicted": max(ends) / MICROSECONDS - busy,
                "drain_seconds": statistics.median(run.drain_seconds for run in runs),
                "page_faults": statistics.median(run.page_faults for run in runs),
                "peak_live": max(run.peak_live for run in runs),
                "peak_live_predicted": schedules.peak_live[rank],
            }
        )
    return rows


def cpu_share(rounds: Sequence[Round]) -> float:
    """Processor time that the computing threads got, over the time that their actions took."""
    runs = [run for one in rounds for run in one.runs]
    return sum(run.cpu_seconds for run in runs) / sum(run.busy_seconds for run in runs)


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
    rows = []
    for case in cases:
        head, executor = case["headline"], case["executor"]
        rows += [
            (case, f"speedup against {head['baseline']} over the predicted", NEEDED, head["of_predicted"], True),
            (case, "executor's seconds per instruction", OVERHEAD_GOAL, executor["instruction_seconds"], False),
            (case, "executor's share of a step", SHARE_GOAL, executor["share"], False),
        ]
    return [
        {
            "case": case["case"],
            "figure": figure,
            "goal": goal,
            "measured": measured,
            "reached": measured >= goal if at_least else measured < goal,
        }
        for case, figure, goal, measured, at_least in rows
    ]


def markdown(cases: Iterable[Mapping[str, Any]]) -> str:
    """The table of the documentation."""
    lines = [
        "| models | M | Megatron 1F1B | serial | no barrier | fused | speedup | predicted | of it | bound "
        "| with steps |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        head, seconds = case["headline"], case["seconds"]

        def cell(side: str) -> str:
            return f"{seconds[side]['median']:.3f} s"

        lines.append(
            f"| {case['case'].split()[0]} | {case['microbatches']} | {cell(MEGATRON)} | {cell(SERIAL)} "
            f"| {cell(NO_BARRIER)} | {cell(FUSED)} "
            f"| **{head['speedup']:.2f}** ({head['least']:.2f}-{head['most']:.2f}) | {head['predicted']:.2f} "
            f"| {head['of_predicted']:.3f} | {case['bound']:.2f} "
            f"| {case['with_optimizer_steps']['speedup']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def trace_spans(case: Case, schedules: Schedules, rounds: Rounds, begin: float) -> list[Span]:
    """The median runs, serial without barrier and fused, predicted and measured, one after the other."""
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
            str(action),
            f"{action.pipeline} {action.kind}",
            node,
            begin + first / MICROSECONDS,
            begin + last / MICROSECONDS,
            "predicted",
            facts,
        )
        for node, order in enumerate(schedule.orders)
        for action, first, last in zip(order, timeline.starts[node], timeline.ends[node])
    ]
