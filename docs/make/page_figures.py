"""Figures of the pages: what stands in README and docs of a measurement comes from `benchmarks/results/*.json`.

    <!--fig NAME.FIGURE FORMAT-->1.26<!--/-->     a figure of results/NAME.json, formatted as Python does

The marks are comments, which nobody sees on the page; what stands between them is replaced. With a * FIGURE names
several. What figures mean is said once, in `benchmarks/results/claims.yaml`: a claim is a row of its benchmark's page
in docs/results/, and a main one of docs/results.md too. A `retired` benchmark has no program and no page any more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from rlhfuse.base.errors import InputError

MARK = re.compile(r"<!--fig ([^\s>.]+)\.([^\s>]+) ([^\s>]+)-->(.*?)<!--/-->", re.DOTALL)
HEAD = ("claim", "figure", "goal", "reached")

Results = Mapping[str, Mapping[str, Any]]


def load_results(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Every results file of a folder, by name, with `title`, `about` and `claims` of claims.yaml.

    Raises InputError for a quick run, which is no measurement, and for results of which nothing is said.
    """
    said = yaml.safe_load((Path(folder) / "claims.yaml").read_text())
    results = {file.stem: json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))}
    for name, result in results.items():
        if result["quick"]:
            raise InputError(f"results of {name} are of a quick run, which is no measurement; measure it")
        if name not in said:
            raise InputError(f"claims.yaml says nothing of {name}; give it a title, what it is about, and claims")
        result |= said[name]
    return results


def fill_figures(text: str, results: Results) -> str:
    """The page with every mark filled. Raises InputError naming a figure or a file that is not there."""

    def filled(match: re.Match) -> str:
        name, entry, form, _ = match.groups()
        return f"<!--fig {name}.{entry} {form}-->{value_text(matching(results, name, entry), form)}<!--/-->"

    return MARK.sub(filled, text)


def matching(results: Results, name: str, entry: str) -> list[dict[str, Any]]:
    """The figures of a results file whose key is `entry`, in which * stands for anything."""
    if name not in results:
        raise InputError(f"benchmarks/results/{name}.json is not there; measure it")
    figures = results[name]["figures"]
    found = [figure for key, figure in figures.items() if fnmatchcase(key, entry)]
    if not found:
        raise InputError(f"benchmarks/results/{name}.json has no figure {entry!r}; it has {', '.join(figures)}")
    return found


def value_text(figures: Sequence[Mapping[str, Any]], form: str) -> str:
    """A figure's value; of several the least and the most, and of many the median."""
    values = sorted(figure["value"] for figure in figures)
    ends = " to ".join(dict.fromkeys(format(value, form) for value in (values[0], values[-1])))
    return f"{ends}, median {median(values):{form}}" if len(values) > 2 and " to " in ends else ends


def claim_row(results: Results, name: str, claim: Mapping[str, Any]) -> list[str]:
    """Cells under HEAD."""
    figures = matching(results, name, claim["figures"])
    first, form = figures[0], claim["form"]
    shown = value_text(figures, form)
    if len(figures) == 1 and "least" in first:
        shown += f" ({first['least']:{form}}-{first['most']:{form}})"
    aimed = [figure for figure in figures if "goal" in figure]
    goal = "none"
    if aimed:
        goals = sorted({float(figure["goal"].split()[1]) for figure in aimed})
        sign = "at least" if aimed[0]["goal"].startswith(">=") else "at most"
        goal = f"{sign} {', '.join(format(one, form) for one in goals)}"
    good = sum(figure["reached"] for figure in aimed)
    part = f": {good} of {len(aimed)}" if len(aimed) > 1 else ""
    reached = ("yes" if good == len(aimed) else f"**no**{part}") if aimed else ""
    return [claim["says"], f"{shown} {'' if first['unit'] == 'x' else first['unit']}".strip(), goal, reached]


def claims_table(results: Results) -> str:
    """The main claims of benchmarks, each with its program."""
    rows = []
    for name, result in results.items():
        program = re.sub(r" -.*", "", result["command"])
        link = f"[`{program}`](results/{name}.md)"
        rows += [[*claim_row(results, name, claim), link] for claim in result["claims"] if claim.get("main")]
    return table_text([*HEAD, "command"], rows)


def retired_table(results: Results) -> str:
    """The first claim of every benchmark that has no program any more, with the file that keeps all its figures."""
    rows = [
        [*claim_row(results, name, one["claims"][0]), f"`{name}.json`", one["commit"]]
        for name, one in results.items()
        if one.get("retired")
    ]
    return table_text([*HEAD, "file", "commit"], rows)


def benchmark_page(results: Results, name: str, picture: bool) -> str:
    """One benchmark: what it shows, how it was measured, all claims, its picture, its tables."""
    result = results[name]
    others = result["other_cores"]
    busy = "" if others is None else f" Other programs took {others:.2f} cores meanwhile."
    machine = f"{result['machine']['cpu']}, {result['machine']['cores']} cores"
    parts = [
        f"# {result['title']}\n",
        f"{result['about'].strip()} [All results](../results.md).\n",
        f"    python benchmarks/{result['command']}\n",
        f"Commit {result['commit']}{' with changes' if result['dirty'] else ''}, {result['date']}, {machine}.{busy}\n",
        table_text(HEAD, [claim_row(results, name, claim) for claim in result["claims"]]),
        *([f"![{result['title']}](../images/{name}.svg)\n"] if picture else []),
        *(f"**{one['title']}**\n\n" + table_text(one["columns"], one["rows"]) for one in result["tables"].values()),
    ]
    return "\n".join(parts)


def table_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)
