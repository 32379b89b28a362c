"""Answers of GSM8K: the number that a text ends with, and rewards by it."""

import pytest

from rlhfuse.data.gsm8k import answer_match, exact_match, final_answer
from rlhfuse.data.reward_function import RewardFunction


@pytest.mark.parametrize(
    "text, answer",
    [
        ("48/2 = <<48/2=24>>24\n#### 72", 72),
        ("#### -1,234.50 dollars", -1234.5),
        ("#### 5\nno, wait\n#### 6", 6),
        ("#### $1,000", 1000),
        ("it is 3, or rather 14.", 14),
        ("7 #### none", 7),
        ("no number", None),
    ],
)
def test_the_last_number_is_the_answer(text, answer):
    assert final_answer(text) == answer


def test_exact_match_of_both_signatures():
    assert exact_match("gsm8k", "so #### 72.0", "72") == 1.0
    assert exact_match("gsm8k", "so #### 71", "#### 72") == 0.0
    assert exact_match("gsm8k", "", "72") == 0.0
    chat = [{"role": "assistant", "content": "#### 3"}]
    assert answer_match(completions=["4", chat], answer=["1+3 = 4\n#### 4", "#### 4"]) == [1.0, 0.0]
    loaded = RewardFunction.load("rlhfuse.data.gsm8k:answer_match", "trl")
    loaded.check({"question": "q", "answer": "#### 1"}, "q", "f:1")
