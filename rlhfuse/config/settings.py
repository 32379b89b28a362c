"""The configuration of a run: dataclasses that YAML files and dotted `key=value` arguments fill.

Defaults live here and nowhere else. An unknown key is an InputError that names the nearest known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlhfuse.config.role import SCORING_ORDER, Role
from rlhfuse.config.rules import check_config
from rlhfuse.config.values import check_type
from rlhfuse.errors import InputError


@dataclass
class OptimizerConfig:
    name: str = "adam"  # adam, or sgd: without momentum, unsharded, not for checkpoints
    lr: float = 1e-6  # peak learning rate
    warmup_iterations: int = 0  # linear warm-up, counted in PPO iterations
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0  # largest norm of a model's gradient; 0 = no clipping


@dataclass
class ActorConfig:
    path: str = ""  # Hugging Face folder or hub name
    tokenizer: str = ""  # default: actor.path
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class CriticConfig:
    path: str = ""  # default: reward.path with its scalar head, else actor.path; without a head it begins at 0
    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))


@dataclass
class ReferenceConfig:
    path: str = ""  # default: actor.path; none = no reference, and then no KL


@dataclass
class RewardConfig:
    path: str = ""  # reward model: Hugging Face folder or hub name; empty = only the function
    function: str = ""  # module:function or FILE.py:function; empty = only the model
    signature: str = "verl"  # how the function is called: verl or trl
    timeout_seconds: float = 60.0  # a call of the function that takes longer ends the job
    workers: int = 1  # processes per generation instance that call the function
    model_weight: float = 1.0  # score = model_weight * model + function_weight * function
    function_weight: float = 1.0


@dataclass
class DataConfig:
    train_files: list[str] = field(default_factory=list)  # jsonl files of {"prompt": text or chat turns}
    prompt_key: str = "prompt"
    max_prompt_tokens: int = 512  # a longer prompt is refused (or dropped, see filter_long_prompts)
    filter_long_prompts: bool = False  # drop long prompts instead of refusing the file; the count is printed
    add_bos: str = "auto"  # auto (as the tokenizer does), true, false
    apply_chat_template: bool = False


@dataclass
class RolloutConfig:
    prompts_per_iteration: int = 16
    samples_per_prompt: int = 4
    max_response_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    block_tokens: int = 16  # tokens in one KV block
    kv_blocks_per_instance: int = 0  # 0 = room for every sample of the instance at full length
    max_sequences_per_instance: int = 256  # decoded at the same time
    max_batched_tokens: int = 2048  # tokens in one engine step, prefill included
    cuda_graphs: bool = True  # replay decode steps as CUDA graphs; without effect on CPU


@dataclass
class AlgorithmConfig:
    name: str = "ppo"  # ppo (with a critic), grpo, rloo or reinforce++ (without)
    gamma: float = 1.0
    lam: float = 0.95  # lambda of GAE; ppo
    group_std: bool = True  # divide by the standard deviation of the prompt's scores; grpo
    whiten_advantages: str = "auto"  # over the whole batch: true, false, or auto: with ppo and reinforce++
    kl_coef: float = 0.05  # weight of the KL to the reference
    kl_in: str = "reward"  # reward: part of the token rewards; loss: part of the policy's loss
    kl_estimator: str = "k1"  # k1, k2 or k3
    kl_target: float = 0.0  # 0 = kl_coef stays; else it is steered towards this KL per sample
    kl_horizon: int = 10000  # samples over which kl_coef follows
    clip_eps: float = 0.2
    clip_eps_high: float = 0.0  # upper bound 1 + this; 0 = clip_eps
    dual_clip: float = 0.0  # 0 = off; else the largest ratio, above 1, that counts where the advantage is negative
    value_clip_eps: float = 0.2  # 0 = no clip
    value_loss_coef: float = 1.0  # weight of the value loss, which has a factor 0.5 of its own
    entropy_coef: float = 0.0
    minibatches: int = 4  # optimizer steps per epoch
    epochs: int = 1  # passes over the batch of an iteration, each in an order of its own
    score_scale: float = 1.0  # scores are multiplied by this
    scale_scores: bool = False  # and divided by the standard deviation of all scores of the run so far
    score_clip: float = 0.0  # 0 = off; else scaled scores are clipped to [-score_clip, score_clip]
    missing_eos_penalty: float = 0.0  # subtracted from the score of a sample cut at max_response_tokens
    length_penalty: float = 0.0  # subtracted from the score of a response of max_response_tokens, shorter ones less
    overlong_penalty: float = 0.0  # subtracted at max_response_tokens; begins overlong_tokens before it
    overlong_tokens: int = 0  # the last so many tokens in which the overlong penalty grows

    @property
    def has_critic(self) -> bool:
        return self.name == "ppo"

    @property
    def groups(self) -> bool:
        """Whether a sample is compared with the others of its prompt."""
        return self.name in ("grpo", "rloo")

    @property
    def whitens(self) -> bool:
        asked = str(self.whiten_advantages).lower()
        return asked == "true" or (asked == "auto" and not self.groups)


@dataclass
class FusionConfig:
    inter_stage: bool = True  # score finished samples while the long tail still decodes
    intra_stage: bool = True  # train actor and critic in one fused pipeline schedule
    threshold: str = "auto"  # R_t in samples of the whole batch; auto = by simulation
    least_threshold: int = 0  # auto chooses no smaller R_t; 0 = serial where that is predicted to be the fastest
    max_triggers: int = 2  # most migrations of an iteration; a second one only where it is predicted to pay
    bs_max: int = 0  # largest batch that decodes about as fast as batch 1; 0 = from the cost model
    schedule: str = ""  # schedule.json made by tools/search_schedule.py; empty = search at start
    search_seconds: float = 5.0  # time of the search at start
    actor_microbatches: int = 4  # per actor pipeline and mini-batch (M1)
    bucket_mib: int = 64  # most memory of a rank, beside caches, that weights, keys and values on their way take
    profile: str = ""  # costs.json of a past run here, or a profile of this machine; empty = analytic costs
    threshold_file: str = ""  # threshold.json made by tools/calibrate_threshold.py


@dataclass
class ParallelConfig:
    actor_train: str = "d1t1p1"
    critic_train: str = "d1t1p1"  # without effect where there is no critic
    sequence_parallel: bool = False  # in training: cut tokens, not only weights, over the tensor ranks
    generation: str = "d1t1p1"
    inference: str = ""  # default of the three below; empty = the generation layout
    reference_inference: str = ""
    reward_inference: str = ""
    critic_inference: str = ""


@dataclass
class TrainerConfig:
    iterations: int = 10
    output_dir: str = ""  # the run directory; empty = runs/<config name>-<time>
    save_every: int = 0  # iterations between checkpoints; 0 = only the export at the end
    keep_checkpoints: int = 2  # the last so many are kept in output_dir/checkpoints
    resume: str = "never"  # auto, never, or the path of a checkpoint
    seed: int = 1
    dtype: str = "float32"  # float32 or bfloat16
    recompute: str = "none"  # none, or full: training keeps each layer's input alone and runs the layer again
    device: str = "auto"  # auto, cpu or cuda
    hardware: str = "auto"  # auto, cpu, a100, h100, h800, h200: used by the planner
    memory_limit_gb: float = 0.0  # of one rank, in 10^9 bytes; 0 = the GPU's, or its part of the machine on CPU
    peak_tflops: float = 0.0  # of one rank, what perf/mfu is of; 0 = the GPU's data sheet, or measured on CPU
    threads_per_rank: int = 1  # torch threads of one rank on CPU
    return_memory: bool = True  # on CPU freed memory goes back to the system at every phase; false is faster
    watchdog_seconds: float = 60.0  # a silent rank is declared dead after this
    hang_seconds: float = 600.0  # when no rank makes progress for this long the job ends
    tensorboard: bool = True
    wandb: str = "off"  # off, online or offline: the same metrics as a Weights & Biases run
    wandb_project: str = "rlhfuse"
    sample_texts: int = 2  # samples of each iteration that are kept as text
    trace_iterations: int = 3  # the last so many iterations are kept in trace.json
    export: bool = True  # write export/ in Hugging Face layout at the end


@dataclass
class RunConfig:
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    @property
    def samples_per_iteration(self) -> int:
        return self.rollout.prompts_per_iteration * self.rollout.samples_per_prompt

    def roles(self) -> tuple[Role, ...]:
        """The models of this run; the actor always."""
        present = {
            Role.ACTOR: True,
            Role.CRITIC: self.algorithm.has_critic,
            Role.REFERENCE: self.reference.path.lower() != "none",
            Role.REWARD: bool(self.reward.path) or not self.reward.function,
        }
        return tuple(role for role, there in present.items() if there)

    def trained(self) -> tuple[Role, ...]:
        """Roles that learn: actor, and critic where there is one."""
        return tuple(role for role in self.roles() if role.trains)

    def scorers(self) -> tuple[Role, ...]:
        """Roles whose models score finished samples, in the order in which they do; may be empty."""
        return tuple(role for role in SCORING_ORDER if role in self.roles())

    def threshold(self) -> int | None:
        """R_t as a number, or None for auto."""
        return None if self.fusion.threshold == "auto" else int(self.fusion.threshold)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `key=value` overrides, fill defaults, check ranges.

    Raises InputError naming the file or the argument, the key, and the nearest known key.
    """
    file = Path(path)
    try:
        from_file = OmegaConf.load(file)
    except FileNotFoundError:
        raise InputError(f"config file {file} does not exist") from None
    except OSError as error:
        raise InputError(f"config file {file} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # yaml raises many kinds; all of them mean: not YAML
        raise InputError(f"config file {file} is not valid YAML: {' '.join(str(error).split())}") from None
    _check_keys(OmegaConf.to_container(from_file), RunConfig, "", str(file))
    given = [_argument(text) for text in overrides]
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), from_file, *given))
    except OmegaConfBaseException as error:
        raise InputError(f"{file}: {getattr(error, 'full_key', '')}: {str(error).splitlines()[0]}") from None
    return _resolve(config)


def _argument(text: str) -> DictConfig:
    """One `key=value`, its keys and types checked."""
    if "=" not in text:
        raise InputError(f"argument {text!r} is not of the form key=value")
    try:
        given = OmegaConf.from_dotlist([text])
    except (OmegaConfBaseException, YAMLError) as error:
        raise InputError(f"argument {text!r} cannot be read: {' '.join(str(error).split())[:200]}") from None
    _check_keys(OmegaConf.to_container(given), RunConfig, "", f"argument {text!r}")
    return given


def dump_config(config: RunConfig) -> str:
    """YAML text that `load_config` reads back to an equal value."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _check_keys(raw: Any, kind: type, prefix: str, where: str) -> None:
    if raw is None:
        return
    if not isinstance(raw, dict):
        raise InputError(f"{where}: {prefix.rstrip('.') or 'the file'} must be a mapping, not {raw!r}")
    known = {f.name: f for f in fields(kind)}
    for key, value in raw.items():
        if key not in known:
            every = _all_keys(RunConfig, "")
            near = difflib.get_close_matches(f"{prefix}{key}", every, n=1, cutoff=0.0)
            raise InputError(f"{where}: unknown key {prefix}{key}; did you mean {near[0]}?")
        default = _default(known[key])
        if is_dataclass(default):
            _check_keys(value, type(default), f"{prefix}{key}.", where)
        else:
            check_type(f"{prefix}{key}", value, default, where)


def _all_keys(kind: type, prefix: str) -> list[str]:
    keys = []
    for f in fields(kind):
        inner = _default(f)
        keys += _all_keys(type(inner), f"{prefix}{f.name}.") if is_dataclass(inner) else [f"{prefix}{f.name}"]
    return keys


def _default(one: Field) -> Any:
    return one.default_factory() if callable(one.default_factory) else one.default


def _resolve(config: RunConfig) -> RunConfig:
    """Fill the defaults that depend on other keys and check ranges and combinations."""
    config.actor.tokenizer = config.actor.tokenizer or config.actor.path
    for role in config.roles():
        for source in (role, *role.path_defaults):
            getattr(config, role).path = getattr(config, role).path or getattr(config, source).path
    parallel = config.parallel
    parallel.inference = parallel.inference or parallel.generation
    for task in ("reference_inference", "reward_inference", "critic_inference"):
        setattr(parallel, task, getattr(parallel, task) or parallel.inference)
    check_config(config)
    return config
