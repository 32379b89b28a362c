"""What one value of a configuration may be: its type as YAML gives it, its range, its names.

A value is looked at by itself here; what several of them must keep together stands in config_rules.py. Every numeric
key has a row in RANGES. Every refusal is an InputError that names the key, its value and what would do.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhfuse.errors import InputError

if TYPE_CHECKING:
    from rlhfuse.config.settings import RunConfig

LARGEST = 2**31 - 1  # of whole numbers without a limit of their own: torch and Megatron count in int32 in places
LARGEST_REAL = 3e38  # what is larger is infinite in float32
LONGEST_SECONDS = 1e7  # of a wait, 115 days: libraries count it in milliseconds


class Range(NamedTuple):
    """Finite numbers from `low` to `high`; `above`, `below`: without `low`, without `high`."""

    low: float
    high: float = math.inf  # the largest of the value's kind
    above: bool = False
    below: bool = False

    def refusal(self, value: float) -> str:
        """What is wrong with it, '' where it is in the range."""
        if isinstance(value, float) and not math.isfinite(value):
            return "must be finite"
        most = LARGEST if isinstance(value, int) else LARGEST_REAL
        low, high = max(self.low, -most), most if math.isinf(self.high) else self.high
        too_low = value <= low if self.above else value < low
        too_high = value >= high if self.below else value > high
        if not too_low and not too_high:
            return ""
        if math.isfinite(self.high):
            return f"must be in {'(' if self.above else '['}{low:n}, {high:n}{')' if self.below else ']'}"
        return f"must be at most {high:n}" if too_high else f"must be {'above' if self.above else 'at least'} {low:n}"


ANY, AT_LEAST_0, AT_LEAST_1 = Range(-math.inf), Range(0), Range(1)
ABOVE_0, SHARE, WAIT = Range(0, above=True), Range(0, 1), Range(0, LONGEST_SECONDS, above=True)
PROCESSES = Range(1, 1024)

OPTIMIZER = {
    "lr": AT_LEAST_0,
    "warmup_iterations": AT_LEAST_0,
    "weight_decay": AT_LEAST_0,
    "beta1": Range(0, 1, below=True),
    "beta2": Range(0, 1, below=True),
    "eps": ABOVE_0,
    "clip_grad": AT_LEAST_0,
}
RANGES = {
    **{f"{role}.optim.{name}": limits for role in ("actor", "critic") for name, limits in OPTIMIZER.items()},
    "reward.timeout_seconds": WAIT,
    "reward.workers": PROCESSES,
    "reward.model_weight": ANY,
    "reward.function_weight": ANY,
    "data.max_prompt_tokens": AT_LEAST_1,
    "rollout.prompts_per_iteration": Range(1, 2**23),  # a sample's id has so many bits for each (data/sampler.py)
    "rollout.samples_per_prompt": Range(1, 2**16),
    "rollout.max_response_tokens": AT_LEAST_1,
    "rollout.temperature": Range(1e-3, 1e3),  # 0 would be greedy: PPO samples its rollouts
    "rollout.top_k": AT_LEAST_0,
    "rollout.top_p": Range(0, 1, above=True),
    "rollout.block_tokens": AT_LEAST_1,
    "rollout.kv_blocks_per_instance": AT_LEAST_0,
    "rollout.max_sequences_per_instance": AT_LEAST_1,
    "rollout.max_batched_tokens": AT_LEAST_1,
    "algorithm.gamma": SHARE,
    "algorithm.lam": SHARE,
    "algorithm.kl_coef": AT_LEAST_0,
    "algorithm.kl_target": AT_LEAST_0,
    "algorithm.kl_horizon": AT_LEAST_1,
    "algorithm.clip_eps": Range(0, 1, above=True, below=True),
    "algorithm.clip_eps_high": AT_LEAST_0,
    "algorithm.dual_clip": AT_LEAST_0,
    "algorithm.value_clip_eps": AT_LEAST_0,
    "algorithm.value_loss_coef": AT_LEAST_0,
    "algorithm.entropy_coef": ANY,
    "algorithm.minibatches": AT_LEAST_1,
    "algorithm.epochs": AT_LEAST_1,
    "algorithm.score_scale": ANY,
    "algorithm.score_clip": AT_LEAST_0,
    "algorithm.missing_eos_penalty": AT_LEAST_0,
    "algorithm.length_penalty": AT_LEAST_0,
    "algorithm.overlong_penalty": AT_LEAST_0,
    "algorithm.overlong_tokens": AT_LEAST_0,
    "fusion.least_threshold": AT_LEAST_0,
    "fusion.max_triggers": AT_LEAST_1,
    "fusion.bs_max": AT_LEAST_0,
    "fusion.search_seconds": WAIT,
    "fusion.actor_microbatches": AT_LEAST_1,
    "fusion.bucket_mib": AT_LEAST_1,
    "trainer.iterations": Range(1, 2**24),  # as above
    "trainer.save_every": AT_LEAST_0,
    "trainer.keep_checkpoints": AT_LEAST_1,
    "trainer.seed": Range(0, 2**63 - 1),
    "trainer.memory_limit_gb": AT_LEAST_0,
    "trainer.peak_tflops": AT_LEAST_0,
    "trainer.threads_per_rank": PROCESSES,
    "trainer.watchdog_seconds": WAIT,
    "trainer.hang_seconds": WAIT,
    "trainer.sample_texts": AT_LEAST_0,
    "trainer.trace_iterations": AT_LEAST_0,
}
NAMES = {
    "algorithm.name": ("ppo", "grpo", "rloo", "reinforce++"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
    "algorithm.kl_in": ("reward", "loss"),
    "algorithm.whiten_advantages": ("auto", "true", "false"),
    "data.add_bos": ("auto", "true", "false"),
    "reward.signature": ("verl", "trl"),
    "actor.optim.name": ("adam", "sgd"),
    "critic.optim.name": ("adam", "sgd"),
    "trainer.dtype": ("float32", "bfloat16"),
    "trainer.wandb": ("off", "online", "offline"),
    "trainer.recompute": ("none", "full"),
    "trainer.device": ("auto", "cpu", "cuda"),
}
TRUTHS = ("algorithm.whiten_advantages", "data.add_bos")  # texts that YAML may give as true and false


def check_type(key: str, value: Any, default: Any, where: str) -> None:
    """Raise InputError for a raw value, as YAML gives it, that must not become what `default` is.

    OmegaConf converts and refuses the rest, but takes 2 for true and true for 1.
    """
    wanted = ""
    if value == "???" or isinstance(value, list) and "???" in value:
        wanted = "a value, not OmegaConf's mark of a missing one"
    elif isinstance(value, str) and "${" in value:
        return  # what it stands for is converted when the whole is there
    elif isinstance(default, bool):
        wanted = "" if isinstance(value, (bool, str)) else "true or false"
    elif isinstance(default, (int, float)):
        wanted = "a number" if isinstance(value, bool) else ""
    elif isinstance(default, list):
        texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
        wanted = "" if texts else "a list of texts like [a.jsonl, b.jsonl]"
    elif isinstance(value, bool) and key not in TRUTHS:
        wanted = "a text"
    if wanted:
        raise InputError(f"{where}: {key}={value!r} must be {wanted}")


def check_values(config: RunConfig) -> None:
    """Raise InputError for the first number out of its range and the first name that is not known."""
    for key, limits in RANGES.items():
        if refusal := limits.refusal(value_of(config, key)):
            raise InputError(f"{key}={value_of(config, key)} {refusal}")
    for key, known in NAMES.items():
        value = value_of(config, key)
        if (value.lower() if key in TRUTHS else value) not in known:
            raise InputError(f"{key}={value!r} must be one of {', '.join(known)}")


def value_of(config: RunConfig, key: str) -> Any:
    """The value under a dotted key."""
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found
