"""The examples of the page on how to add an algorithm and a role run as they stand there."""

import re
import statistics
from types import SimpleNamespace

import pytest
import torch
from testkit.paths import ROOT
from testkit.rollouts import batch_of

from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.fusion.inter.inference import Scorer
from rlhfuse.fusion.inter.tensor_parallel_group import TensorParallelGroup
from rlhfuse.ppo.advantage import ADVANTAGES, add_advantages
from rlhfuse.ppo.rollout import Rollout
from rlhfuse.tasks.algorithm import ALGORITHMS
from rlhfuse.tasks.role import role_named


def example(heading: str) -> str:
    section = (ROOT / "docs/howto/extend.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(code.splitlines()) < 40
    return code


def test_an_algorithm_is_a_row_and_a_function(monkeypatch):
    for table in (ALGORITHMS, ADVANTAGES):
        for name in (*table,):
            monkeypatch.setitem(table, name, table[name])  # takes out again what the example puts in
    known = {*ALGORITHMS}
    exec(example("An algorithm"), {})
    (name,) = {*ALGORITHMS} - known
    algorithm = AlgorithmConfig().model_copy(update={"name": name})
    assert algorithm.groups and algorithm.kl_place == "loss" and not algorithm.whitens and not algorithm.has_critic
    rewards = [1.0, 5.0, 3.0, -2.0, 0.0, 4.0]
    batch = batch_of([0.0] * 6).with_fields(token_rewards=torch.tensor(rewards))
    made = add_advantages(batch, algorithm, torch.tensor([0, 0, 0, 1, 1, 1]))
    wanted = [r - statistics.median(rewards[i // 3 * 3 : i // 3 * 3 + 3]) for i, r in enumerate(rewards)]
    assert made.advantages.tolist() == wanted and made.returns.tolist() == rewards


def stand_in(factor: float) -> SimpleNamespace:
    """A model whose output is each token's number times this."""
    weights = SimpleNamespace(**dict.fromkeys(("allocate", "await_values", "copy_in", "release"), lambda: None))
    stage = SimpleNamespace(forward=lambda packed, _: factor * packed.tokens.float())
    return SimpleNamespace(stage=stage, offloaded=weights, ranks=1)


def test_a_second_reward_model_is_a_row():
    names: dict = {}
    exec(example("A role"), names)
    models = {role_named("critic"): stand_in(1.0), role_named("reward"): stand_in(0.5), names["JUDGE"]: stand_in(10.0)}
    scorer = Scorer(models, vocab=100, temperature=1.0, device=torch.device("cpu"))
    samples = (Rollout(i, (1, 2 + i), (5 + i, 7, 9 - i), torch.zeros(3), "stop") for i in range(2))
    scored = scorer.score([*samples], TensorParallelGroup((0,), 0, None))
    scorer.release()
    for one in scored:
        assert one.score == pytest.approx(10.5 * one.response_tokens[-1]) and one.ref_logprobs is None
        assert one.values.tolist() == [one.prompt_tokens[-1], *one.response_tokens[:-1]]
