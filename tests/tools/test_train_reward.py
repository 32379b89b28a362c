"""tools/train_reward.py: what it makes, and one clear line for each kind of bad input."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import stories
import torch
from testkit.paths import ROOT
from testkit.programs import call_tool
from transformers import AutoModelForSequenceClassification

ACTOR = ROOT / "examples" / "tiny" / "actor"
GOOD = {"prompt": "One day", "chosen": " she was happy.", "rejected": " she was sad."}


def write_pairs(path: Path, lines: list) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_run_prints_its_accuracy_and_saves_a_classifier(tmp_path):
    rng = stories.generator(2, "pairs")
    pairs = write_pairs(tmp_path / "pairs.jsonl", [asdict(stories.draw_pair(rng)) for _ in range(48)])
    out = tmp_path / "reward"
    arguments = ("--model", ACTOR, "--pairs", pairs, "--out", out, "--epochs", 1, "--threads", 1)
    done = call_tool("train_reward", *arguments, "--batch-pairs", 8, "--eval-fraction", 0.25, "--dtype", "float32")
    assert "held-out accuracy" in done.stdout and "12 pairs (36 trained on)" in done.stdout
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.config.num_labels == 1 and model.dtype == torch.float32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.jsonl", "reward"]

    again = call_tool("train_reward", *arguments)
    assert again.returncode == 2 and "--force" in again.stderr


@pytest.mark.parametrize(
    "lines, extra, message",
    [
        (None, (), "pairs.jsonl does not exist"),
        ([GOOD, '{"prompt": '], (), "pairs.jsonl:2: not valid JSON"),
        ([GOOD, GOOD, {"prompt": "x", "chosen": "y"}], (), "pairs.jsonl:3: field 'rejected' is missing"),
        ([{**GOOD, "chosen": 3}], (), "pairs.jsonl:1: field 'chosen' is 3"),
        ([GOOD], (), "holds 1 pairs"),
        ([GOOD, GOOD], ("--eval-fraction", 1.5), "eval_fraction=1.5"),
        ([GOOD, GOOD], ("--model", "nowhere"), "nowhere holds no config.json"),
        ([GOOD, {**GOOD, "chosen": " word" * 600}], (), "the model's context is 512"),
        ([{**GOOD, "rejected": GOOD["chosen"]}] * 2, (), "pairs (1) are all the same, so their scores give no unit"),
    ],
)
def test_bad_input_ends_with_2_and_one_line(tmp_path, lines, extra, message):
    pairs = tmp_path / "pairs.jsonl"
    if lines is not None:
        write_pairs(pairs, lines)
    done = call_tool("train_reward", "--model", ACTOR, "--pairs", pairs, "--out", tmp_path / "out", *extra)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
