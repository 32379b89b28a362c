"""What a run checks of its tools before it starts: one line that names file, tool or row, exit code 2."""

import json

import pytest
from testkit.paths import ROOT
from testkit.programs import call_tool
from testkit.tool_run import TOOLS, write_tool_run

from rlhfuse.base.errors import InputError
from rlhfuse.config.load import load_config
from rlhfuse.run.preflight import check_inputs

BROKEN = {
    "twice": TOOLS + "\nother = count\n",
    "open": "class World:\n    def __init__(self):\n        self.file = (i for i in ())\n\n    def look(self) -> str:\n"
    '        """Looks."""\n        return ""\n',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tools")
    write_tool_run(made)
    for name, text in BROKEN.items():
        (made / f"{name}.py").write_text(text)
    row = json.loads((made / "prompts.jsonl").read_text().splitlines()[0])
    (made / "texts.jsonl").write_text(json.dumps(row | {"prompt": "w3 w4"}) + "\n")
    return made


def checked(folder, *settings):
    given = [setting.replace("{folder}", str(folder)) for setting in settings]
    return check_inputs(load_config(folder / "run.yaml", given), 2)


def test_prompts_are_rendered_with_tools_and_turns_can_be_read(folder):
    inputs = checked(folder)
    assert inputs.tools and inputs.tools.turns.ends == {2}
    assert checked(folder, "rollout.multi_turn.enable=false").tools is None
    one, other = (checked(folder, f"rollout.multi_turn.function_tool_path={{folder}}/{name}") for name in TWO)
    key = "rollout.multi_turn.function_tool_path"
    assert one.facts.contents[key] != other.facts.contents[key]


TWO = ("tools.py", "world.py:World")


@pytest.mark.parametrize(
    "settings, message",
    [
        ("function_tool_path={folder}/nowhere.py", "file .*nowhere.py does not exist"),
        ("function_tool_path={folder}/twice.py", "count and other are both named count; rename one"),
        ("function_tool_path={folder}/open.py:World", "prompts.jsonl:1: its state cannot be pickled"),
        ("replay={folder}/actor", "rollout.multi_turn.replay=.*actor has no tool_calls"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(folder, settings, message):
    with pytest.raises(InputError, match=message) as caught:
        checked(folder, f"rollout.multi_turn.{settings}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            "data.train_files=[{folder}/texts.jsonl]",
            "texts.jsonl:1: a text prompt does not tell the model of its tools",
        ),
        ("rollout.ignore_eos=true rollout.stop_token_ids=[5]", "a turn with calls ends with no token that ends a resp"),
        ("reward.function=get_reward", "reward.function=get_reward: .*tools.py is no class with get_reward"),
    ],
)
def test_runs_that_have_no_use_for_tools_are_refused(folder, settings, message):
    with pytest.raises(InputError, match=message):
        checked(folder, *settings.split())


@pytest.mark.parametrize("signature", ["auto", "trl"])
def test_the_environment_of_the_guide_trains_by_a_relative_path(folder, tmp_path, monkeypatch, signature):
    """Its reward is tried as every other, and called for one sample whatever the signature of functions is."""
    text = (ROOT / "docs" / "howto" / "tools.md").read_text()
    (tmp_path / "shelf.py").write_text(text[text.index("class Shelf:") :].partition("```")[0])
    row = json.loads((folder / "prompts.jsonl").read_text().splitlines()[0])
    (tmp_path / "books.jsonl").write_text((json.dumps(row | {"books": ["w3"]}) + "\n") * 8)
    monkeypatch.chdir(tmp_path)
    given = ("rollout.multi_turn.function_tool_path=shelf.py:Shelf", "reward.function=get_reward")
    given += ("data.train_files=[books.jsonl]", f"reward.signature={signature}")
    done = call_tool("train_ppo", "--dry-run", "--config", folder / "run.yaml", *given)
    assert done.returncode == 0, done.stderr
    assert "reward.function=get_reward: tried on books.jsonl:1, 2 texts, from all to none: 0 to 0" in done.stdout
    assert ("reward.signature=trl (get_reward" in done.stdout) == (signature == "trl")
