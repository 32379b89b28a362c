"""The parts of the reproduction page: rows of printed beside own values, in sections, and the page as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment

FOLDER = Path(__file__).parent
Results = Mapping[str, Mapping[str, Any]]


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
class Content:
    """What was found for a figure or table of a paper; `values` fill the words that page.yaml has for it."""

    rows: Sequence[Row] = ()
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = ()  # title, columns, rows
    pictures: Sequence[Picture] = ()
    values: Mapping[str, float] = field(default_factory=dict)


def value_row(what: str, source: str, printed: float, ours: float, form: str = ".2f", unit: str = "") -> Row:
    """Two numbers, and how many percent ours is more."""
    return Row(what, source, f"{printed:{form}}{unit}", f"{ours:{form}}{unit}", f"{ours / printed - 1:+.1%}")


def range_row(what: str, source: str, printed: tuple[float, float], ours: Sequence[float]) -> Row:
    """A printed range, and how many of ours lie in it."""
    found = f"{min(ours):.2f}-{max(ours):.2f}"
    told = f"{inside(ours, printed)} of {len(ours)} inside"
    return Row(what, source, f"{printed[0]:.1f}-{printed[1]:.1f}", found, told)


def inside(values: Sequence[float], printed: tuple[float, float]) -> int:
    """How many values lie in a printed range, to the digit that it is printed with."""
    return sum(printed[0] <= round(one, 1) <= printed[1] for one in values)


def claim_row(what: str, source: str, printed: str, ours: str, holds: bool) -> Row:
    """A statement in words."""
    return Row(what, source, printed, ours, "holds" if holds else "does not hold")


def words() -> dict[str, Any]:
    """What page.yaml says of every section, and what is missing."""
    return yaml.safe_load((FOLDER / "page.yaml").read_text())


def page(facts: str, results: Results, contents: Mapping[str, Content]) -> str:
    """The HTML, with the sections of page.yaml whose contents are given."""
    said = words()
    dated = {name: basis_of(result) for name, result in results.items()}
    sections = []
    for key, content in contents.items():
        told = said["sections"][key]
        basis = told.get("basis", "computed with this page").format(**dated, **content.values)
        text = [paragraph.format(**content.values) for paragraph in told.get("text", ())]
        sections.append({"key": key, "title": told["title"], "basis": basis, "text": text, "content": content})
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((FOLDER / "page.html").read_text(encoding="utf-8"))
    return template.render(title=said["title"], facts=facts, sections=sections, missing=said["missing"])


def basis_of(result: Mapping[str, Any]) -> str:
    """The basis of rows that are taken from a results file."""
    dirty = " with changes" if result["dirty"] else ""
    name = f"benchmarks/results/{result['benchmark']}.json"
    return f"{name} of {result['date']}, commit {result['commit']}{dirty}: {result['command']}"
