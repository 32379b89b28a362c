"""Placements for people, as a table, and for programs, as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from rlhfuse.decisions.layouts import TASK_ROLES
from rlhfuse.planning.memory import TRAINED
from rlhfuse.planning.meshes.mesh import Mesh
from rlhfuse.planning.meshes.placements import OVERLAPPED, Placement

TODAY = "colocated, fused"
TEXT_COLUMNS = 110
LEGEND = (
    "x: seconds of what runs today over the placement's, above 1 where it would be faster",
    f"{' and '.join(OVERLAPPED)}: seconds are from the end of one iteration to the end of the next",
    "priced by the roofline, without a profile, backwards in one part; no CUDA graphs are recorded, here and in row 1",
)


def as_text(found: Sequence[Placement], today_seconds: float) -> str:
    """A row for each placement; `today_seconds`: predicted of an iteration as the run will do it."""
    lines = [
        "what if: other placements, predicted; none of them runs today, and none fuses its phases",
        _line("placement", "seconds", "x", "meshes with their layouts"),
        _line(TODAY, f"{today_seconds:.4g}", "1.00", "all ranks: this plan, what runs today"),
    ]
    for one in found:
        if one.why_not:
            lines += _rows(one.name, "-", "-", [one.why_not])
        else:
            lines += _rows(one.name, f"{one.seconds:.4g}", f"{today_seconds / one.seconds:.2f}", _meshes(one))
    lines += [f"  {one.name}: {one.note}" for one in found if one.note]
    return "\n".join([*lines, *(f"  {line}" for line in LEGEND)])


def as_dict(found: Sequence[Placement], today_seconds: float) -> dict[str, Any]:
    """The same. `over_today`: above 1 where it would be faster."""
    return {"today_seconds": today_seconds, "placements": [_row(one, today_seconds) for one in found]}


def _row(one: Placement, today_seconds: float) -> dict[str, Any]:
    if one.why_not:
        return {"name": one.name, "why_not": one.why_not}
    calls = {
        name: {
            "layout": str(choice.option.layout),
            "ranks": [choice.mesh.first, choice.mesh.last],
            "seconds": choice.option.seconds,
            "note": choice.option.note,
        }
        for name, choice in sorted(one.plan.items())
    }
    row = {"name": one.name, "seconds": one.seconds, "over_today": today_seconds / one.seconds, "calls": calls}
    return {**row, "note": one.note} if one.note else row


def _meshes(one: Placement) -> list[str]:
    """A text for each mesh: what runs there, in the order of an iteration."""
    there: dict[Mesh, list[str]] = defaultdict(list)
    for task, _ in TASK_ROLES:
        if task in one.plan:
            option, trains = one.plan[task].option, task in TRAINED
            note = f" ({option.note})" if trains and option.note else ""
            there[one.plan[task].mesh].append(f"{task.removesuffix('_inference')} {option.layout}{note}")
    return [f"{mesh} {', '.join(calls)}" for mesh, calls in sorted(there.items())]


def _rows(name: str, seconds: str, ratio: str, texts: Sequence[str]) -> list[str]:
    broken = [line for text in texts for line in wrap(text, TEXT_COLUMNS, subsequent_indent="  ")]
    first, *others = broken
    return [_line(name, seconds, ratio, first), *(_line("", "", "", other) for other in others)]


def _line(name: str, seconds: str, ratio: str, text: str) -> str:
    return f"  {name:25s}{seconds:>8s}{ratio:>7s}  {text}"
