"""What the values of a configuration must keep together: combinations that do not contradict each other.

Every refusal is an InputError that names the key, its value and what would do. What needs models, files or the number
of ranks is checked where those are read (planning/, run/, decisions/layouts.py).
"""

from __future__ import annotations

from rlhfuse.config.role import Role
from rlhfuse.config.settings import RunConfig
from rlhfuse.errors import InputError


def check_config(config: RunConfig) -> None:
    """Raise InputError for the first rule that `config`, its defaults filled, does not keep."""
    _check_algorithm(config)
    _check_kl(config)
    _check_penalties(config)
    _check_models(config)
    _check_threshold(config)
    _check_waits(config)
    _check_trainer(config)
    if not config.data.train_files:
        raise InputError("data.train_files is empty; give at least one prompt file")


def _check_algorithm(config: RunConfig) -> None:
    algorithm = config.algorithm
    if 0 < algorithm.dual_clip <= 1:
        raise InputError(f"algorithm.dual_clip={algorithm.dual_clip} must be above 1, or 0 for none")
    if not algorithm.score_scale:
        raise InputError("algorithm.score_scale=0.0 discards every score; 1 leaves them, below 0 flips their sign")
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
    if Role.REFERENCE not in config.roles() and algorithm.kl_coef:
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
    for kind, source in (("model", "path"), ("function", "function")):
        weight = getattr(reward, f"{kind}_weight")
        if weight != 1 and not getattr(reward, source):
            raise InputError(f"reward.{kind}_weight={weight} weighs a {kind}, but reward.{source} is not set")
        if weight == 0 and getattr(reward, source):
            raise InputError(f"reward.{kind}_weight=0.0 discards what reward.{source} gives; drop reward.{source}")
    if not algorithm.has_critic and config.critic.path:
        raise InputError(
            f"algorithm.name={algorithm.name} has no critic, but critic.path={config.critic.path}; drop critic.path"
        )


def _check_threshold(config: RunConfig) -> None:
    threshold, least, samples = config.fusion.threshold, config.fusion.least_threshold, config.samples_per_iteration
    if least > samples:
        raise InputError(f"fusion.least_threshold={least} > {samples} samples of one iteration; use a smaller one")
    if threshold == "auto":
        return
    if not (threshold.isascii() and threshold.isdigit() and len(threshold) < 20):
        raise InputError(f"fusion.threshold={threshold!r} must be auto or a number of samples")
    if int(threshold) > samples:
        raise InputError(f"fusion.threshold={threshold} > {samples} samples of one iteration; use a smaller one")
    if int(threshold) < least:
        raise InputError(
            f"fusion.threshold={threshold} < fusion.least_threshold={least}, which is for threshold=auto; drop one"
        )


def _check_waits(config: RunConfig) -> None:
    """What a rank may wait for must end before the job is taken for hanging."""
    hang = config.trainer.hang_seconds
    waits = {"trainer.watchdog_seconds": config.trainer.watchdog_seconds}
    if config.reward.function:
        waits["reward.timeout_seconds"] = config.reward.timeout_seconds
    if config.fusion.intra_stage and not config.fusion.schedule:
        waits["fusion.search_seconds"] = config.fusion.search_seconds
    for key, seconds in waits.items():
        if seconds >= hang:
            raise InputError(f"{key}={seconds:g} must be below trainer.hang_seconds={hang:g}, which ends the job")


def _check_trainer(config: RunConfig) -> None:
    trainer, data = config.trainer, config.data
    if not trainer.resume:
        raise InputError("trainer.resume='' must be auto, never or the path of a checkpoint")
    if trainer.wandb != "off" and not trainer.wandb_project:
        raise InputError("trainer.wandb_project='' has no name for the run's project; set it or trainer.wandb=off")
    if data.apply_chat_template and data.add_bos != "auto":
        raise InputError(
            f"data.add_bos={data.add_bos} is for plain text: data.apply_chat_template=true leaves it to the template; "
            "use auto"
        )
    for role in config.trained():
        optim = getattr(config, role).optim
        if optim.name == "sgd" and (trainer.save_every or trainer.resume not in ("auto", "never")):
            raise InputError(
                f"{role}.optim.name=sgd has no checkpoints; set trainer.save_every=0 and trainer.resume=never, or "
                f"{role}.optim.name=adam"
            )
