"""Bad input gets one line that names the value and the fix, before anything is launched."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from run_check import dry_run
from safetensors.torch import load_file, save_file
from testkit.four_ranks import drafted
from testkit.programs import call_tool
from testkit.tiny import change_json, write_checkpoint, write_run, write_tokenizer
from testkit.training_pair import unit_problem

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.load import load_config, read_specs
from rlhfuse.config.settings import DataConfig, RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.data.prompts import load_prompts
from rlhfuse.models.tokenizer import load_tokenizer
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.run.preflight import check_inputs, encoder
from rlhfuse.schedule.io import save_schedule
from rlhfuse.schedule.rules.builders import serial_1f1b

ROLES = ("actor", "critic", "reference", "reward")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(good, tmp_path):
    """A copy of the good run that a test may damage."""
    shutil.copytree(good.parent, tmp_path / "copy")
    file = tmp_path / "copy" / "run.yaml"
    file.write_text(file.read_text().replace(str(good.parent), str(tmp_path / "copy")))
    return tmp_path / "copy"


def refused(folder: Path, *overrides: str, world: int = 2) -> str:
    with pytest.raises(InputError) as caught:
        check_inputs(load_config(folder / "run.yaml", overrides), world)
    return str(caught.value)


def test_a_good_run_is_accepted(good):
    inputs = check_inputs(load_config(good), 2)
    assert len(inputs.prompts) == 12 and inputs.world_size == 2
    assert inputs.prompts[0].tokens[0] == 1  # the tokenizer's own beginning-of-text token


def test_the_dry_run_prints_the_plan_that_the_planner_makes(good, capsys):
    settings = ["fusion.intra_stage=false", "trainer.device=cpu"]  # nothing is searched, so nothing depends on time
    assert dry_run(load_config(good, settings), 2) == 0
    config, out = load_config(good, settings), capsys.readouterr().out
    assert out.endswith(PlanReport.of(make_plan(drafted(config, read_specs(config), 2))).render() + "\n")
    told = "warning: without effect here: fusion.search_seconds=0.2 (fusion.intra_stage is not search)"
    assert out.splitlines().count(told) == 1


def add_bias(file: Path) -> None:
    weights = load_file(file)
    save_file(weights | {"model.layers.1.mlp.up_proj.bias": weights["model.norm.weight"].clone()}, file)


def replace_line(file: Path, number: int, text: str) -> None:
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:number], text, *lines[number + 1 :]]) + "\n")


CONFIG, WEIGHTS = "actor/config.json", "actor/model.safetensors"
DAMAGED: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no checkpoint": (lambda to: shutil.rmtree(to / "reward"), ("reward", "folder")),
    "half of one": (lambda to: os.truncate(to / WEIGHTS, 100), ("half-written", WEIGHTS)),
    "no weights": (lambda to: (to / WEIGHTS).unlink(), ("model.safetensors is missing",)),
    "another shape than its config": (lambda to: change_json(to / CONFIG, intermediate_size=128), ("gate_proj",)),
    "a part that nothing reads": (
        lambda to: add_bias(to / WEIGHTS),
        ("nothing reads the tensor model.layers.1.mlp.up",),
    ),
    "a part that is not implemented": (
        lambda to: change_json(to / CONFIG, partial_rotary_factor=0.5),
        ("actor/config.json: partial_rotary_factor=0.5 is not supported; only 1 is",),
    ),
    "a window that is too narrow": (
        lambda to: change_json(to / CONFIG, model_type="mistral", architectures=None, sliding_window=30),
        ("= 40 > sliding_window(30) of actor; lower one of them",),
    ),
    "no scalar head": (lambda to: write_checkpoint(to / "reward", seed=2), ("cannot be reward.path", "RewardTrainer")),
    "a tokenizer that does not fit": (lambda to: write_tokenizer(to / "actor", words=300), ("302", "200")),
    "no tokenizer": (lambda to: (to / "actor/tokenizer.json").unlink(), ("actor.tokenizer",)),
    "a malformed prompt": (lambda to: replace_line(to / "prompts.jsonl", 3, "{not json"), ("prompts.jsonl:4",)),
    "no prompts": (lambda to: (to / "prompts.jsonl").write_text(""), ("no rows",)),
    "a run in its folder": (
        lambda to: shutil.copytree(to / "actor", to / "run/checkpoints/iteration-1"),
        ("holds a run",),
    ),
}


@pytest.mark.parametrize("damage, words", DAMAGED.values(), ids=DAMAGED)
def test_what_is_damaged_is_named(folder, damage, words):
    damage(folder)
    said = refused(folder)
    assert all(word in said for word in words), said


def test_a_reward_model_without_tokenizer_is_refused_by_a_run_and_named_by_a_dry_one(folder, capsys):
    (folder / "reward" / "tokenizer.json").unlink()
    assert "reward has no tokenizer files to hold against the actor's; copy them there" in refused(folder)
    settings = ["fusion.intra_stage=false", "trainer.device=cpu"]  # nothing is searched
    assert dry_run(load_config(folder / "run.yaml", settings), 2) == 0
    said = capsys.readouterr().out
    assert said.count("are compared by the size of their vocabularies alone, 200 each; a run needs the files\n") == 1
    assert "a response ends at token 2, after 24 tokens" in said


def test_end_tokens_of_the_tokenizer_are_in_force_where_the_models_files_name_none(folder, capsys):
    change_json(folder / CONFIG, eos_token_id=None)
    inputs = check_inputs(load_config(folder / "run.yaml"), 2)
    assert inputs.models.specs["actor"].eos_token_ids == (2,)
    change_json(folder / "actor" / "tokenizer_config.json", eos_token=None)
    assert "names an end token: set rollout.stop_token_ids" in refused(folder)
    assert check_inputs(load_config(folder / "run.yaml", ["rollout.ignore_eos=true"]), 2)


@pytest.mark.parametrize(
    "override,words",
    [
        ("parallel.actor_train=d1t1p4", "dp(1) * tp(1) * pp(4) = 4 != world_size(2)"),
        ("parallel.generation=d2t1p1@0-1", ""),
        ("rollout.max_response_tokens=1000", "context(256)"),
        ("rollout.min_tokens=25", "rollout.min_tokens=25 > rollout.max_response_tokens=24; lower it"),
        ("rollout.stop_token_ids=[4,200]", "rollout.stop_token_ids=[4, 200]: 200 is not an id in [0, 200)"),
        ("rollout.stop=[a,'']", "rollout.stop holds an empty text, which would end every response; remove it"),
        ("algorithm.minibatches=3", "16 % 3 = 1"),
        ("algorithm.minibatches=16", "micro-batches"),
        ("data.max_prompt_tokens=2", "prompts.jsonl:1"),
        ("fusion.schedule=/nowhere/schedule.json", "/nowhere/schedule.json"),
        ("data.train_files=[/nowhere/p.jsonl]", "/nowhere/p.jsonl does not exist; check data.train_files"),
        ("trainer.hardware=abacus", "trainer.hardware: hardware 'abacus' is not known; use auto, measured:FILE or one"),
        ("fusion.profile=/nowhere/costs.json", "/nowhere/costs.json does not exist"),
        ("fusion.threshold_file=/nowhere/t.json", "/nowhere/t.json"),
        ("actor.tokenizer=/nowhere", "actor.tokenizer=/nowhere is no folder"),
        ("reward.path=/nowhere", "reward.path=/nowhere is no folder"),  # the critic's default: the key that was set
        ("trainer.resume=/nowhere", "/nowhere is no whole checkpoint; set trainer.resume"),
        ("rollout.kv_blocks_per_instance=1", "use at least 3"),
        ("trainer.memory_limit_gb=0.6", "but a rank of this cpu has 572 MiB"),
        ("data.prompt_key=''", "no key ''; found 'prompt': set data.prompt_key"),
    ],
)
def test_settings_that_cannot_work(good, override, words):
    if not words:  # a row that names all ranks is the default written out
        check_inputs(load_config(good, [override]), 2)
        return
    assert words in refused(good.parent, override)


def test_a_reward_function_is_held_against_every_row(folder):
    (folder / "mine.py").write_text("def score(data_source, solution_str, ground_truth, extra_info): return 1.0\n")
    function = f"reward.function={folder}/mine.py:score"
    assert f"{folder}/prompts.jsonl:1: no key 'data_source'" in refused(folder, function)
    row = {"prompt": "w1", "data_source": "x", "reward_model": {"ground_truth": 1}}
    lines = [json.dumps(row), json.dumps(row | {"reward_model": {}})]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    assert f"{folder}/prompts.jsonl:2: reward_model is '{{}}'; it needs a ground_truth" in refused(folder, function)
    (folder / "prompts.jsonl").write_text(lines[0] + "\n")
    assert set(check_inputs(load_config(folder / "run.yaml", [function]), 2).models.specs) == set(ROLES)
    assert "mine.py has no function other" in refused(folder, f"reward.function={folder}/mine.py:other")


def test_only_the_models_of_the_run_are_looked_for(folder):
    shutil.rmtree(folder / "reward")
    (folder / "mine.py").write_text("def score(completions): return [1.0]\n")
    settings = [f"reward.function={folder}/mine.py:score", "reward.signature=trl", "reward.path=''"]
    settings += ["algorithm.name=grpo", "reference.path=none", "algorithm.kl_coef=0"]
    inputs = check_inputs(load_config(folder / "run.yaml", settings), 2)
    assert set(inputs.models.specs) == {"actor"} and list(inputs.plan.ranks.shape.layouts) == ["actor"]
    assert "critic" not in inputs.plan.summary and inputs.plan.iteration_seconds > 0


def test_a_schedule_for_other_layouts(good, tmp_path):
    layouts = {"actor": ParallelLayout(1, 1, 4), "critic": ParallelLayout(2, 1, 2)}
    save_schedule(tmp_path / "other.json", serial_1f1b(unit_problem(layouts, 4)))
    assert "other.json" in refused(good.parent, f"fusion.schedule={tmp_path / 'other.json'}")


def test_the_program_exits_with_2_and_one_line(good):
    done = call_tool("train_ppo", "--config", good, "--dry-run", "data.max_prompt_tokens=2")
    assert done.returncode == 2 and done.stdout == ""
    said = f"{good.parent}/prompts.jsonl:1: the prompt has 3 tokens, more than data.max_prompt_tokens=2"
    assert done.stderr == f"error: {said}; raise it, or set data.filter_long_prompts=true to drop such rows\n"


# how prompts become tokens

TEMPLATE = (
    "{% for turn in messages %}{% if turn.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "{{ 'w1 ' if turn.role == 'user' else 'w2 ' }}{{ turn.content }} {% endfor %}"
    "{% if add_generation_prompt %}w2{{ tail }}{% endif %}"
)
USER = {"role": "user", "content": "w5 w6"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """(without a chat template, with one); word i has id i + 3, <s> is 1."""
    folders = [tmp_path_factory.mktemp(name) for name in ("plain", "chat")]
    for folder, template in zip(folders, ({}, {"chat_template": TEMPLATE})):
        write_tokenizer(write_checkpoint(folder), **template)
    return [load_tokenizer(folder, ModelSpec.from_config(folder)) for folder in folders]


def encode(tokenizer, prompt, **data):
    return encoder(tokenizer, RunConfig(data=DataConfig(**data)))(prompt)


@pytest.mark.parametrize(
    "add_bos, ids", [("auto", [1, 8, 9]), ("true", [1, 8, 9]), ("false", [8, 9]), ("True", [1, 8, 9])]
)
def test_text(tokenizers, add_bos, ids):
    assert encode(tokenizers[0], "w5 w6", add_bos=add_bos) == ids


def test_chat_turns_go_through_the_template(tokenizers):
    plain, chat = tokenizers
    asked = [4, 8, 9, 5]  # w1 w5 w6 w2: the turn, and the begin of the answer
    found = encode(chat, [USER])
    assert found[-4:] == asked and found == encode(chat, "w5 w6", apply_chat_template=True)
    assert encode(chat, "w5 w6") == [1, 8, 9]
    assert encode(chat, [USER], chat_template_kwargs={"tail": " w7"}) == [*found, 10]
    for prompt, data in (([USER], {}), ("w5 w6", {"apply_chat_template": True})):
        with pytest.raises(InputError, match="the tokenizer has no chat template; use text prompts"):
            encode(plain, prompt, **data)


def test_what_the_template_refuses_is_named_by_its_row(tokenizers, tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": [USER]}, {"prompt": [{"role": "system", "content": "w1"}]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=f"{file}:2: the tokenizer's chat template refuses the turns .no system turn."):
        load_prompts([file], "prompt", encoder(tokenizers[1], RunConfig()), 16)


def test_a_first_token_that_the_tokenizer_has_not(tokenizers):
    without = Mock(return_value={"input_ids": [3]}, bos_token_id=None)
    with pytest.raises(InputError, match="data.add_bos=true, but the tokenizer has no beginning-of-text token"):
        encode(without, "w5", add_bos="true")
