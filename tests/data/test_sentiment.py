"""The sentiment reward: what VADER says of a completion, through the interface of reward functions."""

import pytest

from rlhfuse.data.reward_function import RewardCall, RewardFunction

pytest.importorskip("vaderSentiment", reason="the sentiment reward needs the vaderSentiment package")

GLAD, PLAIN, SAD = "She was very happy and loved her friend.", "He went to the house.", "It was a terrible, sad day."


@pytest.fixture(scope="module")
def function():
    return RewardFunction.load("rlhfuse.data.sentiment:vader", "trl")


def score(function, completion, prompt="Once upon a time"):
    call = RewardCall((7,), {"prompt": prompt, "level": 3}, prompt, (completion,), ((1, 2),))
    function.check(call.row, prompt, "prompts.jsonl:1")
    return function.result(function.function(**function.arguments(call)), call)[7]


def test_glad_words_score_above_sad_ones(function):
    assert 0.5 < score(function, GLAD) <= 1 and score(function, PLAIN) == 0 and -1 <= score(function, SAD) < -0.5
    assert score(function, "") == 0


def test_the_prompt_does_not_count(function):
    assert score(function, GLAD, "A bad, ugly thing") == score(function, GLAD, "A lovely day")


def test_chat_turns_and_several_at_once(function):
    turns = [{"role": "assistant", "content": GLAD}]
    assert function.function(completions=[turns, SAD]) == [score(function, GLAD), score(function, SAD)]
