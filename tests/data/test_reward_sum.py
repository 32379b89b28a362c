"""What reward functions return: numbers alone; of several the weighted sum, where None says that one does not apply."""

import asyncio
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from rlhfuse.base.errors import InputError, RewardError
from rlhfuse.data.reward_function import RewardCall, RewardFunction
from rlhfuse.data.reward_workers import RewardSum

SOURCE = """
def length(completions, **columns): return [len(text) for text in completions]
def odd(completions, **columns): return [1.0 if len(text) % 2 else None for text in completions]
def never(completions, **columns): return [None for _ in completions]
async def slow(completions, **columns): return [10.0 for _ in completions]
async def slower(completions, **columns): raise OSError("no sandbox")
def one(data_source, solution_str, ground_truth, extra_info=None): return {"score": float(solution_str == ground_truth)}
def even(prompts, completions):
    assert "b" not in completions
    return [None if len(text) % 2 else -2.0 for text in completions]
"""
ROW = {"data_source": "x", "prompt": "p", "reward_model": {"ground_truth": "4"}}


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Names of functions -> as settings have them."""
    file = tmp_path_factory.mktemp("sums") / "several.py"
    file.write_text(SOURCE)
    return lambda words: [f"{file}:{word}" for word in words.split()]


def call(*texts):
    return RewardCall(tuple(range(16, 16 + len(texts))), ROW, "p", texts, ((5,),) * len(texts), "p.jsonl:3")


@pytest.mark.parametrize(
    "functions, weights, scores",
    [
        ("length", (), [1.0, 2.0, 3.0]),
        ("length", (0.5,), [0.5, 1.0, 1.5]),
        ("odd length", (3.0, -1.0), [2.0, -2.0, 0.0]),
        ("odd even never", (1.0, 0.5, 7.0), [1.0, -1.0, 1.0]),
        ("slow slow", (1.0, 0.5), [15.0, 15.0, 15.0]),
        ("one one", (1.0, 0.5), [1.5]),
        ("never", (), "several.py:never, sample 16 of p.jsonl:3: returned None, not a number"),
        ("odd never", (), "several.py:never, sample 17 of p.jsonl:3: returned None, not a number"),
        ("length even", (), "several.py:even, samples 16 to 19 of p.jsonl:3: raised AssertionError, at "),
        ("slow slower", (), "several.py:slower, samples 16 to 18 of p.jsonl:3: raised OSError: no sandbox, at "),
    ],
)
def test_weighted_scores_are_added_and_a_failure_names_the_function(names, functions, weights, scores):
    loaded = RewardSum.load(names(functions), "auto", weights)
    asked = call("4") if functions == "one one" else call("a", "aa", "aaa", *["b"] * ("even" in str(scores)))
    assert loaded.is_async == ("slow" in functions)

    async def awaited():
        return await loaded.invoke(asked)

    try:
        told = loaded.result(asyncio.run(awaited()) if loaded.is_async else loaded.invoke(asked), asked)
    except Exception as error:
        assert scores in loaded.failed(error, asked)
    else:
        assert told == dict(zip(asked.sample_ids, scores))


@pytest.mark.parametrize("functions", ["odd one", "odd slow"])
def test_functions_that_are_not_called_alike_are_no_list(names, functions):
    first, last = names(functions)
    with pytest.raises(InputError, match=f"reward.function: {first} and {last} differ: "):
        RewardSum.load(names(functions), "auto")


NUMBERS = [1, True, 0.5, -0.0, 10**30, np.float16(2), np.int8(3), np.bool_(True), np.array(4.0), torch.tensor(2.5)]
NUMBERS += [torch.tensor(1, dtype=torch.bfloat16), Decimal("1.5"), Fraction(1, 4)]
OTHERS = ["4", b"4", "1_0", bytearray(b"4"), np.str_("4"), np.bytes_(b"4"), np.array("4"), {}, {"reward": 1.0}, {1.0}]
OTHERS += [frozenset([1.0]), [1.0], (1.0,), np.array([1.0]), torch.tensor([1.0]), 1j, np.complex64(1), iter([1.0])]
OTHERS += [10**400, object(), float, lambda: 1.0, np.timedelta64(1, "s"), {"score": "4"}, range(1), "1,0"]
NO_LISTS = ["4", b"4", bytearray(b"4"), memoryview(b"4"), {1.0}, frozenset([1.0]), {0: 1.0}, {0: 1.0}.keys(), 1.0]
NO_LISTS += [None, np.array(1.0), torch.tensor(1.0), iter([1.0])]


@pytest.mark.parametrize("signature", ["verl", "trl"])
def test_a_score_is_a_number_and_nothing_that_can_be_made_one(signature):
    """13 kinds are taken; 26 others are refused by function, sample and row, and 13 that are no list."""
    in_list, function = signature == "trl", RewardFunction("mine.py:score", signature, len)
    for number in NUMBERS:
        (score,) = function.result([number] if in_list else number, call("a")).values()
        assert repr(score) == repr(float(number))
    refused = [([other] if in_list else other, ".*, not a number") for other in OTHERS]
    refused += [(other, ".*, not a list of numbers") for other in NO_LISTS if in_list]
    refused += [([], "0 numbers for 1 samples"), ([1.0, 2.0], "2 numbers for 1 samples")] if in_list else []
    refused += [([bad] if in_list else bad, f"{bad}; a score must be finite") for bad in (math.nan, math.inf)]
    for returned, said in refused:
        with pytest.raises(RewardError, match=f"mine.py:score, samples? 16 of p.jsonl:3: returned {said}"):
            function.result(returned, call("a"))
    assert in_list or function.result({"score": 2.5, "acc": 1}, call("a")) == {16: 2.5}
