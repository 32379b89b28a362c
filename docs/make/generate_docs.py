"""Write the pages, or the parts of pages, that are made from code and results.

    python docs/make/generate_docs.py            write what differs
    python docs/make/generate_docs.py --check    name what differs, write nothing; exit code 1 if anything does

A page is a file and a function from its present text to what it should be. `fill` replaces the part between
`<!-- begin NAME -->` and `<!-- end NAME -->`; the text around it is written by hand. Figures of measurements may stand
in every page: page_figures.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))  # where svg_text lies

from page_figures import Results, benchmark_page, claims_table, fill_figures, load_results, retired_table
from page_pictures import PICTURES, picture
from program import run_program

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_text
from rlhfuse.config.settings import RunConfig

RESULTS = ROOT / "benchmarks" / "results"


def settings_page(text: str) -> str:
    """One table for each group of keys."""
    lines: list[str] = []
    for group, leaves in groupby(RunConfig().leaves(), key=lambda leaf: leaf[0].rpartition(".")[0]):
        lines += ["", f"## {group}", "", "| key | default | help |", "|---|---|---|"]
        lines += [f"| `{key}` | `{_shown(default)}` | {field.description} |" for key, default, field in leaves]
    return fill(text, "settings", [*lines[1:], ""])


def settings_schema(text: str) -> str:
    """The JSON schema of a configuration file, for editors."""
    return (
        json.dumps(
            {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}, indent=1
        )
        + "\n"
    )


def pages(results: Results) -> dict[str, Callable[[str], str]]:
    """The pages that are made from code and from what was measured."""
    live = {name: result for name, result in results.items() if not result.get("retired")}
    made: dict[str, Callable[[str], str]] = {
        "docs/reference/configuration.md": settings_page,
        "docs/reference/configuration.schema.json": settings_schema,
        "docs/results.md": lambda text: fill(
            fill(text, "claims", ["", claims_table(live)]), "retired", ["", retired_table(results)]
        ),
    }
    for name, result in live.items():
        page = benchmark_page(results, name, name in PICTURES)
        made[f"docs/results/{name}.md"] = lambda _, page=page: page
        if name in PICTURES:
            drawing = PICTURES[name](result)
            made[f"docs/images/{name}.svg"] = lambda text, drawing=drawing: picture(text, drawing)
    return made


def fill(text: str, name: str, lines: Iterable[str]) -> str:
    """`text` with `lines` between the marks of the part `name`. Raises InputError where a mark is missing."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise InputError(f"the page has no part {name!r}; put {begin.strip()} and {end} around it")
    return before + begin + "\n".join(lines) + "\n" + end + after


def differing() -> dict[Path, str]:
    """File -> new text, of the pages that are not as they should be."""
    results = load_results(RESULTS)
    files = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
    makers = dict.fromkeys(files, lambda text: fill_figures(text, results))
    makers |= {ROOT / path: make for path, make in pages(results).items()}
    texts = {file: file.read_text() if file.exists() else "" for file in makers}
    made = {file: make(texts[file]) for file, make in makers.items()}
    return {file: text for file, text in made.items() if text != texts[file]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the pages that are made from code and results.")
    parser.add_argument("--check", action="store_true", help="name the pages that differ and write nothing")
    check, changed = parser.parse_args().check, differing()
    for file, text in changed.items():
        print(f"{file.relative_to(ROOT)} {'differs: run docs/make/generate_docs.py' if check else 'written'}")
        if not check:
            write_text(file, text)
    return 1 if check and changed else 0


def _shown(default: object) -> str:
    if isinstance(default, (bool, tuple)):
        return json.dumps(default)
    return str(default) or "(empty)"


if __name__ == "__main__":
    run_program(main)
