"""Figures of the pages: what stands in README and docs of a measurement comes from `benchmarks/results/*.json`.

    <!--fig NAME.FIGURE[.least|.most] FORMAT-->1.26<!--/-->      a figure of results/NAME.json, formatted as Python does
    <!--fig NAME.measured.commit-->c79fbe8<!--/-->             a fact of the measurement: commit, date, command, cpu
    <!--table NAME.TABLE--> ... <!--/-->                          a table, on lines of its own

The marks are comments, which nobody sees on the page; what stands between them is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhfuse.base.errors import InputError

MARK = re.compile(r"<!--(fig|table) ([^\s>.]+)\.([^\s>]+?)(?: ([^\s>]+?))?-->(.*?)<!--/-->", re.DOTALL)
INTRODUCTION = """# Measured results

Generated from `benchmarks/results/*.json` by `tools/generate_docs.py`. A figure is the median over the rounds in which
the sides took turns; in brackets the least and the most of a round. "Other programs" are the cores that everything else
on the machine took meanwhile: 0 where it was idle.
"""

Results = Mapping[str, Mapping[str, Any]]


def load_results(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Every results file of a folder, by name. Raises InputError for a quick run, which is no measurement."""
    results = {file.stem: json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))}
    for name, result in results.items():
        if result["quick"]:
            raise InputError(f"results of {name} are of a quick run, which is no measurement; measure it")
    return results


def fill_figures(text: str, results: Results) -> str:
    """The page with every mark filled. Raises InputError naming a figure, table or fact that is not there."""

    def filled(match: re.Match) -> str:
        kind, name, entry, form, _ = match.groups()
        if name not in results:
            raise InputError(
                f"{match[0].partition('-->')[0]}-->: benchmarks/results/{name}.json is not there; measure it"
            )
        shown = (
            table_text(results[name], name, entry) if kind == "table" else figure_text(results[name], name, entry, form)
        )
        return f"{match[0].partition('-->')[0]}-->{shown}<!--/-->"

    return MARK.sub(filled, text)


def figure_text(result: Mapping[str, Any], name: str, entry: str, form: str | None) -> str:
    """A figure, an end of it, or a fact of the measurement, as it stands on a page."""
    facts = {**result, **result["machine"]}
    figure, _, part = entry.rpartition(".")
    if figure == "measured" and part in facts:
        value = facts[part]
    elif entry in result["figures"]:
        value = result["figures"][entry]["value"]
    elif part in ("least", "most") and part in result["figures"].get(figure, {}):
        value = result["figures"][figure][part]
    else:
        raise InputError(
            f"benchmarks/results/{name}.json has no figure {entry!r}; it has {', '.join(result['figures'])}"
        )
    return format(value, form or "")


def table_text(result: Mapping[str, Any], name: str, entry: str) -> str:
    """A table in Markdown, with empty lines around it."""
    if entry not in result["tables"]:
        raise InputError(f"benchmarks/results/{name}.json has no table {entry!r}; it has {', '.join(result['tables'])}")
    table = result["tables"][entry]
    rows = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
    return "\n\n" + "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in rows) + "\n"


def results_page(results: Results) -> str:
    """All measurements with their tables, goals, and what they were measured with."""
    parts = [INTRODUCTION]
    for name, result in results.items():
        machine, others = result["machine"], result["other_cores"]
        dirty = " with changes" if result["dirty"] else ""
        busy = "" if others is None else f"; other programs {others:.2f} cores"
        facts = f"commit {result['commit']}{dirty}, {result['date']}, {machine['cpu']}, {machine['cores']} cores{busy}"
        parts.append(f"## {name}\n\n`python benchmarks/{result['command']}`: {facts}.\n")
        for entry, table in result["tables"].items():
            parts.append(f"**{table['title']}**" + table_text(result, name, entry).rstrip("\n") + "\n")
        goals = [
            [
                key,
                f"{figure['value']:.3g} {figure['unit']}".strip(),
                figure["goal"],
                "yes" if figure["reached"] else "no",
            ]
            for key, figure in result["figures"].items()
            if "goal" in figure
        ]
        if goals:
            shown = {"columns": ["figure", "measured", "goal", "reached"], "rows": goals}
            parts.append(table_text({"tables": {"goals": shown}}, name, "goals").strip("\n") + "\n")
    return "\n".join(parts)
