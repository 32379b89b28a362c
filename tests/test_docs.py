"""Pages follow the code: generated ones are as made, links and named files are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from generate_docs import differing, settings_page
from mkdocs.commands.build import build
from mkdocs.config import load_config

from rlhfuse.base.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GENERATED = ("reference/configuration.md", *(f"results/{file.name}" for file in DOCS.glob("results/*.md")))
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
MOST_WORDS = {  # pages that are longer than the others may be; no longer than they are
    "explanation/design.md": 2_060,
    "explanation/intra_stage.md": 1_340,
    "explanation/schedules.md": 1_240,
    "reference/formats.md": 2_450,
}


def test_generated_pages_are_as_the_code_makes_them():
    assert not differing(), "run tools/generate_docs.py"


def test_a_changed_page_is_found_and_its_hand_written_part_kept():
    page = (DOCS / "reference/configuration.md").read_text()
    assert settings_page(page) == page
    changed = page.replace("| `actor.optim.lr` | `1e-06` |", "| `actor.optim.lr` | `1` |").replace(
        "# Configuration", "# Keys"
    )
    assert changed != page and settings_page(changed) == page.replace("# Configuration", "# Keys")
    with pytest.raises(InputError, match="the page has no part 'settings'"):
        settings_page("nothing")


def test_the_schema_for_editors_knows_ranges_and_names():
    schema = json.loads((DOCS / "reference/configuration.schema.json").read_text())
    trainer, optim, algorithm = (schema["$defs"][f"{name}Config"] for name in ("Trainer", "Optimizer", "Algorithm"))
    iterations, beta = trainer["properties"]["iterations"], optim["properties"]["beta1"]
    assert (iterations["minimum"], iterations["maximum"], iterations["type"]) == (0, 2**24, "integer")
    assert (beta["minimum"], beta["exclusiveMaximum"]) == (0, 1) and not trainer["additionalProperties"]
    assert True in algorithm["properties"]["whiten_advantages"]["enum"]
    for example in (ROOT / "examples").glob("*.yaml"):
        reference = re.match(r"# yaml-language-server: \$schema=(.+)\n", example.read_text())
        assert reference and (example.parent / reference[1]).exists(), example


@pytest.mark.parametrize("page", ["../README.md", *PAGES])
def test_links_and_named_files_exist(page):
    text = (DOCS / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("http") or ((DOCS / page).parent / target).exists(), (
            f"{page} links to {target}, which is not there"
        )
    for path in re.findall(r"`((?:rlhfuse|tools|scripts|tests|examples)/[\w/.-]*\w)`", text):
        assert (ROOT / path).exists(), f"{page} names {path}, which is not there"
    for module in re.findall(r"`((?:schedule|simulator|models|parallel|gen|ppo|fusion|monitor|data)/\w+\.py)`", text):
        assert (ROOT / "rlhfuse" / module).exists(), f"{page} names {module}, which is not there"


def test_the_site_is_built_without_a_warning(tmp_path):
    """mkdocs counts warnings and gives up after them: mkdocs.yml says strict."""
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site")))
    assert (tmp_path / "site/results/generation/index.html").exists()


@pytest.mark.parametrize("page", ["../README.md", *(page for page in PAGES if page not in GENERATED)])
def test_a_page_is_no_longer_than_one_reads_at_a_sitting(page):
    words = len((DOCS / page).read_text().split())
    assert words <= MOST_WORDS.get(page, 1_200), f"{page} has {words} words"
