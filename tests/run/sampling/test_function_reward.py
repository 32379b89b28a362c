"""What a reward function is given: the sampled ids themselves, their text, and the row they were drawn from."""

import random
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from run_check import try_reward
from testkit.programs import eventually
from testkit.tiny import SHAPE, write_tokenizer

from rlhfuse.base.errors import InputError
from rlhfuse.base.sample_ids import sample_id, sample_origin
from rlhfuse.config.settings import RewardConfig, RunConfig
from rlhfuse.data.prompts import Prompt
from rlhfuse.data.sampler import PromptSampler
from rlhfuse.fusion.inter.inference import Meeting
from rlhfuse.fusion.inter.iteration_store import IterationStore
from rlhfuse.ppo.rollout import Rollout
from rlhfuse.run.sampling.function_reward import FunctionRewarder

FUNCTION = """
def told(completion_ids, completions, prompts, number):
    assert set(completions) == {"w5 w5"} and prompts == [f"prompt {n}" for n in number], (completions, prompts)
    return [sum(i * 1000 ** n for n, i in enumerate(ids)) + n / 10 for ids, n in zip(completion_ids, number)]

def in_order(completion_ids):
    return [float("".join(str(ids[0]) for ids in completion_ids)) + n / 10 for n in range(len(completion_ids))]

def by_tools(completions):
    return [float("".join(m["content"] for m in turns if m["role"] == "tool")) for turns in completions]

def shorter(solution_str, ground_truth, **others):
    return 1 / len(solution_str)
"""
VERL = {"data_source": "x", "reward_model": {"ground_truth": 1}}
HASHED = dist.HashStore()
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

    def start(function, said=None):
        found = inputs(function)
        found.tools = said and SimpleNamespace(turns=SimpleNamespace(messages=messages))
        started.append(FunctionRewarder(found, lambda _: None, said and SimpleNamespace(said=said)))
        return started[-1]

    yield SimpleNamespace(start=start, inputs=inputs, tokenizer=tokenizer, rows=rows)
    for one in started:
        one.close()


def test_sampled_ids_are_never_tokenised_again(made):
    rewarder, tokenizer, rows = made.start("told"), made.tokenizer, made.rows
    text = tokenizer.decode(SAMPLED, skip_special_tokens=True)
    assert text == "w5 w5" and tuple(tokenizer(text)["input_ids"]) != SAMPLED
    for iteration in (0, 1):
        drawn = PromptSampler(5, seed=1).prompts_from(3 * iteration, 3)
        rewarder.begin([rows[index] for index in drawn], 2)
        samples = {sample_id(iteration, place, copy): drawn[place] for place in range(3) for copy in range(2)}
        rewarder.submit([rollout(one) for one in reversed(samples)])
        ids = sum(i * 1000**n for n, i in enumerate(SAMPLED))
        scores, known = {one: ids + number / 10 for one, number in samples.items()}, {}
        eventually(lambda: known.update(rewarder.news()) or known == scores)
        assert rewarder.finish() == scores and rewarder.news() == {}, "told once, and kept for the end"
        assert rewarder.take_calls()[:2] == (6, 2)


def rollout(sample, tokens=SAMPLED, observed=()):
    drawn = len(tokens) - len(observed)
    return Rollout(sample, (1, 3), tokens, torch.zeros(drawn), "length", observed=observed)


@pytest.mark.parametrize("function", ["in_order", "by_tools"])
def test_a_prompts_samples_are_called_together_wherever_and_whenever_they_end(made, function):
    """Two instances that split three prompts of four unevenly: before and after they meet, moved and stayed. What tools
    said is known on the instance where a sample ended."""
    known, draw = ({}, {}), random.Random(3)
    tools = function == "by_tools"
    instances = [made.start(function, said.__getitem__ if tools else None) for said in known]
    samples = [sample_id(0, place, copy) for place in range(3) for copy in range(4)]
    rollouts = {one: rollout(one, (n, 6, 7), ((1, 2),)) for n, one in enumerate(samples)}
    wanted = {
        one: float(n) if tools else float("".join(str(4 * (n // 4) + i) for i in range(4))) + n % 4 / 10
        for n, one in enumerate(samples)
    }
    for number in range(12):
        tail, split = set(draw.sample(samples, (0, 1, 3, 6, 12)[number % 5])), draw.randrange(13)
        stores = [IterationStore(dist.PrefixStore("x", HASHED), f"{number}", 10.0) for _ in instances]
        for one in instances:
            one.begin(made.rows, 4)
        order = draw.sample(range(12), 12)
        where = {one: draw.randrange(2) if one in tail else int(n >= split) for n, one in enumerate(samples)}
        for i in range(2):
            known[i].clear()
            known[i].update({one: [[("f", str(n))]] for n, one in enumerate(samples) if where[one] == i})
        for n in order:
            if samples[n] not in tail:
                instances[where[samples[n]]].submit([rollouts[samples[n]]])
        finished, began = [rollouts[one] for one in samples if one not in tail], (samples[:split], samples[split:])
        for i, one in enumerate(instances):
            one.meet(Meeting(i, began, finished, sorted(tail), stores[i]))
        for n in order:
            if samples[n] in tail:
                instances[where[samples[n]]].submit([rollouts[samples[n]]])
        said = [one.finish() for one in instances]
        assert said[0] | said[1] == wanted, (number, split, tail)
        assert [{one for one in began[i] if sample_origin(one)[2] == 0} <= said[i].keys() for i in (0, 1)] == [True] * 2
        assert not said[0].keys() & said[1].keys()
        stores[0].clear(2)
        assert HASHED.num_keys() == 0


def messages(drawn, said):
    assert [len(tokens) for tokens in drawn] == [1, 1]
    return [{"role": "tool", "name": name, "content": text} for turn in said for name, text in turn]


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
