"""What a reward function is given: the sampled ids themselves, their text, and the row they were drawn from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny import SHAPE, write_tokenizer

from rlhfuse.config.settings import RewardConfig, RunConfig
from rlhfuse.data.prompts import Prompt
from rlhfuse.data.sampler import PromptSampler, sample_id
from rlhfuse.ppo.rollout import Rollout
from rlhfuse.run.function_reward import FunctionRewarder

FUNCTION = """
def told(completion_ids, completions, prompts, number):
    assert completions == ["w5 w5"] and prompts == [f"prompt {number[0]}"], (completions, prompts)
    return [sum(i * 1000 ** n for n, i in enumerate(completion_ids[0])) + number[0] / 10]
"""
SAMPLED = (8, 0, 8, 1, 2)  # w5 <unk> w5 <s> </s>: what text leaves of it would be encoded as 1 8 8


class OnlyDecodes:
    """A tokenizer that can do nothing but decode: whoever encodes sampled text again fails."""

    def __init__(self, tokenizer):
        self.decode = tokenizer.decode


@pytest.fixture
def rewarder(tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "mine.py").write_text(FUNCTION)
    tokenizer = AutoTokenizer.from_pretrained(str(write_tokenizer(tmp_path, SHAPE["vocab_size"] - 3)))
    rows = [Prompt((1, 3), {"number": n}, f"p.jsonl:{n + 1}", f"prompt {n}") for n in range(5)]
    reward = RewardConfig(function=f"{tmp_path}/mine.py:told", signature="trl", timeout_seconds=240)
    prepared = SimpleNamespace(config=RunConfig(reward=reward), tokenizer=OnlyDecodes(tokenizer))
    made = FunctionRewarder(prepared, lambda _: None)
    yield made, tokenizer, rows
    made.close()


def test_sampled_ids_are_never_tokenised_again(rewarder):
    made, tokenizer, rows = rewarder
    text = tokenizer.decode(SAMPLED, skip_special_tokens=True)
    assert text == "w5 w5" and tuple(tokenizer(text)["input_ids"]) != SAMPLED
    for iteration in (0, 1):
        drawn = PromptSampler(5, seed=1).prompts_of(iteration, 3)
        made.begin([rows[index] for index in drawn])
        samples = {sample_id(iteration, place, copy): drawn[place] for place in range(3) for copy in range(2)}
        made.submit([Rollout(one, (1, 3), SAMPLED, torch.zeros(5), "length") for one in reversed(samples)])
        ids = sum(i * 1000**n for n, i in enumerate(SAMPLED))
        assert made.finish() == {one: ids + number / 10 for one, number in samples.items()}
        assert made.take_calls()[:2] == (6, 1)
