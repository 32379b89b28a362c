"""The pages that must follow the code: every setting stands in docs/configuration.md with its default."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from rlhfuse.config.settings import RunConfig

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def settings(value: object, prefix: str = "") -> dict[str, object]:
    """Dotted key -> default of everything below a configuration."""
    found: dict[str, object] = {}
    for field in fields(value):
        default = getattr(value, field.name)
        key = f"{prefix}{field.name}"
        found |= settings(default, f"{key}.") if is_dataclass(default) else {key: default}
    return found


def shown(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default) or "(empty)"


def test_every_setting_is_documented_with_its_default():
    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \| (.+) \|$", (DOCS / "configuration.md").read_text(), re.MULTILINE)
    page = {key: default for key, default, _ in rows}
    known = {key: shown(default) for key, default in settings(RunConfig()).items()}
    assert len(rows) == len(page), "a key stands twice in docs/configuration.md"
    assert page == known, "docs/configuration.md differs from rlhfuse/config/settings.py"
    assert all(help_.strip() for _, _, help_ in rows)


@pytest.mark.parametrize("page", sorted(p.name for p in DOCS.glob("*.md")))
def test_links_and_named_files_exist(page):
    text = (DOCS / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("http") or (DOCS / target).exists(), f"{page} links to {target}, which is not there"
    for path in re.findall(r"`((?:rlhfuse|tools|scripts|tests|examples)/[\w/.-]*\w)`", text):
        assert (ROOT / path).exists(), f"{page} names {path}, which is not there"
    for module in re.findall(r"`((?:schedule|simulator|models|parallel|gen|ppo|fusion|monitor|data)/\w+\.py)`", text):
        assert (ROOT / "rlhfuse" / module).exists(), f"{page} names {module}, which is not there"
