"""Advantages without a critic, masks, penalties and the KL controller against closed forms written out in Python."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples

from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import AlgorithmConfig
from rlhfuse.ppo.adaptive import KLController
from rlhfuse.ppo.advantage import BLOCK, add_advantages, generalized_advantages, group_normalised, leave_one_out
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.ppo.token_rewards import add_token_rewards, sample_kl, sample_rewards, shaped_scores

SCORES = st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=6)


def make_batch(scores, lengths, refs=None, reasons=None):
    """Samples with old logprobs of -1 and the given log-ratios to the reference."""
    rollouts = []
    for i, (score, length) in enumerate(zip(scores, lengths)):
        old = torch.full((length,), -1.0)
        ref = old - torch.tensor(refs[i]) if refs else None
        reason = reasons[i] if reasons else "stop"
        rollouts.append(Rollout(i, (1,), (2,) * length, old, reason, ref_logprobs=ref, score=score))
    return RolloutBatch.from_rollouts(rollouts)


# groups ---------------------------------------------------------------------------------------------------------


@examples(40)
@given(groups=st.lists(SCORES, min_size=1, max_size=4), interleaved=st.booleans())
def test_group_advantages_equal_the_textbook(groups, interleaved):
    rows = [(g, score) for g, scores in enumerate(groups) for score in scores]
    if interleaved:
        rows = rows[::2] + rows[1::2]
    number, rewards = torch.tensor([7 * g for g, _ in rows]), torch.tensor([score for _, score in rows])
    normalised, centred = group_normalised(rewards, number), group_normalised(rewards, number, divide=False)
    alone = leave_one_out(rewards, number)
    for place, (g, score) in enumerate(rows):
        scores = groups[g]
        mean, spread = statistics.fmean(scores), statistics.stdev(scores)
        others = (math.fsum(scores) - score) / (len(scores) - 1)
        assert centred[place].item() == pytest.approx(score - mean, abs=1e-9)
        # with (nearly) equal scores the division is by the epsilon alone, which magnifies rounding
        assert normalised[place].item() == pytest.approx((score - mean) / (spread + 1e-6), abs=1e-8)
        assert alone[place].item() == pytest.approx(score - others, abs=1e-9)


def test_equal_scores_of_a_prompt_say_nothing():
    equal = torch.full((4,), 0.7)
    assert group_normalised(equal, torch.zeros(4, dtype=torch.int64)).abs().max() < 1e-9
    assert leave_one_out(equal, torch.zeros(4, dtype=torch.int64)).abs().max() < 1e-9


def test_equal_scores_with_grpos_defaults_train_on_nothing():
    """In the rewards the KL's noise, divided by its own deviation, would be all that there is."""
    algorithm, number = AlgorithmConfig(name="grpo"), torch.zeros(8, dtype=torch.int64)
    refs = [[0.01 * math.sin(7 * i + j) for j in range(5)] for i in range(8)]
    batch = add_token_rewards(make_batch([0.0] * 8, [5] * 8, refs=refs), algorithm, 8)
    assert add_advantages(batch, algorithm, number).advantages.abs().max() == 0
    in_reward = algorithm.with_(kl_in="reward")
    batch = add_advantages(add_token_rewards(batch, in_reward, 8), in_reward, number)
    assert batch.advantages.abs().max() > 1  # an explicit place is kept


def test_a_prompt_with_one_sample_is_refused():
    for function in (group_normalised, leave_one_out):
        with pytest.raises(InputError, match="prompt 5 has one sample"):
            function(torch.ones(3), torch.tensor([4, 5, 4]))


@pytest.mark.parametrize("name, expected", [("grpo", [1, 1, -1, -1, -1]), ("rloo", [4, 4, -4, -4, -4])])
def test_every_token_gets_its_samples_advantage(name, expected):
    algorithm = AlgorithmConfig(name=name, kl_coef=0.0)
    batch = add_token_rewards(make_batch([5.0, 1.0], [2, 3]), algorithm, 8)
    batch = add_advantages(batch, algorithm, torch.tensor([3, 3]))
    scale = 1 if name == "rloo" else 2 / (math.sqrt(8) + 1e-6)
    assert batch.advantages.tolist() == pytest.approx([scale * a for a in expected])
    assert batch.returns.tolist() == [5, 5, 1, 1, 1]


def test_kl_in_the_reward_counts_in_a_groups_rewards():
    algorithm = AlgorithmConfig(name="rloo", kl_coef=0.5)
    batch = make_batch([1.0, 2.0], [1, 2], refs=[[2.0], [1.0, 3.0]])
    batch = add_token_rewards(batch, algorithm, 8)
    assert sample_rewards(batch).tolist() == [0.0, 0.0]  # 1 - 0.5 * 2 and 2 - 0.5 * (1 + 3)
    assert sample_kl(batch).tolist() == [2.0, 4.0]
    assert add_advantages(batch, algorithm, torch.zeros(2, dtype=torch.int64)).advantages.tolist() == [0, 0, 0]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_reinforce_takes_what_is_still_to_come(gamma):
    algorithm = AlgorithmConfig(name="reinforce++", kl_coef=0.5, gamma=gamma)
    batch = add_token_rewards(make_batch([4.0], [3], refs=[[1.0, 2.0, 6.0]]), algorithm, 8)  # rewards -0.5, -1, 1
    batch = add_advantages(batch, algorithm)
    returns = [-0.5 - gamma + gamma**2, -1 + gamma, 1.0]
    assert batch.returns.tolist() == returns
    mean = statistics.fmean(returns)
    spread = math.sqrt(statistics.fmean([(r - mean) ** 2 for r in returns]) + 1e-8)
    assert batch.advantages.tolist() == pytest.approx([(r - mean) / spread for r in returns])


# blocks ---------------------------------------------------------------------------------------------------------


def test_bits_do_not_depend_on_the_batch():
    """A sample alone, and between others of any length, has the same bits in float64."""
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 5 * BLOCK + 7, 1, 2 * BLOCK, 70 * BLOCK + 1]
    rewards, values = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    whole = generalized_advantages(rewards, values, torch.tensor(lengths), 1.0, 0.95).split(lengths)
    for place, (r, v) in enumerate(zip(rewards.split(lengths), values.split(lengths))):
        alone = generalized_advantages(r, v, torch.tensor([len(r)]), 1.0, 0.95)
        assert torch.equal(alone, whole[place])


# scores and the KL coefficient ----------------------------------------------------------------------------------


def test_scores_are_scaled_clipped_and_penalised():
    batch = make_batch([10.0, 1.0, 1.0, -1.0], [2, 6, 8, 10], reasons=["stop", "stop", "stop", "length"])
    algorithm = AlgorithmConfig(
        score_scale=2.0,
        score_clip=3.0,
        missing_eos_penalty=0.5,
        length_penalty=1.0,
        overlong_penalty=2.0,
        overlong_tokens=4,
    )
    # of 10 tokens the last 4 cost up to 2.0: 6 tokens nothing, 8 half of it, 10 all
    expected = [3.0 - 0.2, 2.0 - 0.6, 2.0 - 0.8 - 1.0, -2.0 - 1.0 - 2.0 - 0.5]
    assert shaped_scores(batch, algorithm, 10).tolist() == pytest.approx(expected)
    assert shaped_scores(batch, AlgorithmConfig(), 10).tolist() == [10.0, 1.0, 1.0, -1.0]


def test_without_reference_or_with_kl_in_the_loss_rewards_are_scores():
    batch = make_batch([2.0], [2])
    assert add_token_rewards(batch, AlgorithmConfig(kl_coef=0.0), 8).token_rewards.tolist() == [0.0, 2.0]
    batch = make_batch([2.0], [2], refs=[[1.0, 1.0]])
    assert add_token_rewards(batch, AlgorithmConfig(kl_in="loss"), 8).token_rewards.tolist() == [0.0, 2.0]


def test_the_coefficient_follows_the_kl():
    control = KLController(0.1, target=6.0, horizon=1000)
    assert control.after(6.0, 64).coef == 0.1
    assert control.after(6.6, 100).coef == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    assert control.after(600.0, 100).coef == pytest.approx(0.1 * (1 + 0.2 * 100 / 1000))  # no further at once
    assert control.after(0.0, 100).coef == pytest.approx(0.1 * (1 - 0.2 * 100 / 1000))
    assert control.after(0.0, 10**6).coef == 0.05  # of a large batch: halved at most
    assert KLController(0.1).after(600.0, 64) == KLController(0.1)
    for _ in range(5000):
        control = control.after(-1.0, 10**6)
    assert control.coef == 1e-6 < control.after(600.0, 10**6).coef  # it can come back
    assert KLController(1e-9, target=6.0).after(0.0, 100).coef == 1e-9  # one that begins lower stays
