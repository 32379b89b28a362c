"""Placements for people, as a table, and for programs, as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from textwrap import wrap
from typing import Any

from placements.mesh import Mesh
from placements.placements import OVERLAPPED, Placement

from rlhfuse.tasks.task import TASKS, TRAINED

TODAY = "colocated, fused"
TEXT_COLUMNS = 110
LEGEND = (
    "x: seconds of what runs today over the placement's, above 1 where it would be faster",
    "bound: seconds with all the memory it wants, of free on aligned meshes; the rest is what memory costs",
    f"{' and '.join(OVERLAPPED)}: seconds are from the end of one iteration to the end of the next",
    "priced by the roofline, without a profile, backwards in one part; no CUDA graphs are recorded, here and in row 1",
)


def as_text(placements: Sequence[Placement], today_seconds: float | None, refusal: str = "") -> str:
    """A row for each placement; `today_seconds`: predicted of an iteration as the run will do it, None where it cannot
    be: then `refusal` says why."""
    today = _row_of(today_seconds, today_seconds)
    lines = [
        "what if: other placements, predicted; none of them runs today, and none fuses its phases",
        _line("placement", "seconds", "x", "bound", "meshes with their layouts"),
        *_rows(TODAY, *today, "-", [refusal or "all ranks: this plan, what runs today"]),
    ]
    for placement in placements:
        seconds = None if placement.why_not else placement.seconds
        bound = "-" if placement.bound == inf else f"{placement.bound:.4g}"
        told = [placement.why_not] if placement.why_not else _meshes(placement)
        lines += _rows(placement.name, *_row_of(seconds, today_seconds), bound, told)
    lines += [f"  {placement.name}: {placement.note}" for placement in placements if placement.note]
    return "\n".join([*lines, *(f"  {line}" for line in LEGEND)])


def as_dict(placements: Sequence[Placement], today_seconds: float | None) -> dict[str, Any]:
    """The same. `over_today`: above 1 where it would be faster."""
    return {"today_seconds": today_seconds, "placements": [_row(placement, today_seconds) for placement in placements]}


def _row(placement: Placement, today_seconds: float | None) -> dict[str, Any]:
    row = {"name": placement.name, "bound": None if placement.bound == inf else placement.bound}
    if placement.why_not:
        return {**row, "why_not": placement.why_not}
    calls = {
        name: {
            "layout": str(choice.option.layout),
            "ranks": [choice.mesh.first, choice.mesh.last],
            "seconds": choice.option.seconds,
            "note": choice.option.note,
        }
        for name, choice in sorted(placement.plan.items())
    }
    over = today_seconds / placement.seconds if today_seconds else None
    row = {**row, "seconds": placement.seconds, "over_today": over, "calls": calls}
    return {**row, "note": placement.note} if placement.note else row


def _row_of(seconds: float | None, today_seconds: float | None) -> tuple[str, str]:
    """Seconds and their ratio as words."""
    return f"{seconds:.4g}" if seconds else "-", f"{today_seconds / seconds:.2f}" if seconds and today_seconds else "-"


def _meshes(placement: Placement) -> list[str]:
    """A text for each mesh: what runs there, in the order of an iteration."""
    there: dict[Mesh, list[str]] = defaultdict(list)
    for task in TASKS:
        if task in placement.plan:
            option, trains = placement.plan[task].option, task in TRAINED
            note = f" ({option.note})" if trains and option.note else ""
            there[placement.plan[task].mesh].append(f"{task.removesuffix('_inference')} {option.layout}{note}")
    return [f"{mesh} {', '.join(calls)}" for mesh, calls in sorted(there.items())]


def _rows(name: str, seconds: str, ratio: str, bound: str, texts: Sequence[str]) -> list[str]:
    broken = [line for text in texts for line in wrap(text, TEXT_COLUMNS, subsequent_indent="  ")]
    first, *others = broken
    return [_line(name, seconds, ratio, bound, first), *(_line("", "", "", "", other) for other in others)]


def _line(name: str, seconds: str, ratio: str, bound: str, text: str) -> str:
    return f"  {name:25s}{seconds:>8s}{ratio:>7s}{bound:>8s}  {text}"
