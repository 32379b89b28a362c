"""Pages follow the code: generated ones are as made, links and named files are there."""

import ast
import json
import re

import pytest
from generate_docs import differing, settings_page
from mkdocs.commands.build import build
from mkdocs.config import load_config
from testkit.paths import ROOT

from rlhfuse.base.errors import InputError

DOCS = ROOT / "docs"
GENERATED = ("reference/configuration.md", *(f"results/{file.name}" for file in DOCS.glob("results/*.md")))
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
FOLDERS = "rlhfuse", "tools", "benchmarks", "examples", "tests", "docs"
CODE = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
MADE_UP = {"FILE.py", "tools/NAME.py", "my_reward.py"}  # a reader's own file in a docstring


def test_generated_pages_are_as_the_code_makes_them():
    assert not differing(), "run docs/make/generate_docs.py"


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
    assert words <= 1_200, f"{page} has {words} words"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_what_it_is_for(page):
    """A sentence stands right under the title, before any list, table, code or further heading."""
    title, first = paragraphs((DOCS / page).read_text())[:2]
    assert title.startswith("# ") and re.match(r"[`*\w]", first) and re.search(r"[.:]( |$)", first), f"{page}: {first}"


def paragraphs(text: str) -> list[str]:
    """Blocks between empty lines, those of fenced code left out; items of a list are blocks of their own."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\n(?=[*-] |\d+\. )", prose)
    return [" ".join(block.split()) for block in blocks if block.strip()]


def docstrings(text: str) -> list[str]:
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, nodes))
    return [docstring for docstring in found if docstring]


def opens_with_of(text: str) -> bool:
    return re.match(r"(?:[*-] |\d+\. )?[*_`(]*Of\b", text) is not None


def test_no_paragraph_and_no_docstring_opens_with_of():
    """One that does says of what before it says what."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(DOCS / page for page in PAGES)]
    texts = [(page, text) for page in pages for text in paragraphs(page.read_text())]
    texts += [(file, text) for file in CODE for text in docstrings(file.read_text())]
    found = [f"{file.relative_to(ROOT)}: {text[:60]}" for file, text in texts if opens_with_of(text)]
    assert len(texts) > 2_000 and not found, "\n".join(found)
    assert opens_with_of("Of a draft; all seconds.") and opens_with_of("* **Of** it") and not opens_with_of("Offers")
    assert paragraphs("a\nb\n\n```\nOf\n```\n* Of c\n* d") == ["a b", "* Of c", "* d"]


def test_pages_and_files_that_code_names_exist():
    """Pages anywhere in the code, in help and comments too; Python files in docstrings, by the end of their path."""
    files = [str(file) for file in (*CODE, *(ROOT / "tests").rglob("*.py"))]
    missing = []
    for file in CODE:
        text = file.read_text()
        gone = [page for page in re.findall(r"\bdocs/[\w/]+\.md\b", text) if not (ROOT / page).exists()]
        named = {name for docstring in docstrings(text) for name in re.findall(r"[\w/]+\.py\b", docstring)} - MADE_UP
        gone += [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in files)]
        missing += [f"{file.relative_to(ROOT)} names {name}, which is not there" for name in gone]
    assert not missing, "\n".join(missing)


def rows(page: str, heading: str = "") -> list[list[str]]:
    """Cells of the rows of a page's tables below a heading, the head of each table left out."""
    section = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2] if heading else (DOCS / page).read_text()
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_reading_path_is_fifteen_files_that_one_can_read():
    path = [(cells[0].strip("`"), int(cells[1]), cells[2]) for cells in rows("explanation/design.md", "A reading path")]
    lines = {file: len((ROOT / file).read_text().splitlines()) for file, _, _ in path}
    assert len(lines) == len(path) == 15
    assert sum(lines.values()) <= 3_500, f"the reading path has {sum(lines.values())} lines"
    for file, told, what in path:
        assert abs(told - lines[file]) <= max(5, lines[file] // 10), f"{file} has {lines[file]} lines, not {told}"
        assert what.endswith("."), f"{file}: say in a sentence what to see there"


def test_the_glossary_is_short():
    words = [cells[0] for cells in rows("explanation/glossary.md")]
    assert 20 <= len(words) == len(set(words)) <= 40


def test_the_page_on_how_to_add_names_the_files_of_each_part():
    sections = (DOCS / "howto/extend.md").read_text().split("\n## ")[1:]
    assert [section.partition("\n")[0] for section in sections] == [
        "A reward",
        "A loss",
        "An algorithm",
        "An attention backend",
        "A schedule rule",
        "A role",
    ]
    for section in sections:
        assert len(set(re.findall(r"`((?:rlhfuse|tests|docs|tools)/[\w/]+\.\w+)`", section))) >= 4, section[:30]
