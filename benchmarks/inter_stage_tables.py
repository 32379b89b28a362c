"""The inter-stage figures as lines for a terminal and as the Markdown tables of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def line(case: dict[str, Any]) -> str:
    speedup, serial = case["speedup"], case["points"][0]
    return (
        f"{case['case']}: serial {serial['seconds']:.2f} s, R_t {case['chosen']}: {speedup['median']:.3f} times "
        f"as fast ({speedup['least']:.2f}-{speedup['most']:.2f}), predicted {case['speedup_predicted']:.3f}, "
        f"ideal {case['ideal']:.3f}, 1 + T_inf/T_gen {case['bound']:.3f}; prediction off by {case['mean_error']:.1%}"
    )


def markdown(cases: Sequence[dict[str, Any]]) -> str:
    """Speedups, then the sweep over R_t of each case, then what work costs beside a neighbour."""
    parts = [_speedups(cases), _costs(cases), *(_sweep(case) for case in cases), *(_profile(case) for case in cases)]
    return "\n".join(parts)


def _table(head: str, rows: Sequence[str]) -> str:
    return "\n".join((head, "|" + "---|" * (head.count("|") - 1), *rows)) + "\n"


def _speedups(cases: Sequence[dict[str, Any]]) -> str:
    head = "| models | samples | output p50, max | T_inf/T_gen | serial | fused | speedup | predicted | ideal | bound |"
    rows = []
    for case in cases:
        speedup, lengths, serial = case["speedup"], case["lengths"], case["points"][0]
        fused = next(point for point in case["points"] if point["threshold"] == case["chosen"])
        rows.append(
            f"| {case['case']} | {case['samples']} | {lengths['p50']}, {lengths['max']} "
            f"| {case['inference_over_generation']:.2f} | {serial['seconds']:.2f} s | {fused['seconds']:.2f} s "
            f"| **{speedup['median']:.2f}** ({speedup['least']:.2f}-{speedup['most']:.2f}) "
            f"| {case['speedup_predicted']:.2f} | {case['ideal']:.2f} | {case['bound']:.2f} |"
        )
    return _table(head, rows)


def _costs(cases: Sequence[dict[str, Any]]) -> str:
    head = (
        "| models | R_t chosen | best measured | chosen over best | mean error | agreement | migration | pause | moved "
        "| had to move |"
    )
    rows = [
        f"| {case['case']} | {case['chosen']} | {case['best_threshold']} | {case['chosen_over_best']:.1%} "
        f"| {case['mean_error']:.1%} | {case['agreement_share']:.2%} | {case['migration_share']:.2%} "
        f"| {case['pause_seconds'] * 1e3:.0f} ms | {case['migrated_bytes'] / 1e6:.2f} MB "
        f"| {case['needed_bytes'] / 1e6:.2f} MB |"
        for case in cases
    ]
    return _table(head, rows)


def _sweep(case: dict[str, Any]) -> str:
    head = f"| {case['case']}: R_t | measured | predicted | error | generation | predicted | scored before its end |"
    marks = {case["chosen"]: " (chosen)"}
    rows = [
        f"| {point['threshold']}{marks.get(point['threshold'], '')} | {point['seconds']:.2f} s "
        f"| {point['predicted']:.2f} s | {point['error']:+.1%} | {point['generation']:.2f} s "
        f"| {point['generation_predicted']:.2f} s | {point['early']:.0f} of {case['samples']} |"
        for point in case["points"]
    ]
    return _table(head, rows)


def _profile(case: dict[str, Any]) -> str:
    neighbours = tuple(dict.fromkeys(row["beside"] for row in case["profile"]))
    head = f"| {case['case']}: work | " + " | ".join(f"other instance {name}" for name in neighbours) + " |"
    by_work: dict[str, dict[str, str]] = {}
    for row in case["profile"]:
        by_work.setdefault(_work(row), {})[row["beside"]] = f"{row['seconds'] * 1e3:.1f} ms"
    cells = {name: " | ".join(found.get(one, "") for one in neighbours) for name, found in by_work.items()}
    return _table(head, [f"| {name} | {shown} |" for name, shown in cells.items()])


def _work(row: dict[str, Any]) -> str:
    first, second = row["counts"]
    if row["work"] == "decode":
        return f"decode step, batch {first:.0f}, contexts of {second / first:.0f} tokens"
    return f"{row['work']}, batch {second:.0f}, {first:.0f} tokens together"
