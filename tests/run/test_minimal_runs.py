"""First runs of a new user: an actor, a reward and a few prompts, and nothing that can be found out.

Twenty are checked and planned, four of them run to the end, started as their number of ranks asks for.
"""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from run_check import dry_run
from testkit.paths import ROOT, shared_data
from testkit.programs import call_tool
from testkit.runs_table import metrics_of
from transformers import AutoTokenizer

from rlhfuse.base.errors import InputError
from rlhfuse.config.load import dump_config, load_config
from rlhfuse.run.preflight import check_inputs

TINY = ROOT / "examples/tiny"
REWARDS = """
def short(prompts, completions, **columns):
    return [-0.01 * len(text) for text in completions]

def exact(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
"""
D1, D2, D4 = "d1t1p1", "d2t1p1", "d4t1p1"
# name: (algorithm, model, reward, prompts in the file, prompts_per_iteration, samples_per_prompt,
#        layouts of actor_train, critic_train, generation, mini-batches that are chosen)
TABLE = {
    "defaults": ("ppo", "tiny", "short", 4, None, None, (D1, D1, D1), 4),
    "one sample": ("ppo", "tiny", "reward", 1, 1, 1, (D1, D1, D1), 1),
    "three prompts": ("grpo", "tiny", "exact", 3, 3, 4, (D1, "", D1), 3),
    "rloo": ("rloo", "tiny", "exact", 5, 5, 2, (D1, "", D1), 2),
    "seven": ("rloo", "tiny", "short", 7, 7, 3, (D1, "", D1), 3),
    "sixty-four": ("grpo", "tiny", "short", 64, 64, 4, (D1, "", D1), 4),
    "stories grpo": ("grpo", "stories", "exact", 1, 1, 2, (D1, "", D1), 1),
    "pipeline": ("ppo", "tiny", "reward", 4, 4, 4, ("d1t1p2", D2, D2), 4),
    "tensor": ("grpo", "tiny", "exact", 16, 16, 2, ("d1t2p1", "", D2), 4),
    "four ranks": ("ppo", "tiny", "reward", 4, None, None, ("d1t1p4", "d2t1p2", D4), 4),
    "rloo on four": ("rloo", "tiny", "short", 3, 3, 3, ("d2t1p2", "", D4), 1),
}
TO_THE_END = ("one sample", "three prompts", "rloo", "pipeline", "defaults")
SLOW = ("three prompts", "rloo")


def words(count: int) -> str:
    return " ".join(["sun"] * (2 + count // 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    (folder := tmp_path_factory.mktemp("minimal") / "a b ü").mkdir()  # as somebody may have named it
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def write(folder: Path, name: str) -> tuple[Path, int]:
    """The YAML of one row, and its ranks."""
    algorithm, model, reward, count, prompts, copies, layouts, _ = TABLE[name]
    path = TINY / "actor" if model == "tiny" else shared_data("stories260K-hf")
    rows = [{"prompt": words(i), "data_source": "x", "reward_model": {"ground_truth": "sun"}} for i in range(count)]
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    functions = folder / "rewards.py"
    raw: dict = {
        "actor": {"path": str(path)},
        "reward": {"path": str(TINY / reward)} if reward == "reward" else {"function": f"{functions}:{reward}"},
        "data": {"train_files": [str(folder / f"{name}.jsonl")]},
    }
    if algorithm != "ppo":
        raw["algorithm"] = {"name": algorithm}
    if prompts:
        raw["rollout"] = {"prompts_per_iteration": prompts, "samples_per_prompt": copies}
    if layouts[-1] != D1:
        names = ("actor_train", "critic_train", "generation")
        raw["parallel"] = {task: layout for task, layout in zip(names, layouts) if layout}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(raw))
    return file, {D1: 1, D2: 2, D4: 4}[layouts[-1]]


@pytest.mark.parametrize("name", TABLE)
def test_it_is_planned_at_once_and_says_what_it_chose(folder, name, capsys):
    file, world = write(folder, name)
    assert dry_run(load_config(file, ["fusion.search_seconds=0.2", "trainer.device=cpu"]), world) == 0
    said = capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(load_config(file).actor.tokenizer)
    prompt = len(tokenizer(words(TABLE[name][3] - 1))["input_ids"])
    minibatches = TABLE[name][-1]
    assert f"\n  data.max_prompt_tokens = {prompt}: the longest prompt; at most context(512) of " in said
    assert f"\n  algorithm.minibatches = {minibatches} (4 where possible): they cut " in said
    assert "layouts of the search: microbatch_tokens=" in said and "the first with at most " in said
    signature = {"short": "trl", "exact": "verl"}.get(TABLE[name][2])
    assert ("\n  reward.signature = " in said) == bool(signature) and (not signature or f"= {signature}: by" in said)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in TO_THE_END])
def test_it_runs_to_the_end(programs, folder, name):
    file, world = write(folder, name)
    run = folder / f"{name} run"
    settings = [f"trainer.output_dir={run}", "trainer.iterations=1", "trainer.tensorboard=false"]
    settings += ["rollout.max_response_tokens=8", "fusion.search_seconds=0.2", "trainer.device=cpu"]
    if world > 1:
        said = programs.trained(file, *settings, ranks=world)
    else:
        done = programs.tool("train_ppo", "--config", file, *settings)
        assert done.returncode == 0, done.stderr
        said = done.stdout
    assert f"done: {run}\n" in said
    assert (run / "finished.json").exists() and len(metrics_of(run)) == 1
    # what was chosen is what the run's own record gives, so that it can be made again
    given, recorded = load_config(file, settings), load_config(run / "config.yaml", ["trainer.output_dir=''"])
    inputs = check_inputs(given.with_(trainer={"output_dir": ""}), world)
    assert inputs.config.with_(trainer={"device": "cpu"}) == recorded
    assert check_inputs(recorded, world).config == recorded


def test_more_ranks_than_one_are_told_their_command(folder):
    file, _ = write(folder, "pipeline")
    done = call_tool("train_ppo", "--config", file, "trainer.iterations=1")
    command = f"python tools/train_ppo.py --ranks 2 --config {shlex.quote(str(file))} trainer.iterations=1"
    told = f"error: this is a run of 2 ranks (parallel.actor_train): {command}\n"
    assert done.returncode == 2 and done.stderr == told


@pytest.mark.parametrize(
    "settings, message",
    [
        (["rollout.max_response_tokens=507"], "6 tokens, and with rollout.max_response_tokens(507) 513 > context(512)"),
        (["rollout.max_response_tokens=507"], "use rollout.max_response_tokens=506, or data.filter_long_prompts=true"),
        (["rollout.max_response_tokens=512", "data.filter_long_prompts=true"], "use rollout.max_response_tokens=506"),
        (["parallel.actor_train=d2t1p1", "data.train_files=[/none]"], "= 2 != world_size(1)"),  # before prompts
        (["rollout.prompts_per_iteration=1", "rollout.samples_per_prompt=1", "algorithm.minibatches=2"], "1 % 2 = 1"),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_what_would_do(folder, settings, message):
    file, _ = write(folder, "defaults")
    with pytest.raises(InputError) as caught:
        check_inputs(load_config(file, settings), 1)
    assert message in str(caught.value)


def test_long_prompts_are_dropped_where_that_is_asked_for(folder):
    file, _ = write(folder, "defaults")
    settings = ["rollout.max_response_tokens=507", "data.filter_long_prompts=true"]
    inputs = check_inputs(load_config(file, settings), 1)
    assert inputs.config.data.max_prompt_tokens == 5 and (len(inputs.prompts), inputs.prompts.dropped) == (2, 2)
    (folder / "recorded.yaml").write_text(dump_config(inputs.config))
    again = check_inputs(load_config(folder / "recorded.yaml"), 1)
    assert again.prompts == inputs.prompts and again.facts == inputs.facts
