"""Settings of the algorithm: how samples are compared, what the loss is, which groups are trained on."""

from __future__ import annotations

from typing import Literal

from rlhfuse.config.settings_group import Settings, key
from rlhfuse.config.values import (
    AUTO,
    AutoOrTruth,
    Count,
    Float,
    NonNegative,
    Positive,
    PositiveOrAuto,
    Real,
    Share,
    Truth,
)
from rlhfuse.tasks.algorithm import ALGORITHMS, Algorithm, Name


class FilterGroupsConfig(Settings):
    enable: Truth = key(
        False, "train on prompts whose samples' scores differ, and draw others for the rest (dynamic sampling of DAPO)"
    )
    metric: Literal["score"] = key("score", "what must differ: the score of a sample, before it is scaled or shaped")
    max_num_gen_batches: Positive = key(
        10, "prompts that an iteration may try, as a multiple of rollout.prompts_per_iteration; 2 or more"
    )
    max_inflight_gen_batches: Positive = key(
        2, "prompts under way whose scores are not known yet, at most, as the same multiple"
    )
    on_shortage: Literal["fill", "error"] = key(
        "fill", "where all that may be tried are too few: fill with the first whose scores are equal, or end the run"
    )
    streaming: Truth = key(
        True, "begin further prompts while others still decode, where reward.function alone scores; else in rounds"
    )


class PolicyLossConfig(Settings):
    loss_mode: Literal["vanilla", "gspo", "cispo", "sapo"] = key(
        "vanilla",
        "loss of a token: vanilla (the clipped ratio), gspo (that of its sample), cispo (its log-probability with a "
        "clipped weight) or sapo (a soft gate of the ratio)",
    )
    tau_pos: Float = key(1.0, "temperature of sapo's gate where the advantage is positive", ge=1e-3, le=1e3)
    tau_neg: Float = key(1.05, "temperature of sapo's gate elsewhere", ge=1e-3, le=1e3)

    @property
    def by_sample(self) -> bool:
        """Whether it is a mean over each sample's tokens, and then over samples, whatever `loss_agg_mode` says."""
        return self.loss_mode in ("gspo", "sapo")

    @property
    def by_token(self) -> bool:
        """True if the loss of a token depends only on the log-probability of that token."""
        return self.loss_mode != "gspo"


class AlgorithmConfig(Settings):
    name: Name = key("ppo", "ppo (with a critic), grpo, rloo, reinforce++ or reinforce_plus_plus_baseline (without)")
    gamma: Share = key(1.0, "discount; 1 where samples of a prompt are compared")
    lam: Share = key(0.95, "lambda of GAE; ppo")
    group_std: Truth = key(True, "divide by the standard deviation of the prompt's samples; grpo")
    whiten_advantages: AutoOrTruth = key(
        "auto", "zero mean and unit variance over the whole batch: true, false, or auto: except with grpo and rloo"
    )
    kl_coef: NonNegative = key(0.05, "weight of the KL to the reference")
    kl_in: Literal["auto", "reward", "loss"] = key(
        "auto",
        "reward: part of the token rewards; loss: part of the policy's loss; auto: loss with grpo and "
        "reinforce_plus_plus_baseline, else reward",
    )
    kl_estimator: Literal["auto", "k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = key(
        "auto", "k1, k2, k3, abs; with +: that value, k2's gradient; or auto: k3 in the loss, k1 in the reward"
    )
    kl_target: NonNegative = key(0.0, "0 = kl_coef stays; else it is steered towards this KL per sample, in nats")
    kl_horizon: Positive = key(10000, "samples over which kl_coef follows")
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = key(
        "token-mean",
        "what tokens' losses become over the whole mini-batch: their mean or sum; or the mean over samples of each "
        "one's sum, mean, or sum over loss_scale_factor (docs/reference/algorithms.md)",
    )
    loss_scale_factor: NonNegative = key(
        0.0, "what seq-mean-token-sum-norm divides by, as max_response_tokens; 0 = not given: for the other modes"
    )
    mask_truncated_completions: Truth = key(
        False, "samples cut at max_response_tokens count in baselines of their prompt, and not in any loss"
    )
    clip_eps: Float = key(0.2, "the policy ratio is clipped to 1 +- this; 1 = no lower bound", gt=0, le=1)
    clip_eps_high: NonNegative = key(0.0, "upper bound 1 + this; 0 = clip_eps")
    dual_clip: NonNegative = key(
        0.0, "0 = off; else the largest ratio, above 1, that counts where the advantage is negative"
    )
    value_clip_eps: NonNegative = key(0.2, "values are clipped to the old value +- this; 0 = no clip")
    value_loss_coef: NonNegative = key(1.0, "weight of the value loss, which has a factor 0.5 of its own")
    entropy_coef: Real = key(0.0, "weight of the entropy bonus")
    top_entropy_quantile: Share = key(
        1.0,
        "1 = off; else the policy's term counts this share of a mini-batch's tokens alone, those at which generation "
        "had the highest entropy",
    )
    minibatches: PositiveOrAuto = key(
        AUTO, "optimizer steps per epoch; auto: 4, or the most below that cut the samples evenly, 4 or more to each"
    )
    epochs: Positive = key(1, "passes over the batch of an iteration, each in an order of its own")
    skip_zero_gradients: Truth = key(
        False,
        "do not train on samples whose gradient is exactly 0, as those of a prompt with equal rewards: with grpo and "
        "rloo, without whitening, and without KL and entropy in the loss. Gradients stay, sums end in other last bits",
    )
    score_scale: Real = key(1.0, "scores are multiplied by this; not 0")
    scale_scores: Truth = key(
        False, "scores are also divided by the standard deviation of all scores of the run so far"
    )
    score_clip: NonNegative = key(0.0, "0 = off; else scaled scores are clipped to [-score_clip, score_clip]")
    missing_eos_penalty: NonNegative = key(0.0, "subtracted from the score of a sample cut at max_response_tokens")
    length_penalty: NonNegative = key(
        0.0, "subtracted from the score of a response of max_response_tokens; of shorter ones their share"
    )
    overlong_penalty: NonNegative = key(
        0.0, "subtracted at max_response_tokens, growing over the overlong tokens before it"
    )
    overlong_tokens: Count = key(0, "the last so many tokens in which the overlong penalty grows")
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()

    @property
    def row(self) -> Algorithm:
        return ALGORITHMS[self.name]

    @property
    def has_critic(self) -> bool:
        return "critic" in self.row.roles

    @property
    def groups(self) -> bool:
        """Whether a sample is compared with the others of its prompt."""
        return self.row.compares

    @property
    def kl_place(self) -> str:
        """`kl_in`, auto resolved."""
        return self.row.kl_in if self.kl_in == "auto" else self.kl_in

    @property
    def estimator(self) -> str:
        """`kl_estimator`, auto resolved."""
        return {"reward": "k1", "loss": "k3"}[self.kl_place] if self.kl_estimator == "auto" else self.kl_estimator

    @property
    def whitens(self) -> bool:
        return self.row.whitens if self.whiten_advantages == "auto" else self.whiten_advantages == "true"

    @property
    def has_zero_gradients(self) -> bool:
        """Whether a sample without advantage has no gradient, and groups of equal rewards give such samples."""
        kl_in_loss = self.kl_place == "loss" and self.kl_coef
        return self.groups and not (self.whitens or self.entropy_coef or kl_in_loss)

    @property
    def skips(self) -> bool:
        """Whether training leaves samples out."""
        return self.skip_zero_gradients and self.has_zero_gradients
