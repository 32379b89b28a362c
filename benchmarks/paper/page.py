"""The parts of the reproduction page: rows of printed beside own values, in sections, and the page as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment

TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Row:
    """A printed value beside ours. `printed` is empty where the paper prints none that is at hand."""

    what: str
    source: str
    printed: str
    ours: str
    difference: str = ""


@dataclass(frozen=True)
class Picture:
    """An <svg> element; `paper`: it is drawn for a white ground, and gets one in the dark too."""

    caption: str
    svg: str
    paper: bool = False


@dataclass(frozen=True)
class Section:
    """One figure or table of a paper. `basis`: what ours are: computed with the page, or of a measurement's date."""

    key: str
    title: str
    basis: str
    text: Sequence[str] = ()  # assumptions and what may not be claimed
    rows: Sequence[Row] = ()
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = ()  # title, columns, rows
    pictures: Sequence[Picture] = ()


def value_row(what: str, source: str, printed: float, ours: float, form: str = ".2f", unit: str = "") -> Row:
    """Two numbers, and how many percent ours is more."""
    return Row(what, source, f"{printed:{form}}{unit}", f"{ours:{form}}{unit}", f"{ours / printed - 1:+.1%}")


def range_row(
    what: str, source: str, printed: tuple[float, float], ours: Sequence[float], form: str = ".2f", digits: int = 1
) -> Row:
    """A printed range, and how many of ours lie in it to the digits that it is printed with."""
    low, high = printed
    inside = sum(low <= round(one, digits) <= high for one in ours)
    found = f"{min(ours):{form}}-{max(ours):{form}}"
    return Row(what, source, f"{low:.{digits}f}-{high:.{digits}f}", found, f"{inside} of {len(ours)} inside")


def claim_row(what: str, source: str, printed: str, ours: str, holds: bool) -> Row:
    """A statement in words."""
    return Row(what, source, printed, ours, "holds" if holds else "does not hold")


def of_results(results: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """The basis of rows that are taken from a results file."""
    one = results[name]
    dirty = " with changes" if one["dirty"] else ""
    return f"benchmarks/results/{name}.json of {one['date']}, commit {one['commit']}{dirty}: {one['command']}"


def page(title: str, facts: str, sections: Sequence[Section], missing: Sequence[tuple[str, str, str]]) -> str:
    """The HTML; `missing`: what, where, why not."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(title=title, facts=facts, sections=sections, missing=missing)
