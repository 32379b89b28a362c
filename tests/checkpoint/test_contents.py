"""A run goes on with the files it began with, wherever they lie now; with others it does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny import write_checkpoint, write_run

from rlhfuse.base.errors import InputError
from rlhfuse.checkpoint.checkpoint import Manifest, RunState
from rlhfuse.checkpoint.compatibility import RunCompatibility
from rlhfuse.config.load import load_config
from rlhfuse.run.preflight import check_inputs

REWARD = "def score(completions, **rest):\n    return [{} for _ in completions]\n"


def facts_of(folder: Path) -> RunCompatibility:
    return check_inputs(load_config(folder / "run.yaml", [f"reward.function={folder}/score.py:score"]), 2).facts


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contents") / "whole"
    file = write_run(folder, reward__signature="trl")
    (folder / "score.py").write_text(REWARD.format(1.0))
    return file.parent, facts_of(folder)


@pytest.fixture
def moved(whole, tmp_path):
    """A copy of all files in another place, which a test may change."""
    folder = tmp_path / "moved"
    shutil.copytree(whole[0], folder)
    (folder / "run.yaml").write_text((folder / "run.yaml").read_text().replace(str(whole[0]), str(folder)))
    return folder


def test_files_may_move(whole, moved):
    now = facts_of(moved)
    assert now.settings != whole[1].settings and now.contents == whole[1].contents
    now.check(whole[1], "c")


def change(folder: Path, key: str) -> None:
    if key == "data.train_files":
        with open(folder / "prompts.jsonl", "a") as file:
            file.write('{"prompt": "w1 w2"}\n')
    elif key == "reward.function":
        (folder / "score.py").write_text(REWARD.format(2.0))
    elif key == "reward.path":
        write_checkpoint(folder / "reward", scalar_head=True, seed=3)  # of the same shape and size
    else:
        file = folder / "actor" / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ messages }}"}))


@pytest.mark.parametrize("key", ["data.train_files", "reward.function", "reward.path", "actor.tokenizer"])
def test_files_may_not_change(whole, moved, key):
    change(moved, key)
    with pytest.raises(InputError) as caught:
        facts_of(moved).check(whole[1], "c")
    value = str(whole[1].settings[key])
    named = key if key != "reward.path" else "critic.path"  # which has the same folder
    assert str(caught.value).startswith(f"c was saved with other contents of {named} ({value}); bring them back")


def test_a_checkpoint_that_knows_no_contents_compares_names(whole, moved):
    raw = json.loads(Manifest(1, whole[1], RunState({}, {}, {}), ()).to_text())
    assert Manifest.parse(json.dumps(raw), "m").facts == whole[1]
    del raw["facts"]["contents"]
    before = Manifest.parse(json.dumps(raw), "m").facts
    whole[1].check(before, "c")
    with pytest.raises(InputError, match="c was saved with actor.path="):
        facts_of(moved).check(before, "c")
