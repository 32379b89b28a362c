"""What a reward function is given: the sampled ids themselves, their text, and the row they were drawn from."""

import re
from types import SimpleNamespace

import pytest
import torch
from run_check import try_reward
from testkit.programs import eventually
from testkit.tiny import SHAPE, write_tokenizer

from rlhfuse.base.errors import InputError
from rlhfuse.base.sample_ids import sample_id
from rlhfuse.config.settings import RewardConfig, RunConfig
from rlhfuse.data.prompts import Prompt, prompts_from
from rlhfuse.ppo.rollout import Rollout
from rlhfuse.run.sampling.function_reward import FunctionRewarder

FUNCTION = """
def told(completion_ids, completions, prompts, number):
    assert set(completions) == {"w5 w5"} and prompts == [f"prompt {n}" for n in number], (completions, prompts)
    return [sum(i * 1000 ** n for n, i in enumerate(ids)) + n / 10 for ids, n in zip(completion_ids, number)]

def in_order(completion_ids):
    return [float("".join(str(ids[0]) for ids in completion_ids)) + n / 10 for n in range(len(completion_ids))]

def shorter(solution_str, ground_truth, **others):
    return 1 / len(solution_str)
"""
VERL = {"data_source": "x", "reward_model": {"ground_truth": 1}}
SAMPLED = (8, 0, 8, 1, 2)  # w5 <unk> w5 <s> </s>: what text leaves of it would be encoded as 1 8 8


class OnlyDecodes:
    """A tokenizer that can do nothing but decode: whoever encodes sampled text again fails."""

    def __init__(self, tokenizer):
        self.decode, self.eos_token_id = tokenizer.decode, tokenizer.eos_token_id


@pytest.fixture
def made(tmp_path):
    """Rewarders of a function of FUNCTION, as leaders of instances have them; and what a run's preflight found."""
    from transformers import AutoTokenizer

    (tmp_path / "mine.py").write_text(FUNCTION)
    tokenizer = AutoTokenizer.from_pretrained(str(write_tokenizer(tmp_path, SHAPE["vocab_size"] - 3)))
    rows = [Prompt((1, 3, 4), {"number": n} | VERL, f"p.jsonl:{n + 1}", f"prompt {n}") for n in range(5)]
    started = []

    def inputs(function, signature="trl"):
        reward = RewardConfig(function=f"{tmp_path}/mine.py:{function}", signature=signature, timeout_seconds=240)
        prompts = dict(prompts=SimpleNamespace(prompts=rows), val_prompts=SimpleNamespace(prompts=()))
        return SimpleNamespace(config=RunConfig(reward=reward), tokenizer=OnlyDecodes(tokenizer), tools=None, **prompts)

    def start(function):
        started.append(FunctionRewarder(inputs(function), lambda _: None))
        return started[-1]

    yield SimpleNamespace(start=start, inputs=inputs, tokenizer=tokenizer, rows=rows)
    for one in started:
        one.close()


def test_sampled_ids_are_never_tokenised_again(made):
    rewarder, tokenizer, rows = made.start("told"), made.tokenizer, made.rows
    text = tokenizer.decode(SAMPLED, skip_special_tokens=True)
    assert text == "w5 w5" and tuple(tokenizer(text)["input_ids"]) != SAMPLED
    for iteration in (0, 1):
        drawn = prompts_from(5, 1, 3 * iteration, 3)
        rewarder.begin([rows[index] for index in drawn], 2)
        samples = {sample_id(iteration, place, copy): drawn[place] for place in range(3) for copy in range(2)}
        rewarder.submit([Rollout(one, (1, 3), SAMPLED, torch.zeros(5), "length") for one in reversed(samples)])
        ids = sum(i * 1000**n for n, i in enumerate(SAMPLED))
        scores, known = {one: ids + number / 10 for one, number in samples.items()}, {}
        eventually(lambda: known.update(rewarder.news()) or known == scores)
        assert rewarder.finish() == scores and rewarder.news() == {}, "told once, and kept for the end"
        assert rewarder.take_calls()[:2] == (6, 2)


def test_a_function_is_tried_before_the_start_on_one_row(made):
    told = try_reward(made.inputs("in_order"))
    assert re.fullmatch(
        r"reward.function=.*mine.py:in_order: tried on p.jsonl:1, 4 texts, from all to none: .* s a call", told
    )
    with pytest.raises(InputError) as caught:
        try_reward(made.inputs("shorter", "verl"))
    line = FUNCTION[: FUNCTION.index("    return 1 / len")].count("\n") + 1
    raised = f"sample 1 of p.jsonl:1: raised ZeroDivisionError: .*, at .*mine.py:{line} in shorter: return 1"
    assert re.search(raised, str(caught.value)) and str(caught.value).endswith("--no-try-reward leaves it out)")
