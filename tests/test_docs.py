"""The pages that must follow the code: every setting stands in docs/reference/configuration.md with its default."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfuse.config.settings import RunConfig

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GENERATED = ("reference/configuration.md", "results.md")


def shown(default: object) -> str:
    return "[]" if default == () else str(default).lower() if isinstance(default, bool) else str(default) or "(empty)"


def test_every_setting_is_documented_with_its_default():
    rows = re.findall(
        r"^\| `([\w.]+)` \| `(.*?)` \| (.+) \|$", (DOCS / "reference/configuration.md").read_text(), re.MULTILINE
    )
    page = {key: default for key, default, _ in rows}
    known = {key: shown(default) for key, default, _ in RunConfig().leaves()}
    assert len(rows) == len(page), "a key stands twice in docs/reference/configuration.md"
    assert page == known, "docs/reference/configuration.md differs from rlhfuse/config/settings.py"
    assert all(help_.strip() for _, _, help_ in rows)


@pytest.mark.parametrize("page", sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")))
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
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr


def test_there_is_no_more_to_read_than_a_day_allows():
    pages = [page for page in DOCS.rglob("*.md") if str(page.relative_to(DOCS)) not in GENERATED]
    assert sum(len(page.read_text().split()) for page in pages) <= 15_000
