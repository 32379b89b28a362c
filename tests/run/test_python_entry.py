"""rlhfuse.train: a function named so that ranks find it, settings as a dict, and a script without a guard."""

import functools
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml
from testkit.runs_table import metrics_of
from testkit.tiny import write_run

import rlhfuse
from rlhfuse.base.errors import InputError
from rlhfuse.config.load import load_config
from rlhfuse.data.reward_function import RewardFunction, name_of
from rlhfuse.run.python_entry import _arguments

SCRIPT = """
import os
import rlhfuse

def one_for_all(completions):
    return [1.0]

def shorter(prompts, completions, **columns):
    return [-0.01 * len(text.split()) for text in completions]

def never(completions):
    return [None for text in completions]

with open("read.txt", "a") as file:
    file.write(f"{__name__}\\n")
settings = {"reward": {"path": ""}, "algorithm": {"name": "grpo"}, "trainer": {"iterations": 2, "output_dir": "run"}}
given = [f"{group}.{key}={value!r}" for group, keys in settings.items() for key, value in keys.items()]
try:
    rlhfuse.train("run.yaml", reward=one_for_all, ranks=2, overrides=given)
except ValueError as error:
    print("refused:", type(error).__name__, os.path.exists("run"))
run = rlhfuse.train("run.yaml", reward=[shorter, never], ranks=2, overrides=given)
print("folder:", run.folder, "scores:", [row["critic/score/mean"] for row in run.metrics])
"""


def score(completions):
    return [0.0] * len(completions)


def script_module(monkeypatch, file, **names):
    """Stands for the program that python started, from a file or from a prompt."""
    module = types.ModuleType("__main__")
    module.__spec__ = None
    module.__dict__.update(names, **({"__file__": str(file)} if file else {}))
    for function in names.values():
        function.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", module)
    return names


def test_a_function_has_a_name_that_other_processes_find(monkeypatch, tmp_path):
    assert name_of(score) == f"{__name__}:score"
    file = tmp_path / "my script.py"
    file.write_text("def mine(completions):\n    return [2.0] * len(completions)\n")
    namespace: dict = {}
    exec(file.read_text(), namespace)
    script_module(monkeypatch, file, mine=namespace["mine"])
    assert name_of(namespace["mine"]) == f"{file}:mine"
    assert RewardFunction.load(name_of(namespace["mine"]), "auto").function(["a"]) == [2.0]


def test_functions_that_only_this_process_has_are_refused(monkeypatch):
    def inner(completions):
        return [0.0]

    for function, told in (
        (lambda completions: [0.0], "reward=a lambda is no function of a module's top level"),
        (inner, "<locals>.inner is no function"),
        (functools.partial(score), "functools.partial"),
        (types.FunctionType(score.__code__, {}, "score"), "is no function of a module's top level"),
    ):
        with pytest.raises(InputError) as caught:
            name_of(function)
        assert told in str(caught.value) and "my_reward.py" in str(caught.value)
    typed = types.FunctionType(score.__code__, {}, "typed")
    typed.__qualname__ = "typed"
    script_module(monkeypatch, None, typed=typed)
    with pytest.raises(InputError, match="reward=typed was defined at a prompt or in a notebook"):
        name_of(typed)


def test_a_dict_says_what_a_file_says(tmp_path):
    file = write_run(tmp_path)
    settings = yaml.safe_load(file.read_text())
    settings["data"]["train_files"] = [Path(one) for one in settings["data"]["train_files"]]
    settings["actor"]["optim"] |= {"lr": 1e-6, "warmup_iterations": 0}
    file.write_text(yaml.safe_dump(json.loads(json.dumps(settings, default=str))))
    assert load_config(None, list(_arguments(settings))) == load_config(file)


def test_what_cannot_be_used_is_refused_before_a_process_starts(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(InputError, match="unknown key trainer.iteration; did you mean trainer.iterations"):
        rlhfuse.train({"trainer": {"iteration": 3}})
    with pytest.raises(InputError, match="nowhere.yaml does not exist"):
        rlhfuse.train("nowhere.yaml", reward=score)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(InputError, match="rlhfuse.train starts its ranks itself"):
        rlhfuse.train({}, reward=score)


def test_a_script_without_a_guard_trains_and_is_read_down_to_its_call(programs, tmp_path):
    """Twice: with a function that is refused when it is tried, and whole, on two ranks."""
    folder = tmp_path / "try #1"  # what YAML would take for a comment
    folder.mkdir()
    write_run(folder, rollout__max_response_tokens=8)
    (folder / "script.py").write_text(SCRIPT)
    done = programs.python("script.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "returned 1 numbers for 4 samples (tried before the start" in errors[0], done.stderr
    assert "refused: InputError False" in done.stdout
    scores = [row["critic/score/mean"] for row in metrics_of(folder / "run")]
    assert f"folder: run scores: {scores}" in done.stdout and len(scores) == 2 and max(scores) < 0
    assert "tried on" in done.stdout and "done: run" in done.stdout
    read = (folder / "read.txt").read_text().split()
    assert read[0] == "__main__" and set(read[1:]) == {"script"}
