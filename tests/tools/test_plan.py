"""tools/plan.py: exit codes, its two forms, and nothing on the way but one line of error."""

from __future__ import annotations

import json

import pytest
from testkit.programs import call_tool
from testkit.tiny import write_tokenizer

from rlhfuse.schedule.ir.problem import load_problem


def plan(run_yaml, *words: object, **variables: str):
    return call_tool("plan", "--config", run_yaml, *words, **variables)


def test_text_and_json(run_yaml):
    text = plan(run_yaml).stdout
    assert "plan for 4 ranks" in text and "64 samples per iteration" in text
    raw = plan(run_yaml, "--json", "rollout.samples_per_prompt=8")
    assert json.loads(raw.stdout)["batch"]["samples"] == 128


def test_models_of_config_json_alone_are_compared_by_size_in_one_line(run_yaml, tmp_path):
    other, text = tmp_path / "other", (tmp_path / "model/config.json").read_text()
    other.mkdir()
    (other / "config.json").write_text(text)
    done = plan(run_yaml, f"reward.path={other}", "fusion.intra_stage=false")
    assert done.returncode == 0 and "ends at the tokenizer's end token, as the model's files name none" in done.stdout
    line = "without tokenizer files actor and reward are compared by the size of their vocabularies alone, 512 each; "
    assert done.stderr.count(line + "a run needs the files\n") == 1
    (other / "config.json").write_text(text.replace("512", "448", 1))
    done = plan(run_yaml, f"reward.path={other}")
    assert done.returncode == 2 and "vocab(448) != vocab(512) of the actor" in done.stderr


def test_the_length_of_prompts_is_read_off_them(run_yaml, tmp_path):
    write_tokenizer(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1 w2"}\n{"prompt": "w1 w2 w3 w4"}\n')
    here = f"data.train_files=[{tmp_path}/prompts.jsonl]"
    done = plan(run_yaml, "--json", here, "data.max_prompt_tokens=auto", "fusion.intra_stage=false")
    found = json.loads(done.stdout)
    assert found["limits"]["max_prompt_tokens"] == 5 and "the longest prompt" in found["reasons"][0]


def test_layouts_that_are_auto_are_searched_and_told(run_yaml, tmp_path):
    words = ("--json", "fusion.intra_stage=false", "parallel=auto", "--world-size", "4")
    done = plan(run_yaml, *words, "fusion.actor_microbatches=auto")
    found = json.loads(done.stdout)
    layouts = {task["name"]: task["layout"] for task in found["tasks"]}
    chosen = next(line for line in done.stderr.splitlines() if line.startswith("layouts of the search: "))
    assert f"generation={layouts['generation']} " in chosen and f"actor_train={layouts['actor_train']} " in chosen
    assert f"actor_microbatches={found['batch']['actor_microbatches']}" in chosen
    assert not any("actor_microbatches = " in reason for reason in found["reasons"]), "not by the rule"
    assert any(reason.startswith("lengths are assumed: responses lognormal") for reason in found["reasons"])
    (tmp_path / "past.csv").write_text("output_tokens\n3\n40\n")
    done = plan(run_yaml, *words, "--lengths", f"{tmp_path}/past.csv")
    assert f"2 samples of parallel.lengths={tmp_path}/past.csv" in done.stdout


@pytest.mark.parametrize(
    "words, environment, message",
    [
        ("--world-size 8", {}, "dp(4) * tp(1) * pp(1) = 4 != world_size(8)"),
        ("", {"WORLD_SIZE": "2"}, "!= world_size(2)"),
        ("", {"WORLD_SIZE": "many"}, "WORLD_SIZE='many' is no number"),
        ("parallel.generatoin=d4t1p1", {}, "unknown key parallel.generatoin; did you mean parallel.generation?"),
        ("actor.path=/none", {}, "/none/config.json is missing"),
        ("trainer.hardware=b200", {}, "hardware 'b200' is not known"),
        ("--lengths none.csv", {}, "none.csv does not exist"),
        ("parallel=auto", {}, "parallel.actor_train=auto: the number of ranks is not known; start under torchrun"),
        ("parallel=auto parallel.generation=d2t1p1 --world-size 4", {}, "parallel.generation=d2t1p1: dp(2)"),
        ("data.max_prompt_tokens=auto", {}, "has no tokenizer files; set actor.tokenizer to a folder that has them"),
        ("data.max_prompt_tokens=auto", {}, "=auto is read off the prompts: "),
        ("--problem /none/problem.json", {}, "cannot write /none/problem.json"),
        # a search's options, and what does not go together
        ("--top 3", {}, "--top is of a search; add --search"),
        ("--best best.yaml", {}, "--best is of a search; add --search"),
        ("--search --problem problem.json", {}, "--problem is of one plan, --search of many"),
        ("--thorough", {}, "--thorough is of a search; add --search"),
        ("--world-sizes 2,4", {}, "--world-sizes is of a search; add --search"),
        ("--search --world-sizes 2,4 --best a.yaml", {}, "--best is of one number of ranks; leave"),
        ("--search --world-sizes 2 --world-size 2", {}, "--world-size and --world-sizes are given"),
        ("--search --world-sizes 2,0", {}, "--world-sizes: 0 ranks run nothing; give 1"),
        ("--search --top 0", {}, "--top 0 shows nothing; give 1 or more"),
        ("--search --best /none/best.yaml", {}, "cannot write /none/best.yaml"),
        ("--search trainer.memory_limit_gb=0.01", {}, "lacks"),
        ("--search parallel.generation=d2t1p1", {}, "parallel.generation=d2t1p1: dp(2)"),
    ],
)
def test_bad_input_exits_2_with_one_line(run_yaml, words, environment, message):
    done = plan(run_yaml, *words.split(), **environment)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_the_problem_of_the_schedule_is_written_for_the_search(run_yaml, tmp_path):
    path = tmp_path / "problem.json"
    assert plan(run_yaml, "--problem", path, "--json").returncode == 0
    problem = load_problem(path)
    assert [pipeline.name for pipeline in problem.pipelines] == ["actor", "critic.0", "critic.1"]
    assert problem.pipeline("critic.1").placement == (3, 2)
    assert problem.pipeline("actor").split and len(problem.pipeline("actor").weight_activation or ()) == 4


def test_kernels_are_compiled_before_the_search_begins(programs, run_yaml, tmp_path):
    """On a fresh clone the search has its whole time, and a line says what came before it."""
    begin = ("plan", "--config", run_yaml, "--json")
    done, again = (programs.tool(*begin, NUMBA_CACHE_DIR=str(tmp_path / "cache")) for _ in range(2))
    source = json.loads(done.stdout)["schedule"]["source"]
    assert int(source.split(" moves")[0].split()[-1]) > 1000, source
    begin, end = done.stderr.splitlines()
    assert begin.startswith("compiling kernels, once on this machine") and end.startswith("compiled ")
    assert again.returncode == 0 and not again.stderr
