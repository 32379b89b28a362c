"""The parts of the reproduction page: rows of printed beside own values, in sections, and the page as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment
from page_figures import HEAD
from page_figures import claim_row as claim_cells

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
    """What was found for a figure or table of a paper."""

    rows: Sequence[Row] = ()
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = ()  # title, columns, rows
    pictures: Sequence[Picture] = ()
    searched: float = 0.0  # seconds


def value_row(what: str, source: str, printed: float, ours: float, form: str = ".2f", unit: str = "") -> Row:
    """Two numbers, and how many percent ours is more."""
    return Row(what, source, f"{printed:{form}}{unit}", f"{ours:{form}}{unit}", f"{ours / printed - 1:+.1%}")


def claim_row(what: str, source: str, printed: str, ours: str, holds: bool) -> Row:
    """A statement in words."""
    return Row(what, source, printed, ours, "holds" if holds else "does not hold")


def measured(result: Mapping[str, Any]) -> Content:
    """The claims of a results file and its tables, as on its page."""
    claims = [claim_cells({"": result}, "", claim) for claim in result["claims"]]
    tables = [(one["title"], one["columns"], one["rows"]) for one in result["tables"].values()]
    return Content(tables=[("Claims", HEAD, claims), *tables])


def words() -> dict[str, Any]:
    """What page.yaml says of every section, and what is missing."""
    return yaml.safe_load((FOLDER / "page.yaml").read_text())


def contents_of(results: Results, found: Mapping[str, Callable[[Results], Content]]) -> dict[str, Content]:
    """Every section of page.yaml as it is `found`, or else as its results file has it."""
    sections = words()["sections"]
    return {
        key: found[key](results) if key in found else measured(results[told["results"]])
        for key, told in sections.items()
    }


def page(facts: str, results: Results, contents: Mapping[str, Content]) -> str:
    """The HTML."""
    said, sections = words(), []
    for key, content in contents.items():
        told = said["sections"][key]
        basis = "computed with this page"
        if "results" in told:
            basis = f"{basis_of(results[told['results']])}{told.get('and', '')}"
        elif content.searched:
            basis = f"searched with this page for {content.searched:.1f} s on one core"
        sections.append({**told, "key": key, "basis": basis, "content": content})
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((FOLDER / "page.html").read_text(encoding="utf-8"))
    return template.render(title=said["title"], facts=facts, sections=sections, missing=said["missing"])


def basis_of(result: Mapping[str, Any]) -> str:
    """The basis of rows that are taken from a results file."""
    dirty = " with changes" if result["dirty"] else ""
    name = f"benchmarks/results/{result['benchmark']}.json"
    return f"{name} of {result['date']}, commit {result['commit']}{dirty}: {result['command']}"
