"""A mini-batch's loss and gradient against the papers' formulas, written out as loops over samples and tokens.

The loops are moved by finite differences, token by token; what a formula stops the gradient of stays as it was. Samples
have gaps and may count nothing, log-ratios reach 25 nats, and micro-batches are cut and ordered at random.
"""

import functools
import math
import random
from dataclasses import dataclass
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.rollouts import batch_of

from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.fusion.intra.microbatches import Microbatch
from rlhfuse.fusion.intra.training_step import Losses
from rlhfuse.models.stage import Outbox
from rlhfuse.ppo.losses import highest_entropies, loss_metrics
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.tasks.role import Role

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
STEP = 1e-6


def clip(x, low, high):
    return min(max(x, low), high)


@dataclass
class Case:
    """Samples as lists of tokens, in Python's float64: what the policy says now is `now`, and `values` the critic."""

    algorithm: AlgorithmConfig
    counted: list[list[bool]]
    now: list[list[float]]
    old: list[list[float]]
    reference: list[list[float]]
    advantages: list[list[float]]
    entropies: list[list[float]]
    values: list[list[float]]
    old_values: list[list[float]]
    returns: list[list[float]]
    kept: list[list[bool]]  # by the policy's term

    @staticmethod
    def random(seed: int) -> "Case":
        rng = random.Random(seed)
        lengths = [rng.randint(1, 7) for _ in range(rng.randint(1, 6))]
        masked = rng.random() < 0.7
        empty = [masked and rng.random() < 0.25 for _ in lengths]
        loss_mode = rng.choice(("vanilla", "gspo", "cispo", "sapo"))
        alike, keeps = rng.random() < 0.5, rng.choice((1.0, 1.0, 0.5))

        def draw(scale: float, far: float = 0.0) -> list[list[float]]:
            def one() -> float:
                return rng.uniform(-far, far) if far and rng.random() < 0.15 else rng.gauss(0, scale)

            return [[one() for _ in range(length)] for length in lengths]

        now = draw(1.0)
        near = rng.choice((0.02, 0.3))
        by_sample = [rng.gauss(0, 1) for _ in lengths]
        factor = rng.choice((3.0, 40.0))
        mode = rng.choice(MODES if loss_mode in ("vanilla", "cispo") else (MODES[0], MODES[3]))
        algorithm = AlgorithmConfig().with_(
            policy_loss=dict(loss_mode=loss_mode, tau_pos=rng.uniform(0.5, 2), tau_neg=rng.uniform(0.5, 2)),
            loss_agg_mode=mode,
            loss_scale_factor=factor if mode == MODES[4] else 0.0,
            clip_eps=1.0 if rng.random() < 0.2 else rng.uniform(0.01, 0.9),
            clip_eps_high=rng.choice((0.0, rng.uniform(0.01, 4))),
            dual_clip=rng.choice((0.0, 1.5, 3.0)),
            kl_in="loss",
            kl_coef=rng.choice((0.0, 0.2)),
            kl_estimator=rng.choice(ESTIMATORS),
            entropy_coef=rng.choice((0.0, 0.1, -0.1)),
            value_clip_eps=rng.choice((0.0, 0.2)),
            value_loss_coef=rng.choice((1.0, 0.5)),
        )
        return Case(
            algorithm,
            [[not none and not (masked and rng.random() < 0.2) for _ in range(n)] for none, n in zip(empty, lengths)],
            now,
            [[x - far for x, far in zip(*rows)] for rows in zip(now, draw(near, 25.0))],
            [[x - far for x, far in zip(*rows)] for rows in zip(now, draw(near, 25.0))],
            [[a] * n for a, n in zip(by_sample, lengths)] if alike else draw(1.0),
            draw(1.0),
            draw(1.0),
            draw(1.0),
            draw(1.0),
            [[rng.random() < keeps for _ in range(n)] for n in lengths],
        )

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """(sample, token) of those that count."""
        return [(i, t) for i, row in enumerate(self.counted) for t, counts in enumerate(row) if counts]

    def weight(self, i: int, mode: str) -> float:
        """What the loss of a token of sample i is multiplied by."""
        own, all_tokens, samples = sum(self.counted[i]), len(self.tokens), len(self.counted)
        return {
            "token-mean": 1 / all_tokens,
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / samples,
            "seq-mean-token-mean": 1 / samples / own,
            "seq-mean-token-sum-norm": 1 / samples / (self.algorithm.loss_scale_factor or 1),
        }[mode]

    # The terms of the loss, each a number that belongs to one token or to one sample; `now` may be moved.

    def actor_terms(self, now: list[list[float]]) -> list[float]:
        a, mode, whole = self.algorithm, self.algorithm.loss_agg_mode, [self.is_whole(i) for i in range(len(now))]
        found = [self.gspo(now, i) for i, one in enumerate(whole) if one]
        for i, t in self.tokens:
            weight = self.weight(i, mode)
            if self.kept[i][t] and not whole[i]:
                policy_mode = mode if a.policy_loss.loss_mode in ("vanilla", "cispo") else "seq-mean-token-mean"
                found.append(self.weight(i, policy_mode) * self.policy(now, i, t))
            found.append(weight * a.kl_coef * self.kl(now[i][t] - self.reference[i][t], i, t))
            found.append(-weight * a.entropy_coef * self.entropies[i][t])
        return found

    def is_whole(self, i: int) -> bool:
        """Whether GSPO's loss of this sample is of its ratio alone: its tokens have one advantage, and all train."""
        alike = len(set(self.advantages[i])) == 1 and all(self.kept[i]) and any(self.counted[i])
        return self.algorithm.policy_loss.loss_mode == "gspo" and alike

    def gspo(self, now: list[list[float]], i: int) -> float:
        """Zheng et al. 2025, eq. 5 and 7."""
        return self.clipped(math.exp(clip(self.mean_ratio(now, i), -20, 20)), self.advantages[i][0]) / len(now)

    def mean_ratio(self, now: list[list[float]], i: int) -> float:
        mine = [t for t, counts in enumerate(self.counted[i]) if counts]
        return sum(now[i][t] - self.old[i][t] for t in mine) / len(mine)

    def clipped(self, r: float, advantage: float) -> float:
        a = self.algorithm
        gain = min(r * advantage, clip(r, 1 - a.clip_eps, 1 + (a.clip_eps_high or a.clip_eps)) * advantage)
        return -max(gain, a.dual_clip * advantage) if a.dual_clip and advantage < 0 else -gain

    def policy(self, now: list[list[float]], i: int, t: int) -> float:
        a, x, advantage = self.algorithm, now[i][t] - self.old[i][t], self.advantages[i][t]
        if a.policy_loss.loss_mode == "gspo":  # eq. 13: the mean stands still, the token moves
            x = self.mean_ratio(self.now, i) + now[i][t] - self.now[i][t]
        r = math.exp(clip(x, -20, 20))
        if a.policy_loss.loss_mode == "sapo":
            tau = a.policy_loss.tau_pos if advantage > 0 else a.policy_loss.tau_neg
            exponent = -tau * (r - 1)
            return -advantage * 4 / tau / (1 + math.exp(exponent) if exponent < 700 else math.inf)
        if a.policy_loss.loss_mode == "cispo":
            still = math.exp(clip(self.now[i][t] - self.old[i][t], -20, 20))
            return -advantage * clip(still, 1 - a.clip_eps, 1 + (a.clip_eps_high or a.clip_eps)) * now[i][t]
        return self.clipped(r, advantage)

    def kl(self, x: float, i: int, t: int) -> float:
        estimator = self.algorithm.kl_estimator
        if estimator.endswith("+"):  # its value, and what k2 has changed since then
            still = self.now[i][t] - self.reference[i][t]
            return self.plain_kl(still, estimator[:-1]) + (x * x - still * still) / 2
        return self.plain_kl(x, estimator)

    def plain_kl(self, x: float, estimator: str) -> float:
        x = clip(x, -20, 20)
        return {"k1": x, "k2": x * x / 2, "k3": min(math.exp(-x) - 1 + x, 10.0), "abs": abs(x)}[estimator]

    def critic_terms(self, values: list[list[float]]) -> list[float]:
        a, found = self.algorithm, []
        for i, t in self.tokens:
            v, old, r = values[i][t], self.old_values[i][t], self.returns[i][t]
            near = clip(v, old - a.value_clip_eps, old + a.value_clip_eps) if a.value_clip_eps else v
            worse = max((v - r) ** 2, (near - r) ** 2)
            found.append(self.weight(i, a.loss_agg_mode) * a.value_loss_coef * 0.5 * worse)
        return found

    def batch(self) -> RolloutBatch:
        rollouts = [
            Rollout(i, (1,) * (i % 3 + 1), (2,) * len(row), torch.zeros(len(row)), "stop")
            for i, row in enumerate(self.now)
        ]
        flat = {
            "old_logprobs": self.old,
            "ref_logprobs": self.reference,
            "advantages": self.advantages,
            "values": self.old_values,
            "returns": self.returns,
        }
        arrays = {name: torch.tensor(sum(rows, []), dtype=torch.float64) for name, rows in flat.items()}
        for name, rows in (("counted", self.counted), ("high_entropy", self.kept)):
            if not all(map(all, rows)):
                arrays[name] = torch.tensor(sum(rows, []))
        return RolloutBatch.from_rollouts(rollouts).with_fields(**arrays)


def loss_of_both(both, loss, rows, *_, by_token: bool, **__) -> torch.Tensor:
    """In two parts where a CUDA device has any."""
    half = len(rows) // 2 * by_token
    parts = [slice(half), slice(half, None)] if half else [slice(None)]
    return sum(loss(*(one[rows][part] for one in both), part) for part in parts)


class Model:
    """What the last stage gives out, from numbers that have gradients: of each sample one for each response token.

    With `weights` [2] all numbers move with these.
    """

    def __init__(self, rows, entropies, scalar_head: bool, weights: torch.Tensor | None = None) -> None:
        self.rows, self.entropies = (
            [torch.tensor(row, dtype=torch.float64).requires_grad_() for row in table] for table in (rows, entropies)
        )
        kind = ("value", "value") if scalar_head else ("logprobs", "policy")
        self.role, self.spec, self.weights = Role("model", *kind), SimpleNamespace(vocab=9), weights

    def packed(self, batch: RolloutBatch, part: list[int], leaves: list[torch.Tensor]) -> torch.Tensor:
        """One number for each token of packed samples; what predicts a response token lies before it."""
        rows = [leaves[i] for i in part]
        if self.weights is not None:
            rows = [row + self.weights[0] * row.square() + self.weights[1] * row.sin() for row in rows]
        return torch.cat(
            [torch.nn.functional.pad(row, (int(batch.prompt_lengths[i]) - 1, 1)) for i, row in zip(part, rows)]
        )

    def run(self, batch: RolloutBatch, parts: list[list[int]], algorithm: AlgorithmConfig) -> tuple[float, dict]:
        """Forward and backward of every part; (loss, statistics)."""
        losses, total = Losses(batch, algorithm, 1.0), 0.0
        microbatches = [Microbatch.of(batch.select(part), torch.device("cpu"), 1, Outbox()) for part in parts]
        loss = losses.of(self, microbatches, counts=True)
        for number, part in enumerate(parts):
            output = self.packed(batch, part, self.rows)
            if not self.role.scalar_head:
                both = output, self.packed(batch, part, self.entropies)
                output = SimpleNamespace(loss=functools.partial(loss_of_both, both))
            value = loss(output, number)
            value.backward()
            total += value.item()
        return total, losses.stats["model"]


def cut(rng: random.Random, samples: int) -> list[list[int]]:
    """All samples in a random order, in parts of at least one."""
    order = list(range(samples))
    rng.shuffle(order)
    borders = sorted(rng.sample(range(1, samples), rng.randint(0, samples - 1)))
    return [order[start:end] for start, end in zip([0, *borders], [*borders, samples])]


def slopes(terms, rows: list[list[float]], tokens: list[tuple[int, int]]) -> list[list[float]]:
    """The derivative by each token: what all terms gain, term by term, so that a large one hides no small one."""
    found, rows = [[0.0] * len(row) for row in rows], [list(row) for row in rows]
    for i, t in tokens:
        moved = []
        for step in (STEP, -STEP):
            rows[i][t] += step
            moved.append(terms(rows))
            rows[i][t] -= step
        found[i][t] = math.fsum(a - b for a, b in zip(*moved)) / (2 * STEP)
    return found


def assert_close(leaves: list[torch.Tensor], wanted: list[list[float]], case: Case) -> None:
    for i, row in enumerate(wanted):
        for t, slope in enumerate(row):
            size = 1 + math.exp(clip(case.now[i][t] - case.old[i][t], -20, 20))
            assert float(leaves[i].grad[t]) == pytest.approx(slope, rel=2e-6, abs=2e-9 * size), (i, t, case)


@examples(800)
@given(seed=st.integers(0, 2**40))
def test_loss_and_gradient_are_those_of_the_formulas_over_every_cut(seed):
    case = Case.random(seed)
    a, batch, parts = case.algorithm, case.batch(), cut(random.Random(seed + 1), len(case.now))
    actor = Model(case.now, case.entropies, scalar_head=False)
    loss, stats = actor.run(batch, parts, a)
    terms = case.actor_terms(case.now)
    assert loss == pytest.approx(math.fsum(terms), rel=1e-9, abs=1e-11 * (1 + sum(map(abs, terms))))
    assert_close(actor.rows, slopes(case.actor_terms, case.now, case.tokens), case)
    assert stats["entropy"].item() == pytest.approx(math.fsum(case.entropies[i][t] for i, t in case.tokens))
    for i, leaf in enumerate(actor.entropies if a.entropy_coef else ()):
        wanted = [-a.entropy_coef * case.weight(i, a.loss_agg_mode) if counts else 0.0 for counts in case.counted[i]]
        assert leaf.grad.tolist() == pytest.approx(wanted, rel=1e-12)
    critic = Model(case.values, case.entropies, scalar_head=True)
    loss, _ = critic.run(batch, parts, a)
    assert loss == pytest.approx(math.fsum(case.critic_terms(case.values)), rel=1e-10)
    assert_close(critic.rows, slopes(case.critic_terms, case.values, case.tokens), case)


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "cispo", "sapo"])
@pytest.mark.parametrize("mode", MODES)
def test_sums_of_gradients_are_equal_over_every_order_of_micro_batches(loss_mode, mode):
    """Two weights, on which all log-probabilities depend, have what is summed over micro-batches, and over ranks."""
    drawn = (Case.random(seed) for seed in range(999))
    case = next(one for one in drawn if len(one.now) == 5 and not all(map(all, one.counted)))
    changes = dict(loss_agg_mode=mode, loss_scale_factor=7.0, kl_coef=0.2, entropy_coef=0.1)
    algorithm = case.algorithm.with_(policy_loss=dict(loss_mode=loss_mode), **changes)
    found = []
    for parts in ([[0, 1, 2, 3, 4]], *permutations([[3, 0], [1], [4], [2]])):
        weights = torch.tensor([0.3, -0.2], dtype=torch.float64).requires_grad_()
        Model(case.now, case.entropies, False, weights).run(case.batch(), list(parts), algorithm)
        found.append(weights.grad)
    assert float(found[0].abs().min()) > 0
    assert float((torch.stack(found) / found[0] - 1).abs().max()) <= 1e-12


@pytest.mark.parametrize("quantile, kept", [(0.0, 1), (0.2, 3), (0.3, 4), (0.7, 8), (0.75, 8), (1.0, 11)])
def test_the_highest_entropies_of_those_that_count(quantile, kept):
    """As torch's interpolated quantile of the counted tokens, of any order, says."""
    counted = torch.tensor([True] * 11 + [False] * 4)
    entropies = torch.tensor([*range(11), 99, 98, 97, -1.0])
    order = torch.randperm(15, generator=torch.Generator().manual_seed(1))
    batch = batch_of([0.0] * 15).with_fields(entropies=entropies[order], counted=counted[order])
    found = highest_entropies(batch, quantile)
    assert int((found & batch.counted).sum()) == kept
    threshold = entropies[:11].quantile(1 - quantile) - 1e-6
    assert found.tolist() == (batch.entropies >= threshold).tolist()


def test_a_mini_batch_in_which_nothing_counts_has_no_loss():
    case = Case.random(7)
    batch = case.batch().counting(torch.zeros(len(case.now), dtype=torch.bool))
    assert highest_entropies(batch.with_fields(entropies=batch.advantages), 0.2).all()
    for mode in MODES:
        algorithm = AlgorithmConfig(loss_agg_mode=mode, loss_scale_factor=7)
        for scalar_head in (False, True):
            model = Model(case.now, case.entropies, scalar_head)
            loss, stats = model.run(batch, cut(random.Random(1), len(case.now)), algorithm)
            assert loss == 0.0 and not any(leaf.grad.any() for leaf in model.rows)
            metrics = loss_metrics("model", stats, 0)
            assert set(metrics.values()) == {0.0}
