"""The example of a calculator: what is drawn and taught, the model and the prompts as committed."""

import importlib.util
import json
import random

import make_calculator
import pytest
from make_calculator import Recipe, draw_calculation, draw_different, draw_files, rows
from stories import generator
from testkit.paths import ROOT
from testkit.programs import call_main
from transformers import AutoTokenizer

from rlhfuse.data.gsm8k import answer_match

FOLDER, PROMPTS = ROOT / "examples" / "calculator", ROOT / "examples" / "prompts"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def calc(**arguments):
    spec = importlib.util.spec_from_file_location("calculator_tools", FOLDER / "tools.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.calc(**arguments)


def test_a_taught_call_is_answered_as_the_tool_answers_it():
    rng, recipe = random.Random(3), Recipe(guesses=0.3)
    kinds = {"guess": 0, "right": 0, "wrong": 0}
    for _ in range(400):
        one = draw_calculation(rng)
        pieces = one.pieces(rng, recipe)
        assert one.result > 0 and pieces[-1][1]
        final = pieces[-1][0]
        if len(pieces) == 1:
            assert abs(int(final.removeprefix("#### ")) - one.result) <= make_calculator.FARTHEST_GUESS
            kinds["guess"] += 1
            continue
        asked, answered, _ = (text for text, _ in pieces)
        call = json.loads(asked.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        value = calc(**call["arguments"])
        assert call["name"] == "calc" and answered == f"<tool_response>{value}</tool_response>"
        assert final == f"#### {value}"
        right = answer_match([final], [f"#### {one.result}"]) == [1.0]
        assert right == (call["arguments"]["sign"] == one.sign)
        kinds["right" if right else "wrong"] += 1
    assert all(count > 30 for count in kinds.values()), kinds


def test_no_question_is_drawn_twice_or_among_those_kept_apart():
    kept = frozenset(one.question for one in draw_different(generator(1, "a"), 50))
    drawn = [one.question for one in draw_different(generator(1, "a"), 100, kept)]
    assert len({*drawn}) == 100 and not kept & {*drawn}


def test_the_prompts_are_those_that_the_program_makes():
    for name, calculations in zip(("train", "held_out"), draw_files(Recipe())):
        assert (PROMPTS / f"calculator_{name}.jsonl").read_text() == rows(calculations)


def test_the_template_writes_what_the_model_was_taught(tokenizer):
    rng = random.Random(5)
    for _ in range(50):
        one = draw_calculation(rng)
        pieces = one.pieces(rng, Recipe(guesses=0.0))
        call = json.loads(pieces[0][0].removeprefix("<tool_call>").removesuffix("</tool_call>"))
        value = pieces[2][0].removeprefix("#### ")
        turns = [
            *one.chat,
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": value},
        ]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        asked, answered, _ = (text for text, _ in pieces)
        assert text == f"<s>{one.question}\n{asked}</s>{answered}"
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
        longest = len(ids) + len(tokenizer(pieces[2][0])["input_ids"])
        assert longest < make_calculator.CONTEXT and len(ids) <= 64 + make_calculator.MAX_RESPONSE_TOKENS


@pytest.mark.slow
def test_the_program_makes_a_model_beside_the_tool(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tools.py").write_text("kept")
    arguments = ["--out", str(tmp_path / "model"), "--prompts", str(tmp_path), "--steps", "3"]
    assert call_main(make_calculator, *arguments).returncode == 0
    again = call_main(make_calculator, *arguments)
    assert again.returncode == 2 and "holds a model; give --force to replace it" in again.stderr
    assert (tmp_path / "model" / "tools.py").read_text() == "kept"
    assert "trained from nothing" in (tmp_path / "model" / "README.md").read_text()
