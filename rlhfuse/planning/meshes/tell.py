"""Placements for people, as a table, and for programs, as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rlhfuse.planning.meshes.mesh import Mesh
from rlhfuse.planning.meshes.placements import OVERLAPPED, Placement

TODAY = "colocated, fused"


def as_text(found: Sequence[Placement], today_seconds: float) -> str:
    """A row for each placement; `today_seconds`: predicted of an iteration as the run will do it."""
    lines = [
        "what if: other placements, predicted; none of them runs today, phases of the others are not fused",
        f"  {'placement':26s}{'seconds':>9s}  {'x':>5s}  meshes with their layouts",
        f"  {TODAY:26s}{today_seconds:9.4g}  {1:5.2f}  all ranks: this plan, what runs today",
    ]
    for one in found:
        if one.why_not:
            lines.append(f"  {one.name:26s}{'-':>9s}  {'-':>5s}  {one.why_not}")
            continue
        first, *others = _meshes(one)
        lines.append(f"  {one.name:26s}{one.seconds:9.4g}  {today_seconds / one.seconds:5.2f}  {first}")
        lines += [f"{'':44s}{other}" for other in others]
    lines += [f"  {one.name}: {one.note}" for one in found if one.note]
    lines.append("  x: seconds of what runs today over the placement's, above 1 where it would be faster. Seconds of")
    lines.append(f"  {' and '.join(OVERLAPPED)} are from one iteration's end to the next's.")
    lines.append("  Prices: the roofline alone, no profile; CUDA graphs are not recorded anew; one batch is simulated.")
    return "\n".join(lines)


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
    """A line for each mesh: what runs there."""
    there: dict[Mesh, list[str]] = defaultdict(list)
    for name, choice in one.plan.items():
        note = f" ({choice.option.note})" if name.endswith("_train") and choice.option.note else ""
        there[choice.mesh].append(f"{name.replace('_inference', '')} {choice.option.layout}{note}")
    return [f"{mesh} {', '.join(sorted(calls))}" for mesh, calls in sorted(there.items())]
