"""Little sums in words: the prompt files and the model as committed, the grammar, and the program that makes them."""

import json
import re

import pytest
import torch
from make_sums import MAX_RESPONSE_TOKENS, Recipe, draw_files, rows, taught
from safetensors import safe_open
from testkit.paths import ROOT
from tiny_models import sums
from tiny_models.stories import generator
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhfuse.config.load import load_config
from rlhfuse.config.spec import ModelSpec, ParallelLayout
from rlhfuse.data.gsm8k import answer_match, final_answer

MODEL, EXAMPLE = ROOT / "examples" / "sums", ROOT / "examples" / "sums_grpo.yaml"
NAMES = ("train", "held_out")


def committed(name):
    return (ROOT / "examples" / "prompts" / f"sums_{name}.jsonl").read_text()


def questions(name):
    return [json.loads(line)["question"] for line in committed(name).splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def test_prompt_files_are_what_the_program_writes():
    for name, drawn in zip(NAMES, draw_files(Recipe())):
        assert committed(name) == rows(drawn)


def test_no_question_is_in_both_files_or_was_taught():
    training, held_out = map(questions, NAMES)
    assert (len(training), len(held_out)) == (512, 128)
    assert len({*training, *held_out}) == 640
    assert not {question for question, _ in taught(Recipe(taught=3000))} & {*training, *held_out}


def test_worked_solutions_are_right_and_gsm8k_reads_them():
    drawn = sums.draw_different(generator(3, "worked"), 2000)
    assert {len(one.steps) for one in drawn} == {1, 2} and {one.steps[0][0] for one in drawn} == {"+", "-", "*"}
    for one in drawn:
        *lines, last = one.solution().splitlines()
        value = one.first
        for line, (_, number) in zip(lines, one.steps, strict=True):
            left, right = line.split("=")
            assert left.startswith(str(value)) and left.endswith(str(number)) and eval(left) == int(right) > 0
            value = int(right)
        assert final_answer(last) == value
        numbers = [one.first, *(number for _, number in one.steps)]
        assert [int(found) for found in re.findall(r"\d+", one.question)] == numbers


def test_a_guess_is_seldom_right():
    rng = generator(4, "guesses")
    drawn = sums.draw_different(rng, 3000)
    right = answer_match([one.guess(rng) for one in drawn], [one.solution() for one in drawn])
    assert 0.05 < sum(right) / len(right) < 0.2


def test_the_model_is_little_and_its_tokens_hold_every_sum(tokenizer):
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 500_000
    with safe_open(MODEL / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}
    spec = ModelSpec.from_config(MODEL)
    ParallelLayout.parse("d1t2p1").check_model(spec, "actor_train")
    assert len(tokenizer) <= spec.vocab and (tokenizer.eos_token_id,) == spec.eos_token_ids
    config = load_config(EXAMPLE)
    for one in sums.draw_different(generator(5, "tokens"), 2000):
        prompt, answer = tokenizer(one.question)["input_ids"], tokenizer("\n" + one.solution())["input_ids"]
        assert tokenizer.decode(prompt + answer[1:], skip_special_tokens=True) == f"{one.question}\n{one.solution()}"
        assert len(prompt) <= config.data.max_prompt_tokens
        assert len(answer) <= config.rollout.max_response_tokens == MAX_RESPONSE_TOKENS


def test_the_model_begins_with_room_to_learn():
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    held_out = [json.loads(line) for line in committed("held_out").splitlines()] * 2
    prompts = tokenizer([row["question"] for row in held_out], return_tensors="pt", padding=True)
    torch.manual_seed(0)
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    out = model.generate(input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=40)
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    assert all("####" in text for text in texts[:20])
    right = answer_match(texts, [row["answer"] for row in held_out])
    assert 0.2 <= sum(right) / len(right) <= 0.5


@pytest.mark.slow
def test_a_short_run_makes_a_loadable_model(programs, tmp_path):
    out = tmp_path / "sums"
    done = programs.tool("make_sums", "--prompts", tmp_path, "--threads", 1, "--out", out, "--steps", 3)
    assert done.returncode == 0, done.stderr
    AutoTokenizer.from_pretrained(out)
    AutoModelForCausalLM.from_pretrained(out)
    assert "held-out sums right" in (out / "README.md").read_text()
    assert [(tmp_path / f"sums_{name}.jsonl").read_text() for name in NAMES] == [committed(name) for name in NAMES]
