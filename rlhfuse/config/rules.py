"""What the values of a configuration must keep together: combinations that do not contradict each other.

Every refusal is an InputError that names the key, its value and what would do. What needs models, files or the number
of ranks is checked where those are read (planning/, run/, decisions/layout_rules.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlhfuse.base.errors import InputError
from rlhfuse.base.sample_ids import PROMPT_BITS
from rlhfuse.config.auto_layouts import searched_keys
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.values import AUTO
from rlhfuse.tasks.role import LEARNERS
from rlhfuse.tasks.task import SCORERS


def check_config(config: RunConfig) -> None:
    """Raise InputError for the first rule that `config`, its defaults filled, does not keep."""
    for broken in (
        _algorithm,
        _microbatches,
        _learning_rates,
        _models,
        _ends,
        _tools,
        _threshold,
        _waits,
        _trainer,
        _pace,
        _evaluation,
    ):
        for message in broken(config):
            raise InputError(message)


def _algorithm(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if 0 < algorithm.dual_clip <= 1:
        yield f"algorithm.dual_clip={algorithm.dual_clip} must be above 1, or 0 for none"
    if not algorithm.score_scale:
        yield "algorithm.score_scale=0.0 discards every score; 1 leaves them, below 0 flips their sign"
    copies = config.rollout.samples_per_prompt
    if algorithm.groups and copies < 2:
        why = f"algorithm.name={algorithm.name} compares the samples of a prompt with each other"
        yield f"{why}: rollout.samples_per_prompt={copies} must be at least 2"
    if algorithm.filter_groups.enable and not algorithm.groups:
        yield f"algorithm.filter_groups.enable=true: algorithm.name={algorithm.name} has no groups; use grpo or rloo"
    if algorithm.filter_groups.enable and algorithm.filter_groups.max_num_gen_batches < 2:
        yield "algorithm.filter_groups.max_num_gen_batches=1 leaves no prompt to draw for others; use 2 or more"
    places = config.rollout.prompts_per_iteration * algorithm.filter_groups.max_num_gen_batches
    if algorithm.filter_groups.enable and places > 2**PROMPT_BITS:
        yield f"algorithm.filter_groups.max_num_gen_batches allows {places} prompts an iteration; lower it"
    if algorithm.groups and algorithm.gamma != 1:
        why = f"algorithm.name={algorithm.name} gives every token of a sample the same advantage"
        yield f"{why}: algorithm.gamma={algorithm.gamma} must be 1"
    if not algorithm.group_std and algorithm.row.advantage != "group_normalised":
        yield f"algorithm.group_std=false belongs to grpo; algorithm.name={algorithm.name} divides by none"
    if "reference" not in config.roles() and algorithm.kl_coef:
        yield f"reference.path=none leaves no KL to measure: algorithm.kl_coef={algorithm.kl_coef} must be 0"
    if algorithm.kl_target and not algorithm.kl_coef:
        yield f"algorithm.kl_target={algorithm.kl_target} steers algorithm.kl_coef by factors, so it cannot start at 0"
    if algorithm.kl_place == "loss" and algorithm.estimator == "k1" and algorithm.kl_coef:
        why = "in the loss has a gradient of mean 0 and holds nothing back"
        yield f"algorithm.kl_estimator=k1 {why}: use k3, or algorithm.kl_in=reward"
    yield from _aggregation(config)
    penalty, overlong = algorithm.overlong_penalty, algorithm.overlong_tokens
    if bool(penalty) != bool(overlong):
        both = f"algorithm.overlong_penalty={penalty} and algorithm.overlong_tokens={overlong}"
        yield f"{both} belong together; set both or neither"
    if overlong > (longest := config.rollout.max_response_tokens):
        told = f"algorithm.overlong_tokens={overlong} > rollout.max_response_tokens={longest}"
        yield f"{told}; the penalty begins so many tokens before the end"


def _aggregation(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    mode, factor, loss = algorithm.loss_agg_mode, algorithm.loss_scale_factor, algorithm.policy_loss
    if mode == "seq-mean-token-sum-norm" and not factor:
        longest = config.rollout.max_response_tokens
        yield f"algorithm.loss_agg_mode={mode} needs algorithm.loss_scale_factor, e.g. max_response_tokens={longest}"
    if factor and mode != "seq-mean-token-sum-norm":
        told = f"algorithm.loss_scale_factor={factor} belongs to seq-mean-token-sum-norm"
        yield f"{told}, not algorithm.loss_agg_mode={mode}; drop it, or change the mode"
    if loss.by_sample and mode not in ("token-mean", "seq-mean-token-mean"):
        why = f"algorithm.policy_loss.loss_mode={loss.loss_mode} is always seq-mean-token-mean"
        yield f"{why}: algorithm.loss_agg_mode={mode} must be that, or token-mean, for the other terms"


def _microbatches(config: RunConfig) -> Iterator[str]:
    tokens, count = config.fusion.microbatch_tokens, config.fusion.actor_microbatches
    if AUTO not in (tokens, count):
        both = f"fusion.microbatch_tokens={tokens} and fusion.actor_microbatches={count}"
        yield f"{both}: a mini-batch is cut by tokens or into a number of parts; set one of them to auto"


def _learning_rates(config: RunConfig) -> Iterator[str]:
    for role in config.trained():
        optim, where = getattr(config, role).optim, f"{role}.optim"
        if optim.warmup_iterations and optim.lr_warmup_ratio:
            both = f"{where}.warmup_iterations={optim.warmup_iterations} and {where}.lr_warmup_ratio"
            yield f"{both}={optim.lr_warmup_ratio} both say how long the warm-up is; drop one"
        end = optim.lr_decay_iterations
        warmup = max(optim.warmup_iterations, optim.lr_warmup_ratio * end)
        if optim.lr_scheduler_type != "constant" and warmup >= end:
            told = (
                f"{where}.lr_scheduler_type={optim.lr_scheduler_type} has no iteration after the warm-up of {warmup:g}"
            )
            yield f"{told}; use a shorter one, or {where}.lr_decay_iterations above {end}"


def _models(config: RunConfig) -> Iterator[str]:
    algorithm, reward = config.algorithm, config.reward
    if not config.actor.path:
        yield "actor.path is not set; give a Hugging Face folder or hub name"
    if not reward.path and not reward.function:
        yield "reward.path is not set, nor is reward.function; give a model, a function or both"
    for kind, source in (("model", "path"), ("function", "function")):
        weight = getattr(reward, f"{kind}_weight")
        if weight != 1 and not getattr(reward, source):
            yield f"reward.{kind}_weight={weight} weighs a {kind}, but reward.{source} is not set"
        if weight == 0 and getattr(reward, source):
            yield f"reward.{kind}_weight=0.0 discards what reward.{source} gives; drop reward.{source}"
    if (weights := reward.function_weights) and len(weights) != (count := len(reward.function)):
        yield f"reward.function_weights={[*weights]} must be one for each of reward.function, {count}, or left out"
    if not algorithm.has_critic and config.critic.path:
        yield f"algorithm.name={algorithm.name} has no critic, but critic.path={config.critic.path}; drop critic.path"


def _ends(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.min_tokens > rollout.max_response_tokens:
        told = f"rollout.min_tokens={rollout.min_tokens} > rollout.max_response_tokens={rollout.max_response_tokens}"
        yield f"{told}; lower it"
    if "" in rollout.stop:
        yield "rollout.stop holds an empty text, which would end every response; remove it"


def _tools(config: RunConfig) -> Iterator[str]:
    tools, rollout = config.rollout.multi_turn, config.rollout
    if not tools.enable:
        if "get_reward" in config.reward.function:
            yield "reward.function=get_reward is an environment's: set rollout.multi_turn.enable=true"
        return
    if not tools.function_tool_path:
        yield "rollout.multi_turn.enable=true: rollout.multi_turn.function_tool_path is not set; give a file of tools"
    if rollout.ignore_eos and not rollout.stop_token_ids:
        yield "rollout.multi_turn.enable=true: rollout.ignore_eos=true leaves no token that ends a turn; use false"


def _threshold(config: RunConfig) -> Iterator[str]:
    threshold, least, samples = config.fusion.threshold, config.fusion.least_threshold, config.samples_per_iteration
    if least > samples:
        yield f"fusion.least_threshold={least} > {samples} samples of one iteration; use a smaller one"
    if threshold == "auto":
        return
    if not (threshold.isascii() and threshold.isdigit() and len(threshold) < 20):
        yield f"fusion.threshold={threshold!r} must be auto or a number of samples"
    if int(threshold) > samples:
        yield f"fusion.threshold={threshold} > {samples} samples of one iteration; use a smaller one"
    if int(threshold) < least:
        yield f"fusion.threshold={threshold} < fusion.least_threshold={least}, which is for threshold=auto; drop one"


def _waits(config: RunConfig) -> Iterator[str]:
    """What a rank may wait for must end before the job is taken for hanging."""
    hang = config.trainer.hang_seconds
    waits = {"trainer.watchdog_seconds": config.trainer.watchdog_seconds}
    if config.reward.function:
        waits["reward.timeout_seconds"] = config.reward.timeout_seconds
    if config.rollout.multi_turn.enable:
        waits["rollout.multi_turn.timeout_seconds"] = config.rollout.multi_turn.timeout_seconds
    if config.fusion.intra_stage == "search" and not config.fusion.schedule:
        waits["fusion.search_seconds"] = config.fusion.search_seconds
    for key, seconds in waits.items():
        if seconds >= hang:
            yield f"{key}={seconds:g} must be below trainer.hang_seconds={hang:g}, which ends the job"


def _trainer(config: RunConfig) -> Iterator[str]:
    trainer, data = config.trainer, config.data
    if not trainer.resume:
        yield "trainer.resume='' must be auto, never or the path of a checkpoint"
    if trainer.wandb != "off" and not trainer.wandb_project:
        yield "trainer.wandb_project='' has no name for the run's project; set it or trainer.wandb=off"
    if data.apply_chat_template and data.add_bos != "auto":
        why = "data.apply_chat_template=true leaves it to the template"
        yield f"data.add_bos={data.add_bos} is for plain text: {why}; use auto"
    for role in config.trained():
        optim = getattr(config, role).optim
        saves = trainer.save_every or trainer.keep_best or trainer.stop_after
        if optim.name == "sgd" and (saves or trainer.resume not in ("auto", "never")):
            fix = "set trainer.save_every=0, trainer.keep_best=false, trainer.stop_after='' and trainer.resume=never"
            yield f"{role}.optim.name=sgd has no checkpoints; {fix}, or {role}.optim.name=adam"
    if trainer.share_gpu and trainer.device == "cpu":
        yield "trainer.share_gpu=true needs a GPU to share, and trainer.device=cpu; use trainer.share_gpu=false"
    if not data.train_files and trainer.iterations:
        yield "data.train_files is empty; give at least one prompt file"


def _pace(config: RunConfig) -> Iterator[str]:
    """What waits in place of work has one file of all prices, for one choice of everything."""
    trainer, fusion, rows = config.trainer, config.fusion, config.rollout.draft_rows
    for key, value, wrong, why in (
        ("trainer.device", trainer.device, trainer.device == "cuda", "waits in place of hardware; use cpu"),
        ("fusion.profile", fusion.profile, fusion.profile, "has all costs of the run; drop one"),
        ("fusion.threshold_file", fusion.threshold_file, fusion.threshold_file, "has all costs of the run; drop one"),
        ("rollout.draft_rows", rows, rows, "has no price of guesses; use 0"),
        *((key, AUTO, True, "has the costs of one choice alone; give a value") for key in searched_keys(config)),
    ):
        if trainer.pace and wrong:
            yield f"{key}={value}: trainer.pace={trainer.pace} {why}"


def _evaluation(config: RunConfig) -> Iterator[str]:
    trainer, held_out = config.trainer, config.eval
    when = {"eval_every": trainer.eval_every, "eval_before_train": trainer.eval_before_train}
    wanted = next((f"trainer.{key}={str(value).lower()}" for key, value in when.items() if value), "")
    if not config.data.val_files and (wanted or not trainer.iterations):
        why = wanted or "trainer.iterations=0 trains nothing"
        yield f"{why}: data.val_files is empty; give a file of held-out prompts to evaluate"
    if trainer.keep_best and not trainer.eval_every:
        yield "trainer.keep_best=true goes by the held-out score; set trainer.eval_every and data.val_files"
    if 0 < held_out.temperature < 1e-3:
        yield f"eval.temperature={held_out.temperature} must be 0 (greedy) or at least 0.001"
    if held_out.samples_per_prompt > 1 and not held_out.temperature:
        copies = f"eval.samples_per_prompt={held_out.samples_per_prompt}"
        yield f"{copies}: eval.temperature=0 gives equal responses; raise it, or use 1 sample per prompt"


def _has_no(role: str) -> Callable[[RunConfig], bool]:
    return lambda config: role not in config.roles()


def _never_evaluates(config: RunConfig) -> bool:
    return not config.trainer.eval_every and not config.evaluates_first


def _optim(role: str, key: str, value: str) -> Callable[[RunConfig], bool]:
    return lambda config: getattr(getattr(config, role).optim, key) == value


def _kl_weighs_nothing(config: RunConfig) -> bool:
    """Not even in the metrics: there the place of the KL chooses the estimator."""
    algorithm = config.algorithm
    return not algorithm.kl_coef and algorithm.estimator == algorithm.with_(kl_in="auto", kl_estimator="auto").estimator


def _loss_mode(*modes: str) -> Callable[[RunConfig], bool]:
    return lambda config: config.algorithm.policy_loss.loss_mode in modes


def _nothing_ends(config: RunConfig) -> bool:
    rollout = config.rollout
    return rollout.ignore_eos and not rollout.stop_token_ids and not rollout.stop


# (beginnings of keys, when they have no effect, why); the first row that fits a key gives its reason
CRITICS = ("critic.", "algorithm.value_", "parallel.critic_")
CLIPS, GATES = ("algorithm.clip_eps", "algorithm.dual_clip"), ("algorithm.policy_loss.tau_",)
FUNCTIONS = ("reward.signature", "reward.timeout_seconds", "reward.workers")
FOR_GPUS = ("rollout.attention", "rollout.all_reduce", "rollout.cuda_graphs")
SEARCHED = ("fusion.schedule", "fusion.search_seconds", "fusion.library")
TRIGGERS = ("fusion.threshold", "fusion.least_threshold", "fusion.bs_max")
IDLE: tuple[tuple[tuple[str, ...], Callable[[RunConfig], bool], str], ...] = (
    (CRITICS, _has_no("critic"), "there is no critic"),
    (("algorithm.lam",), _has_no("critic"), "belongs to ppo"),
    (CLIPS, _loss_mode("sapo"), "sapo does not clip"),
    (CLIPS[1:], _loss_mode("cispo"), "cispo clips both sides"),
    (GATES, _loss_mode("vanilla", "gspo", "cispo"), "belongs to sapo"),
    (
        ("algorithm.skip_zero_gradients",),
        lambda config: not config.algorithm.has_zero_gradients,
        "only grpo and rloo without whitening, and without KL and entropy in the loss, have zero gradients",
    ),
    (("algorithm.kl_horizon",), lambda config: not config.algorithm.kl_target, "algorithm.kl_target=0"),
    (("algorithm.kl_in", "algorithm.kl_estimator"), _has_no("reference"), "reference.path=none"),
    (("algorithm.kl_in",), _kl_weighs_nothing, "algorithm.kl_coef=0"),
    (("parallel.reference_inference",), _has_no("reference"), "reference.path=none"),
    (("rollout.min_tokens",), _nothing_ends, "nothing ends a response but rollout.max_response_tokens"),
    (("rollout.multi_turn.",), lambda config: not config.rollout.multi_turn.enable, "rollout.multi_turn.enable=false"),
    (FOR_GPUS, lambda config: config.trainer.device == "cpu", "trainer.device=cpu"),
    (("parallel.reward_inference",), _has_no("reward"), "there is no reward model"),
    (FUNCTIONS, lambda config: not config.reward.function, "reward.function is not set"),
    (FUNCTIONS[:1], lambda config: config.reward.function == ("get_reward",), "get_reward is called for one sample"),
    (SEARCHED, lambda config: config.fusion.intra_stage != "search", "fusion.intra_stage is not search"),
    (SEARCHED[1:], lambda config: bool(config.fusion.schedule), "fusion.schedule is given"),
    (TRIGGERS, lambda config: not config.fusion.inter_stage, "fusion.inter_stage=false"),
    (("fusion.threshold_file",), lambda config: config.threshold() is not None, "fusion.threshold is given"),
    (("trainer.pace_stretch",), lambda config: not config.trainer.pace, "trainer.pace is not set"),
    (("trainer.keep_checkpoints",), lambda config: not config.trainer.save_every, "trainer.save_every=0"),
    (("eval.",), lambda config: not config.data.val_files, "data.val_files is empty"),
    (("data.val_files", "eval."), _never_evaluates, "trainer.eval_every=0"),
    (("trainer.wandb_project",), lambda config: config.trainer.wandb == "off", "trainer.wandb=off"),
    *(((f"{r}.optim.beta", f"{r}.optim.eps"), _optim(r, "name", "sgd"), "sgd has none") for r in LEARNERS),
    *(((f"{r}.optim.min_lr",), _optim(r, "lr_scheduler_type", "constant"), "the rate is constant") for r in LEARNERS),
)


def idle_settings(config: RunConfig) -> str:
    """One line that names every key that was set, to another value than its default, and has no effect; or ''.

    `config` has its defaults filled: what a key that was not set would hold counts as its default.
    """
    algorithm, inference = config.algorithm, config.parallel.inference
    fills: dict[str, object] = {f"parallel.{task}": inference for task in SCORERS}
    fills["parallel.critic_train"] = AUTO  # of the whole group
    fills["algorithm.kl_in"] = algorithm.with_(kl_in="auto").kl_place
    fills["algorithm.kl_estimator"] = algorithm.with_(kl_estimator="auto").estimator
    defaults, told = {key: value for key, value, _ in RunConfig().leaves()}, []
    rows = [(prefixes, why) for prefixes, idle, why in IDLE if idle(config)]
    for key, value, _ in config.leaves():
        is_set = value not in (defaults[key], fills.get(key, defaults[key]))
        if is_set and (why := next((why for prefixes, why in rows if key.startswith(prefixes)), "")):
            told.append(f"{key}={value} ({why})")
    return f"warning: without effect here: {', '.join(told)}" if told else ""
