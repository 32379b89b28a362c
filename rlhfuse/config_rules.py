"""What the values of a configuration must keep: ranges, names, and combinations that do not contradict each other.

Every refusal is an InputError that names the key, its value and what would do. Rules that need models, files or the
number of ranks stand where those are read (preflight.py, simulator/layouts.py).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rlhfuse.errors import InputError

if TYPE_CHECKING:
    from rlhfuse.config import RunConfig

LOWEST = {
    "rollout.prompts_per_iteration": 1,
    "rollout.samples_per_prompt": 1,
    "rollout.max_response_tokens": 1,
    "rollout.block_tokens": 1,
    "rollout.max_sequences_per_instance": 1,
    "rollout.max_batched_tokens": 1,
    "rollout.top_k": 0,
    "rollout.kv_blocks_per_instance": 0,
    "data.max_prompt_tokens": 1,
    "trainer.sample_texts": 0,
    "fusion.least_threshold": 0,
    "algorithm.minibatches": 1,
    "algorithm.epochs": 1,
    "algorithm.kl_coef": 0,
    "algorithm.kl_target": 0,
    "algorithm.kl_horizon": 1,
    "algorithm.clip_eps_high": 0,
    "algorithm.dual_clip": 0,
    "algorithm.value_clip_eps": 0,
    "algorithm.value_loss_coef": 0,
    "algorithm.score_clip": 0,
    "algorithm.missing_eos_penalty": 0,
    "algorithm.length_penalty": 0,
    "algorithm.overlong_penalty": 0,
    "algorithm.overlong_tokens": 0,
    "reward.workers": 1,
    "fusion.actor_microbatches": 1,
    "fusion.bs_max": 0,
    "fusion.max_triggers": 1,
    "fusion.bucket_mib": 1,
    "trainer.iterations": 1,
    "trainer.save_every": 0,
    "trainer.keep_checkpoints": 1,
    "trainer.threads_per_rank": 1,
    "trainer.memory_limit_gb": 0,
    "trainer.peak_tflops": 0,
}
NAMES = {
    "algorithm.name": ("ppo", "grpo", "rloo", "reinforce++"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
    "algorithm.kl_in": ("reward", "loss"),
    "reward.signature": ("verl", "trl"),
    "actor.optim.name": ("adam", "sgd"),
    "critic.optim.name": ("adam", "sgd"),
    "trainer.dtype": ("float32", "bfloat16"),
    "trainer.wandb": ("off", "online", "offline"),
    "trainer.recompute": ("none", "full"),
    "trainer.device": ("auto", "cpu", "cuda"),
}
FINITE = ("gamma", "lam", "kl_coef", "clip_eps", "entropy_coef", "score_scale", "score_clip", "overlong_penalty")


def check_config(config: RunConfig) -> None:
    """Raise InputError for the first rule that `config`, its defaults filled, does not keep."""
    for key, low in LOWEST.items():
        if not value_of(config, key) >= low:
            raise InputError(f"{key}={value_of(config, key)} must be at least {low}")
    for key, known in NAMES.items():
        if value_of(config, key) not in known:
            raise InputError(f"{key}={value_of(config, key)!r} must be one of {', '.join(known)}")
    _check_rollout(config)
    _check_algorithm(config)
    _check_kl(config)
    _check_penalties(config)
    _check_models(config)
    _check_threshold(config)
    if not config.data.train_files:
        raise InputError("data.train_files is empty; give at least one prompt file")


def value_of(config: RunConfig, key: str) -> Any:
    """The value under a dotted key."""
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


def _check_rollout(config: RunConfig) -> None:
    if not config.rollout.temperature > 0:
        raise InputError(f"rollout.temperature={config.rollout.temperature} must be above 0: PPO samples its rollouts")
    if not 0 < config.rollout.top_p <= 1:
        raise InputError(f"rollout.top_p={config.rollout.top_p} must be in (0, 1]")


def _check_algorithm(config: RunConfig) -> None:
    algorithm = config.algorithm
    for key in FINITE:
        if not math.isfinite(getattr(algorithm, key)):
            raise InputError(f"algorithm.{key}={getattr(algorithm, key)} must be finite")
    for key in ("gamma", "lam"):
        if not 0 <= getattr(algorithm, key) <= 1:
            raise InputError(f"algorithm.{key}={getattr(algorithm, key)} must be in [0, 1]")
    if not 0 < algorithm.clip_eps < 1:
        raise InputError(f"algorithm.clip_eps={algorithm.clip_eps} must be in (0, 1)")
    if 0 < algorithm.dual_clip <= 1:
        raise InputError(f"algorithm.dual_clip={algorithm.dual_clip} must be above 1, or 0 for none")
    if str(algorithm.whiten_advantages).lower() not in ("auto", "true", "false"):
        raise InputError(f"algorithm.whiten_advantages={algorithm.whiten_advantages!r} must be auto, true or false")
    copies = config.rollout.samples_per_prompt
    if algorithm.groups and copies < 2:
        raise InputError(
            f"algorithm.name={algorithm.name} compares the samples of a prompt with each other: "
            f"rollout.samples_per_prompt={copies} must be at least 2"
        )
    if algorithm.groups and algorithm.gamma != 1:
        raise InputError(
            f"algorithm.name={algorithm.name} gives every token of a sample the same advantage: "
            f"algorithm.gamma={algorithm.gamma} must be 1"
        )
    if not algorithm.group_std and algorithm.name != "grpo":
        raise InputError(f"algorithm.group_std=false belongs to grpo; algorithm.name={algorithm.name} divides by none")


def _check_kl(config: RunConfig) -> None:
    algorithm = config.algorithm
    if "reference" not in config.roles() and algorithm.kl_coef:
        raise InputError(
            f"reference.path=none leaves no KL to measure: algorithm.kl_coef={algorithm.kl_coef} must be 0"
        )
    if algorithm.kl_target and not algorithm.kl_coef:
        raise InputError(
            f"algorithm.kl_target={algorithm.kl_target} steers algorithm.kl_coef by factors, so it cannot start at 0"
        )


def _check_penalties(config: RunConfig) -> None:
    algorithm, longest = config.algorithm, config.rollout.max_response_tokens
    if bool(algorithm.overlong_penalty) != bool(algorithm.overlong_tokens):
        raise InputError(
            f"algorithm.overlong_penalty={algorithm.overlong_penalty} and "
            f"algorithm.overlong_tokens={algorithm.overlong_tokens} belong together; set both or neither"
        )
    if algorithm.overlong_tokens > longest:
        raise InputError(
            f"algorithm.overlong_tokens={algorithm.overlong_tokens} > rollout.max_response_tokens={longest}; "
            "the penalty begins so many tokens before the end"
        )


def _check_models(config: RunConfig) -> None:
    algorithm, reward = config.algorithm, config.reward
    if not config.actor.path:
        raise InputError("actor.path is not set; give a Hugging Face folder or hub name")
    if not reward.path and not reward.function:
        raise InputError("reward.path is not set, nor is reward.function; give a model, a function or both")
    for key in ("model_weight", "function_weight"):
        if not math.isfinite(getattr(reward, key)):
            raise InputError(f"reward.{key}={getattr(reward, key)} must be finite")
    for kind, source in (("model", "path"), ("function", "function")):
        weight = getattr(reward, f"{kind}_weight")
        if weight != 1 and not getattr(reward, source):
            raise InputError(f"reward.{kind}_weight={weight} weighs a {kind}, but reward.{source} is not set")
        if weight == 0 and getattr(reward, source):
            raise InputError(f"reward.{kind}_weight=0.0 takes no notice of reward.{source}; drop reward.{source}")
    if not (reward.timeout_seconds > 0 and math.isfinite(reward.timeout_seconds)):
        raise InputError(f"reward.timeout_seconds={reward.timeout_seconds} must be above 0 and finite")
    if not algorithm.has_critic and config.critic.path:
        raise InputError(
            f"algorithm.name={algorithm.name} has no critic, but critic.path={config.critic.path}; drop critic.path"
        )


def _check_threshold(config: RunConfig) -> None:
    threshold = config.fusion.threshold
    if threshold == "auto":
        return
    if not threshold.isdigit():
        raise InputError(f"fusion.threshold={threshold!r} must be auto or a number of samples")
    if int(threshold) > config.samples_per_iteration:
        raise InputError(
            f"fusion.threshold={threshold} > {config.samples_per_iteration} samples of one iteration; "
            "use a smaller one"
        )
