"""The models that come with the examples, of stories and of sums, as committed; and the programs that make them."""

import json
import re
from dataclasses import asdict

import make_sums
import make_tiny_models
import numpy as np
import pytest
import stories
import sums
import torch
from make_sums import Recipe, draw_files, rows, taught
from preferences import encode_pairs, score_pairs
from stories import generator
from testkit.paths import ROOT
from testkit.programs import call_main
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhfuse.data.gsm8k import answer_match, final_answer

TINY, SUMS, MAKE, EXAMPLE = (ROOT / "examples" / name for name in ("tiny", "sums", "make", "sums_grpo.yaml"))
PROMPTS = ROOT / "examples" / "prompts"
NAMES = ("train", "held_out")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY / "actor")


@pytest.fixture(scope="module")
def actor():
    return AutoModelForCausalLM.from_pretrained(TINY / "actor", dtype=torch.float32).eval()


def held_out_prompts(count: int) -> list[str]:
    return [json.loads(line)["prompt"] for line in (PROMPTS / "quickstart.jsonl").read_text().splitlines()][:count]


def test_prompt_and_response_tokens_join_to_the_tokens_of_the_joined_text(tokenizer):
    """PPO appends sampled tokens to the prompt's; the reward model was trained on the joined text."""
    rng = stories.generator(78, "joint")
    for _ in range(100):
        opening = stories.draw_opening(rng)
        response = stories.draw_response(rng, opening).text
        parts = tokenizer(opening.prompt)["input_ids"] + tokenizer(response, add_special_tokens=False)["input_ids"]
        assert parts == tokenizer(opening.prompt + response)["input_ids"]


@pytest.mark.ci
def test_reward_model_orders_fresh_pairs():
    tokenizer = AutoTokenizer.from_pretrained(TINY / "reward")
    model = AutoModelForSequenceClassification.from_pretrained(TINY / "reward", dtype=torch.float32).eval()
    rng = stories.generator(4242, "fresh pairs")
    pairs = [asdict(stories.draw_pair(rng, held_out=True)) for _ in range(200)]
    tokens = encode_pairs(pairs, lambda text: tokenizer(text)["input_ids"], tokenizer.eos_token_id)
    chosen, rejected = score_pairs(model, tokens, tokenizer.pad_token_id)
    assert (chosen > rejected).float().mean() >= 0.85
    scores = torch.cat([chosen, rejected])
    assert abs(scores.mean()) < 0.4 and 0.6 < scores.std() < 1.6


def responses_of(model, folder, texts: list[str], most: int):
    """(tokens that are drawn after each of the texts, the tokenizer)."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = tokenizer(texts, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    out = model.generate(input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=most)
    return out[:, ids.shape[1] :], tokenizer


@pytest.mark.ci
def test_sampled_texts_end_by_themselves_with_a_long_tail(actor):
    responses, tokenizer = responses_of(actor, TINY / "actor", held_out_prompts(128), 384)
    ended = (responses == tokenizer.eos_token_id).any(dim=1)
    lengths = torch.where(ended, (responses == tokenizer.eos_token_id).int().argmax(dim=1) + 1, responses.shape[1])
    p50, p99 = np.percentile(lengths.numpy(), [50, 99])
    assert p99 / p50 >= 4
    assert 20 <= p50 <= 60
    assert (~ended).float().mean() <= 0.03


@pytest.mark.slow
def test_a_short_run_makes_loadable_models(programs, tmp_path):
    out, prompts = tmp_path / "tiny", tmp_path / "prompts.jsonl"
    sizes = ("--steps", 3, "--stories", 300, "--pairs", 20, "--samples", 2, "--threads", 1)
    done = programs.python(MAKE / "make_tiny_models.py", "--out", out, "--prompts", prompts, *sizes)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "actor", "reward"]
    AutoTokenizer.from_pretrained(out / "actor")
    AutoModelForCausalLM.from_pretrained(out / "actor")
    assert AutoModelForSequenceClassification.from_pretrained(out / "reward").config.num_labels == 1
    assert "p99 / p50" in (out / "README.md").read_text()
    assert all("prompt" in json.loads(line) for line in prompts.read_text().splitlines())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl", "tiny"]  # nothing left beside


@pytest.mark.parametrize("program", [make_tiny_models, make_sums])
def test_what_is_there_and_no_steps_are_refused(tmp_path, program):
    (tmp_path / "mine").touch()
    for words, message in (((tmp_path,), "--force"), ((tmp_path / "x", "--steps", 0), "--steps 0")):
        refused = call_main(program, "--prompts", tmp_path / "prompts", "--out", *words)
        assert refused.returncode == 2 and message in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# little sums in words


def committed(name):
    return (PROMPTS / f"sums_{name}.jsonl").read_text()


def questions(name):
    return [json.loads(line)["question"] for line in committed(name).splitlines()]


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


def test_the_model_begins_with_room_to_learn():
    model = AutoModelForCausalLM.from_pretrained(SUMS, dtype=torch.float32).eval()
    held_out = [json.loads(line) for line in committed("held_out").splitlines()] * 2
    responses, tokenizer = responses_of(model, SUMS, [row["question"] for row in held_out], 40)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    assert all("####" in text for text in texts[:20])
    right = answer_match(texts, [row["answer"] for row in held_out])
    assert 0.2 <= sum(right) / len(right) <= 0.5


@pytest.mark.slow
def test_a_short_run_makes_a_loadable_model(programs, tmp_path):
    out = tmp_path / "sums"
    done = programs.python(MAKE / "make_sums.py", "--prompts", tmp_path, "--threads", 1, "--out", out, "--steps", 3)
    assert done.returncode == 0, done.stderr
    AutoTokenizer.from_pretrained(out)
    AutoModelForCausalLM.from_pretrained(out)
    assert "held-out sums right" in (out / "README.md").read_text()
    assert [(tmp_path / f"sums_{name}.jsonl").read_text() for name in NAMES] == [committed(name) for name in NAMES]
