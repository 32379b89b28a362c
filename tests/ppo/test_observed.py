"""Observed tokens are context and nothing else; samples that failed keep their place and count nowhere."""

import dataclasses
import pickle
import random
from types import SimpleNamespace

import pytest
import torch
from testkit.rollouts import batch_of

from rlhfuse.base.errors import InputError
from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.ppo.advantage import add_advantages, spared_samples
from rlhfuse.ppo.losses import policy_loss, value_loss
from rlhfuse.ppo.metrics import batch_metrics
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.ppo.token_rewards import add_token_rewards

NAMES = ("ppo", "grpo", "rloo", "reinforce++", "reinforce_plus_plus_baseline")
SEEN = 0  # a token that nobody draws


def draw(seed: int, sample: int) -> Rollout:
    """A scored sample of one to four turns."""
    rng = random.Random(f"{seed} {sample}")
    tokens, spans, drawn = [], [], 0
    for number in range(rng.randint(1, 4)):
        if number:
            spans.append((len(tokens), len(tokens) + rng.randint(1, 12)))
            tokens += [SEEN] * (spans[-1][1] - spans[-1][0])
        tokens += [rng.randrange(4, 99) for _ in range(rng.randint(1, 9))]
        drawn = len(tokens) - sum(end - start for start, end in spans)
    numbers = torch.randn(4, drawn, generator=torch.Generator().manual_seed(sample))
    arrays = -numbers[0].abs(), "stop", -numbers[1].abs(), numbers[2], 0.5 * sample, numbers[3].abs()
    return Rollout(sample, range(1, rng.randint(2, 6)), tokens, *arrays, observed=spans)


def without_gaps(rollout: Rollout) -> Rollout:
    drawn = tuple(token for token in rollout.response_tokens if token != SEEN)
    return dataclasses.replace(rollout, response_tokens=drawn, observed=())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_numbers_are_those_of_samples_whose_gaps_are_cut_out(name, seed):
    """Bit for bit, where a response's length costs nothing; also of a mini-batch."""
    rollouts = [draw(seed, sample) for sample in range(12)]
    algorithm, groups = AlgorithmConfig(name=name, kl_coef=0.1, kl_in="reward"), torch.arange(12) // 4
    gaps, cut = (
        add_advantages(add_token_rewards(RolloutBatch.from_rollouts(each), algorithm, 100), algorithm, groups)
        for each in (rollouts, [without_gaps(rollout) for rollout in rollouts])
    )
    assert gaps.observed is not None and cut.observed is None and gaps.failed is None
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:5]
    for ours, plain in ((gaps, cut), (gaps.select(order), cut.select(order))):
        for field in ("old_logprobs", "token_rewards", "advantages", "returns", "values", "entropies", "owners"):
            assert torch.equal(getattr(ours, field), getattr(plain, field)), field
        assert torch.equal(ours.tokens[ours.response_index], plain.tokens[plain.response_index])
        assert torch.equal(ours.drawn_lengths, plain.response_lengths)
        assert int(ours.drawn_lengths.sum()) == ours.response_tokens == ours.counted_tokens
        assert int((ours.response_lengths - ours.drawn_lengths).sum()) == int((ours.tokens == SEEN).sum())
    metrics, plain = batch_metrics(gaps, algorithm), batch_metrics(cut, algorithm)
    assert all(plain[key] == value for key, value in metrics.items() if "response_length/m" not in key)
    assert gaps.digest() != gaps.with_fields(observed=torch.zeros_like(gaps.observed)).digest()


def test_no_loss_reaches_what_was_observed():
    """The row before a drawn token predicts it, be it observed itself; no other row has a gradient."""
    batch = RolloutBatch.from_rollouts([draw(0, sample) for sample in range(12)])
    batch = batch.with_fields(advantages=torch.ones(batch.response_tokens), returns=batch.values + 1)
    outputs = torch.randn(len(batch.tokens), requires_grad=True)
    found, algorithm = outputs[batch.prediction_index], AlgorithmConfig()
    policy, _ = policy_loss(found, batch.old_logprobs, batch.advantages, batch.counted_lengths, algorithm)
    value, _ = value_loss(found, batch.values, batch.returns, algorithm.value_clip_eps)
    [gradient] = torch.autograd.grad(policy.sum() + value.sum(), outputs)
    predicts = torch.cat([batch.tokens[1:] != SEEN, torch.tensor([False])])
    for begin, end, prompt in zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.prompt_lengths):
        predicts[begin : begin + prompt - 1] = predicts[end - 1] = False
    assert (gradient[~predicts] == 0).all() and batch.prediction_index.tolist() == predicts.nonzero().flatten().tolist()
    assert (gradient[predicts] != 0).any()


def test_sent_bit_for_bit_and_taught_turn_by_turn():
    rollout = next(one for one in (draw(0, sample) for sample in range(9)) if len(one.observed) > 1)
    rollout = dataclasses.replace(rollout, failed=True)
    assert len(rollout.turns) == len(rollout.observed) + 1 > 2
    for back in (pickle.loads(pickle.dumps(rollout)), Rollout.from_bytes(rollout.to_bytes())):
        assert back.observed == rollout.observed and back.failed and torch.equal(back.values, rollout.values)
    contexts, turns = zip(*rollout.pieces())
    assert contexts[0] == rollout.prompt_tokens and all(SEEN not in turn for turn in turns)
    assert contexts[-1] + turns[-1] == rollout.prompt_tokens + rollout.response_tokens
    assert sum(map(len, turns)) == len(rollout.old_logprobs)


@pytest.mark.parametrize("observed", [[(0, 1)], [(1, 3)], [(1, 1)], [(1, 2), (2, 2)], [(2, 1)], [(1, 9)], [(-1, 1)]])
def test_runs_that_are_none_are_refused(observed):
    with pytest.raises(InputError, match="sample 3: observed=.* with drawn tokens around each"):
        Rollout(3, (1,), (4, 5, 6), torch.zeros(2), "stop", observed=observed)


@pytest.mark.parametrize("name", NAMES)
def test_a_failed_sample_is_in_no_mean_and_no_loss(name):
    """The second prompt of three has one sample left, the third none but failed ones."""
    algorithm = AlgorithmConfig(name=name, kl_coef=0, whiten_advantages=False)
    scores, ratios = [6.0, 3.0, 100.0, 1.0, 50.0, 7.0, 8.0], [[0.0, 0.0], *([0.0] for _ in range(6))]
    groups, failed = torch.tensor([3, 3, 3, 4, 4, 5, 5]), torch.tensor([0, 0, 1, 0, 1, 1, 1]).bool()
    batch = batch_of(scores, ratios).with_fields(values=torch.arange(8.0))
    rollouts = [
        Rollout(i, (1,), (2,) * len(own), torch.full((len(own),), -1.0), "stop", score=score, failed=bool(failed[i]))
        for i, (own, score) in enumerate(zip(ratios, scores))
    ]
    marked = RolloutBatch.from_rollouts(rollouts).with_fields(values=batch.values, ref_logprobs=batch.ref_logprobs)
    assert torch.equal(marked.failed, failed) and torch.equal(marked.counted, ~failed[marked.owners])
    found = add_advantages(add_token_rewards(marked, algorithm, 8), algorithm, groups)
    compares = name not in ("ppo", "reinforce++")
    assert found.counted.tolist() == [True, True, True, False, not compares, False, False, False]
    assert found.select([3, 0]).counted.tolist() == [not compares, True, True]
    alone = add_token_rewards(batch.select([0, 1]), algorithm, 8)
    assert torch.equal(found.advantages[:3], add_advantages(alone, algorithm, groups[:2]).advantages)
    assert {5, 6} <= spared_samples(found, SimpleNamespace(skips=True)) and len(found) == 7
    assert not compares or (found.advantages[3:] == 0).all()
