"""The published recipes of examples/recipes: each is planned, and trains a little on two ranks."""

import math
import re

import pytest
from testkit.paths import ROOT
from testkit.programs import call_tool
from testkit.runs_table import in_the_checkout, metrics_of

from rlhfuse.config.load import load_config
from rlhfuse.config.rules import idle_settings

RECIPES = sorted((ROOT / "examples/recipes").glob("*.yaml"))
SHORT = "trainer.iterations=3 rollout.prompts_per_iteration=4 rollout.samples_per_prompt=4 trainer.export=false"
SEARCH = "fusion.search_seconds=0.2"


def test_the_page_has_a_row_for_every_file():
    page = (ROOT / "docs/reference/recipes.md").read_text()
    table = page.partition("## Published recipes")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"`(\w+\.yaml)`", table)) == [file.name for file in RECIPES]
    for file in RECIPES:
        text = file.read_text()
        schema = re.match(r"# yaml-language-server: \$schema=(.+)\n", text)
        assert schema and (file.parent / schema[1]).exists()
        assert f"--config examples/recipes/{file.name}\n" in text


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_is_planned_and_every_setting_of_it_has_an_effect(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert not idle_settings(load_config(file))
    done = call_tool("train_ppo", "--config", file, "--dry-run", SEARCH)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_trains(runs, file):
    name = f"recipe {file.stem}"
    runs.start(name, SHORT, SEARCH, config=file, watch=in_the_checkout)
    rows = metrics_of(runs.folder / name)
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    assert all(row["actor/grad_norm"] > 0 for row in rows)
