"""A run goes on with the files it began with, wherever they lie now; with others it does not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from testkit.tiny import change_json, write_checkpoint, write_run

from rlhfuse.base.errors import InputError
from rlhfuse.config.load import load_config
from rlhfuse.run.checkpoint.checkpoint import Manifest, RunState, _digest
from rlhfuse.run.checkpoint.compatibility import RunCompatibility
from rlhfuse.run.checkpoint.shard_files import FileFacts
from rlhfuse.run.preflight import check_inputs

FILES = (FileFacts("rank-0.safetensors", 5, "ab"),)
REWARD = "def score(completions, **rest):\n    return [{} for _ in completions]\n"


def facts_of(folder: Path, *settings: str) -> RunCompatibility:
    given = [f"reward.function={folder}/score.py:score", *settings]
    return check_inputs(load_config(folder / "run.yaml", given), 2).facts


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


def test_each_function_of_a_list_is_compared(whole, moved):
    both = f"reward.function=[{whole[0]}/score.py:score,{moved}/score.py:score]"
    before = facts_of(whole[0], both)
    facts_of(whole[0], both).check(before, "c")
    (moved / "score.py").write_text(REWARD.format(2.0))
    with pytest.raises(InputError, match="other contents of reward.function"):
        facts_of(whole[0], both).check(before, "c")


def test_what_the_device_decides_compares_with_what_was_given(whole):
    folder, facts = whole
    facts_of(folder, "trainer.dtype=float32", "rollout.block_tokens=16").check(facts, "c")
    assert facts.settings["trainer.dtype"] == "float32" and facts.settings["rollout.block_tokens"] == 16
    with pytest.raises(InputError, match="saved with trainer.dtype=bfloat16, this run has float32; set trainer.dtype"):
        facts.check(facts_of(folder, "trainer.dtype=bfloat16"), "c")


CHANGES = {
    "data.train_files": lambda to: (to / "prompts.jsonl").write_text('{"prompt": "w1 w2"}\n' * 12),
    "reward.function": lambda to: (to / "score.py").write_text(REWARD.format(2.0)),
    "reward.path": lambda to: write_checkpoint(to / "reward", scalar_head=True, seed=3),  # of the same shape and size
    "actor.tokenizer": lambda to: change_json(to / "actor/tokenizer_config.json", chat_template="{{ messages }}"),
}


@pytest.mark.parametrize("key", CHANGES)
def test_files_may_not_change(whole, moved, key):
    CHANGES[key](moved)
    with pytest.raises(InputError) as caught:
        facts_of(moved).check(whole[1], "c")
    value = str(whole[1].settings[key])
    named = key if key != "reward.path" else "critic.path"  # which has the same folder
    assert str(caught.value).startswith(f"c was saved with other contents of {named} ({value}); bring them back")


def test_a_checkpoint_that_knows_no_contents_compares_names(whole, moved):
    raw = json.loads(Manifest(1, whole[1], RunState({}, {}, {"metrics_bytes": 0}), FILES).to_text())
    assert Manifest.parse(json.dumps(raw), "m").facts == whole[1]
    del raw["facts"]["contents"]
    before = Manifest.parse(json.dumps(raw | {"digest": _digest(raw)}), "m").facts
    whole[1].check(before, "c")
    with pytest.raises(InputError, match="c was saved with actor.path="):
        facts_of(moved).check(before, "c")


def test_a_run_that_leaves_its_choices_open_goes_on_from_one_that_gave_them(moved):
    """What was chosen is compared, and only what changes a number here: former defaults were 512 and verl."""
    file = moved / "run.yaml"
    raw = yaml.safe_load(file.read_text()) | {"algorithm": {}, "fusion": {"search_seconds": 0.2}}
    del raw["data"]["max_prompt_tokens"], raw["reward"]["signature"]
    file.write_text(yaml.safe_dump(raw))
    now = facts_of(moved)
    numbers = {"reward.signature": "trl", "data.max_prompt_tokens": 6, "algorithm.minibatches": 4}
    assert {key: now.settings[key] for key in numbers} == numbers
    assert now.layouts["fusion.actor_microbatches"] == "auto" and int(now.layouts["fusion.microbatch_tokens"]) > 0
    was = now.settings | {"data.max_prompt_tokens": 512}
    now.check(replace(now, settings=was), "c")
    filtering = {"data.filter_long_prompts": True}  # then max_prompt_tokens says which prompts
    for both, key, value in (
        ({}, "reward.signature", "verl"),
        ({}, "algorithm.minibatches", 2),
        (filtering, "data.max_prompt_tokens", 512),
    ):
        here = replace(now, settings=now.settings | both)
        with pytest.raises(InputError, match=f"c was saved with {key}={value}, this run has {now.settings[key]}"):
            here.check(replace(here, settings=was | both | {key: value}), "c")
    alone = check_inputs(load_config(file), 2).facts  # without a function
    assert alone.settings["reward.signature"] == "auto"
    alone.check(replace(alone, settings=alone.settings | {"reward.signature": "verl"}), "c")
