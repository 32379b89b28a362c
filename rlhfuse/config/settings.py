"""The configuration of a run as frozen models: each key's name, type, range, default and help stand here alone.

`docs/reference/configuration.md` and the JSON schema beside it are generated from these models by
docs/make/generate_docs.py. Those of the algorithm and of tools are in algorithm.py and multi_turn.py; what several
keys must keep together is in rules.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.config.multi_turn import MultiTurnConfig
from rlhfuse.config.settings_group import Settings, key
from rlhfuse.config.values import (
    AUTO,
    LARGEST_REAL,
    AutoOrTruth,
    Count,
    CountOrAuto,
    Decay,
    Duration,
    Float,
    Functions,
    Layout,
    LayoutOrDefault,
    ModelPath,
    Name,
    NonNegative,
    PathText,
    Positive,
    PositiveOrAuto,
    Processes,
    Real,
    Recompute,
    Share,
    Text,
    TokenId,
    TrainingOrder,
    Truth,
    TruthOrAuto,
    Wait,
    Whole,
)
from rlhfuse.tasks.role import POLICY, ROLES, Role


def _or_auto(schema: dict[str, Any]) -> None:
    """A group that a file may also give as the word auto."""
    schema["anyOf"] = [{"const": AUTO}, {"$ref": schema.pop("$ref")}]


class OptimizerConfig(Settings):
    name: Literal["adam", "sgd"] = key(
        "adam", "adam, or sgd: without momentum, unsharded, and not for runs that save or resume checkpoints"
    )
    lr: NonNegative = key(1e-6, "peak learning rate")
    warmup_iterations: Count = key(0, "linear warm-up, counted in PPO iterations")
    lr_warmup_ratio: Share = key(0.0, "the same as a share of lr_decay_iterations; 0 = warmup_iterations says it")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key(
        "constant", "after the warm-up: constant, or falling to the floor, linear or along a half cosine"
    )
    min_lr_ratio: Share = key(0.0, "the floor, as a share of lr")
    lr_decay_iterations: Count = key(
        0, "the iteration at which the floor is reached; 0 = trainer.iterations. A resumed run keeps it"
    )
    weight_decay: NonNegative = key(0.0, "decoupled weight decay of Adam")
    beta1: Decay = key(0.9, "Adam's decay of the mean gradient")
    beta2: Decay = key(0.95, "Adam's decay of the mean square")
    eps: Float = key(1e-8, "Adam's epsilon", gt=0, le=LARGEST_REAL)
    clip_grad: NonNegative = key(1.0, "largest norm of a model's gradient; 0 = no clipping")


class ActorConfig(Settings):
    path: ModelPath = key("", "Hugging Face folder or hub name")
    tokenizer: ModelPath = key("", "default: actor.path")
    optim: OptimizerConfig = OptimizerConfig()


class CriticConfig(Settings):
    path: ModelPath = key(
        "",
        "Hugging Face folder or hub name; default: reward.path with its scalar head, else actor.path; "
        "a folder without one gets a value head that begins at 0",
    )
    warmup_iterations: Count = key(
        0, "so many iterations at first train the critic alone: the actor's step is left out, its schedule begins after"
    )
    optim: OptimizerConfig = OptimizerConfig(lr=1e-5)


class ReferenceConfig(Settings):
    path: ModelPath = key(
        "", "Hugging Face folder or hub name; default: actor.path; none = no reference, and then no KL"
    )


class RewardConfig(Settings):
    path: ModelPath = key("", "reward model, a scalar head: Hugging Face folder or hub name; empty = only the function")
    function: Functions = key(
        (),
        "module:function or FILE.py:function, or a list of such, whose weighted scores are added; empty = only the "
        "model; get_reward = that of the environment in rollout.multi_turn",
    )
    function_weights: tuple[Float, ...] = key((), "one for each function of a list; empty = 1 each")
    signature: Literal["auto", "verl", "trl"] = key(
        "auto", "how the function is called: verl, trl, or auto: as the names of its parameters say"
    )
    timeout_seconds: Wait = key(60.0, "a call of the function that takes longer ends the job")
    workers: Processes = key(1, "processes per generation instance that call the function")
    model_weight: Real = key(1.0, "score = model_weight * model + function_weight * function")
    function_weight: Real = key(1.0, "see model_weight")


class DataConfig(Settings):
    train_files: tuple[Name, ...] = key(
        (), "jsonl, json, csv, parquet or arrow files of prompts (see docs/reference/algorithms.md)"
    )
    val_files: tuple[Name, ...] = key((), "files of held-out prompts, of the same form: see trainer.eval_every")
    prompt_key: Text = key("prompt", "the row's key that holds the prompt")
    max_prompt_tokens: PositiveOrAuto = key(
        AUTO,
        "a longer prompt is refused (or dropped, see filter_long_prompts); auto: the longest prompt, as far as every "
        "model's context holds it and a response",
    )
    filter_long_prompts: Truth = key(False, "drop long prompts instead of refusing the file; the count is printed")
    add_bos: AutoOrTruth = key("auto", "auto (as the tokenizer does), true, false")
    apply_chat_template: Truth = key(False, "wrap text prompts as one user turn of the tokenizer's template")
    chat_template_kwargs: dict[str, JsonValue] = key({}, "mapping for the chat template, as {enable_thinking: false}")


class RolloutConfig(Settings):
    # a sample's id has so many bits for its prompt, its copy and its iteration (data/sampler.py)
    prompts_per_iteration: Whole = key(16, "prompts drawn per iteration", ge=1, le=2**23)
    samples_per_prompt: Whole = key(4, "responses generated for each prompt", ge=1, le=2**16)
    max_response_tokens: Positive = key(256, "a longer response is cut here")
    min_tokens: Count = key(0, "no end token, stop token or stop text ends a response before so many tokens")
    stop_token_ids: tuple[TokenId, ...] = key((), "further tokens that end a response; they are part of it")
    stop: tuple[Name, ...] = key(
        (),
        "texts that end a response. The tokens up to the one that completes such a text are the response, and are "
        "trained on; the text that a reward function gets is cut before it",
    )
    ignore_eos: Truth = key(False, "the model's end tokens do not end a response; the two keys above still do")
    # a temperature of 0 would be greedy: PPO samples its rollouts
    temperature: Float = key(1.0, "of sampling; 0.001 to 1000; log-probabilities are taken after it", ge=1e-3, le=1e3)
    top_k: Count = key(0, "tokens to sample from, and ties with the last of them; 0 = off")
    top_p: Float = key(1.0, "least probability mass to sample from, ties with its last token too; 1 = off", gt=0, le=1)
    block_tokens: PositiveOrAuto = key(AUTO, "tokens in one KV block; auto: 16")
    kv_blocks_per_instance: Count = key(
        0, "0 = room for every sample of the instance at full length, as far as memory holds it"
    )
    max_sequences_per_instance: Positive = key(256, "decoded at the same time")
    max_batched_tokens: Positive = key(2048, "tokens in one engine step, prefill included")
    draft_rows: CountOrAuto = key(
        AUTO,
        "rows of a decode step that guesses of the next tokens may fill up: tokens and bits stay, steps become fewer "
        "(docs/explanation/engine.md); 0 = off, as always on GPUs; auto: on CPU 16 where that is measured to be faster",
    )
    attention: Literal["auto", "flashinfer", "triton", "torch"] = key(
        "auto", "whose kernels read the KV cache on GPUs; auto = the first of these that can, told at start"
    )
    all_reduce: Literal["auto", "nccl", "switch"] = key(
        "auto",
        "who sums over tensor ranks on GPUs: NCCL, or the NVLink switch of Hopper GPUs in one node; auto = the switch "
        "where it can and its sums are right, told at start",
    )
    cuda_graphs: Truth = key(True, "replay decode steps as CUDA graphs (see docs/howto/gpus.md); without effect on CPU")
    multi_turn: MultiTurnConfig = MultiTurnConfig()


class EvalConfig(Settings):
    """Generation of the held-out prompts; what is not said here is as in training."""

    samples_per_prompt: Whole = key(
        1, "responses to each held-out prompt; k > 1 of them also give mean@k and best@k", ge=1, le=2**16
    )
    temperature: Float = key(1.0, "as rollout.temperature; 0 = greedy", ge=0, le=1e3)
    top_p: Float = key(1.0, "as rollout.top_p", gt=0, le=1)
    max_response_tokens: Count = key(0, "0 = rollout.max_response_tokens")


class FusionConfig(Settings):
    inter_stage: Truth = key(True, "score finished samples while the long tail still decodes")
    intra_stage: TrainingOrder = key(
        "search",
        "how actor and critic share their ranks in training: search (or true): in one fused schedule, the fastest "
        "found; by rule: serial (or false): one after the other; interleaved: so, with virtual stages (d1t1p2v2); "
        "time_sharing: both in one direction, the second begins while the first drains",
    )
    threshold: Text = key("auto", "R_t in samples of the whole batch; auto = by simulation")
    least_threshold: Count = key(
        0,
        "auto chooses no smaller R_t; 0 = serial where that is predicted to be the fastest. "
        "1 or more migrates in any case, to see it work",
    )
    bs_max: Count = key(0, "largest batch that decodes about as fast as batch 1; 0 = from the cost model")
    split_backward: AutoOrTruth = key(
        "auto",
        "backwards in two parts, the input's gradient and later the weights': true, false, or auto: of the models "
        "where that lowers the proved bound of the schedule by 1 % (docs/explanation/intra_stage.md)",
    )
    schedule: PathText = key("", "schedule.json made by tools/search_schedule.py; empty = search at start")
    search_seconds: Wait = key(5.0, "time of the search at start")
    library: PathText = key(
        AUTO,
        "folder of the best schedules found, with which searches begin; auto: ~/.cache/rlhfuse/schedules; empty = none",
    )
    microbatch_tokens: PositiveOrAuto = key(
        AUTO,
        "most tokens of a micro-batch, at least those of the longest sample: a mini-batch has as few as hold it "
        "(docs/explanation/intra_stage.md); auto: the fastest of a few, chosen with layouts that are auto, or as in "
        "the checkpoint that is resumed",
    )
    actor_microbatches: PositiveOrAuto = key(
        AUTO, "in place of microbatch_tokens: so many per actor pipeline and mini-batch (M1), of nearly equal tokens"
    )
    bucket_mib: Positive = key(
        64, "most memory of a rank, beside caches, that weights, keys and values on their way take, in MiB"
    )
    profile: PathText = key(
        "",
        "costs.json of a past run on this machine, or what `tools/profile_costs.py` measured "
        "(docs/explanation/costs.md); empty = analytic costs",
    )
    threshold_file: PathText = key("", "threshold.json made by tools/calibrate_threshold.py")

    @property
    def by_rule(self) -> bool:
        """Whether training follows a rule's order, which no search finds."""
        return self.intra_stage != "search"

    @property
    def alternates(self) -> bool:
        """Whether every second model's pipelines run in the other direction."""
        return self.intra_stage != "time_sharing"


class ParallelConfig(Settings):
    actor_train: Layout = key(
        "d1t1p1",
        "layout of actor training, dXtYpZ; auto, as for every layout here: searched at the start, or as in the "
        "checkpoint that is resumed. `parallel: auto` says so for all layouts and sequence_parallel",
    )
    critic_train: Layout = key(
        "d1t1p1", "layout of critic training; the same number of ranks; without effect where there is no critic"
    )
    stage_layers: Literal["auto", "even"] = key(
        "auto",
        "layers of each stage of a training pipeline: auto: as the costs make the slowest stage fastest, embedding, "
        "output layer and loss counted; even; a layout may also list them: actor_train=d1t1p4:9,9,8,6",
    )
    sequence_parallel: TruthOrAuto = key(
        False, "training cuts tokens, not only weights, over the tensor ranks; needs t2 or more; auto: searched"
    )
    generation: Layout = key("d1t1p1", "layout of generation; p1")
    inference: LayoutOrDefault = key(
        "", "default of the three below; empty = the generation layout, or auto where that is auto"
    )
    reference_inference: LayoutOrDefault = key("", "default: parallel.inference")
    reward_inference: LayoutOrDefault = key("", "default: parallel.inference")
    critic_inference: LayoutOrDefault = key("", "default: parallel.inference")
    lengths: PathText = key(
        "",
        "what plan, first R_t and search of layouts are for: FILE[:COLUMN] of past lengths, or a past run's folder; "
        "empty = an assumption: lognormal, p99.9 at rollout.max_response_tokens, median a tenth of it",
    )
    headroom: Float = key(
        0.1,
        "part of a rank's memory that a plan leaves free in every phase where it chooses: layouts, schedules, the KV "
        "cache, whether the optimizer rests in host memory; layouts and sizes that you set may use it; in [0, 1)",
        ge=0,
        lt=1,
    )


class TrainerConfig(Settings):
    iterations: Whole = key(10, "PPO iterations of the run; 0 = evaluate data.val_files alone", ge=0, le=2**24)
    output_dir: PathText = key("", "the run directory; empty = runs/<config name>-<time>")
    save_every: Count = key(
        0, "iterations between checkpoints (docs/howto/checkpoints.md); 0 = only the export at the end"
    )
    keep_checkpoints: Positive = key(2, "the last so many are kept in output_dir/checkpoints")
    eval_every: Count = key(
        0,
        "iterations between evaluations of data.val_files by the run's reward, and one after the last; 0 = none. "
        "The scores stand in the row of the iteration before",
    )
    eval_before_train: Truth = key(False, "evaluate before the first iteration too: a row of iteration -1")
    keep_best: Truth = key(
        False,
        "save where the held-out score is the best so far; that checkpoint is kept, and exported to export/best",
    )
    resume: PathText = key("never", "auto, never, or the path of a checkpoint")
    seed: Whole = key(1, "every random draw derives from it; 0 to 2^63 - 1", ge=0, le=2**63 - 1)
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "float32, bfloat16, or auto: bfloat16 on GPUs (as device says, else hardware), float32 on CPU"
    )
    recompute: Literal[Recompute, "auto"] = key(
        "none",
        "what training runs again in backwards and does not keep till then, same bits: none; selective: norms and "
        "SwiGLU; full: whole layers, of which it keeps the input alone; auto: searched, as layouts are",
    )
    offload_optimizer: AutoOrTruth = key(
        "auto",
        "main weights and moments rest in host memory outside training: true, false, or auto: on GPUs, where a phase "
        "would not fit beside them, parallel.headroom free",
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto, cpu or cuda")
    share_gpu: Truth = key(
        False,
        "all ranks of a node on one GPU, what they exchange passing through the host: for tests, and for people with "
        "one GPU. Results are those of a GPU each, times mean nothing",
    )
    hardware: Text = key(
        "auto",
        "auto (where machines differ, the least of each), cpu, h100 (as measured), a100, h800, h200 (data sheets), "
        "measured:FILE (what "
        "`scripts/gpu_check.sh --hardware FILE` measured of this machine), or machines of several kinds with counts in "
        "the order of the ranks, as a100:8,h100:8: used by the planner",
    )
    memory_limit_gb: NonNegative = key(
        0.0,
        "most memory of one rank, in 10^9 bytes; 0 = the GPU's, or its equal part of a shared one or, on CPU, of the "
        "machine. "
        "A run whose plan needs more is refused",
    )
    host_memory_gb: NonNegative = key(
        0.0,
        "host memory of a machine, in 10^9 bytes, which its ranks share; 0 = on CPU this machine's, else 2000, assumed "
        "of nodes with GPUs",
    )
    threads_per_rank: Processes = key(1, "torch threads of one rank on CPU")
    pace: PathText = key(
        "",
        "what `tools/plan.py --pace FILE` wrote of larger models: every piece of work of this run lasts at least as "
        "long as theirs, values stay its own; measures no hardware (docs/howto/paced_runs.md); empty = as long as it "
        "takes",
    )
    pace_stretch: Wait = key(1.0, "with pace: so many times as long, where the machine is too small for it at 1")
    return_memory: Truth = key(
        True,
        "on CPU freed memory goes back to the system at every phase, as ranks of one node share it; false "
        "is faster, and `perf/peak_memory_gb` of a phase then holds what earlier ones left",
    )
    watchdog_seconds: Wait = key(60.0, "a silent rank is declared dead after this")
    hang_seconds: Wait = key(600.0, "a job in which no rank has worked for this long ends")
    grace_seconds: Wait = key(
        600.0,
        "after Ctrl-C, SIGUSR1 or `stop_after` the iteration or export under way has so long to be finished and saved "
        "(docs/howto/checkpoints.md); under torchrun at most 5 s less than its --shutdown-timeout",
    )
    stop_after: Duration = key(
        "",
        "a time since the program's start, such as 3h50m, at which the run stops as by SIGUSR1; it begins no iteration "
        "that would last longer by the mean of those before. Empty = none",
    )
    tensorboard: Truth = key(True, "write tensorboard/ in the run directory")
    wandb: Literal["off", "online", "offline"] = key(
        "off",
        "off, online or offline: the same metrics and samples as a Weights & Biases run (extra `wandb`); "
        "offline ones lie in the run directory for `wandb sync`",
    )
    wandb_project: Text = key("rlhfuse", "the project of that run")
    sample_texts: Count = key(2, "samples of each iteration that are kept as text, in samples.jsonl and by the loggers")
    trace_iterations: Count = key(3, "the last so many iterations are kept in trace.json")
    export: Truth = key(True, "write export/ in Hugging Face layout at the end")

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight; `dtype` is no longer auto."""
        return 4 if self.dtype == "float32" else 2


class RunConfig(Settings):
    """All keys of a run; load.py fills it from YAML."""

    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    reward: RewardConfig = RewardConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    fusion: FusionConfig = FusionConfig()
    parallel: Annotated[ParallelConfig, Field(json_schema_extra=_or_auto)] = ParallelConfig()  # load.py spells it out
    trainer: TrainerConfig = TrainerConfig()

    def held_iterations(self, role: str) -> int:
        """Iterations at the beginning in which the model of `role` does not learn."""
        return self.critic.warmup_iterations if role == POLICY and self.algorithm.has_critic else 0

    @property
    def evaluates_first(self) -> bool:
        """Whether a run that begins evaluates before it trains; one without iterations does nothing else."""
        return bool(self.data.val_files) and (self.trainer.eval_before_train or not self.trainer.iterations)

    def evaluates_after(self, done: int) -> bool:
        """Whether an evaluation follows when so many iterations are done: every `eval_every`, and after the last."""
        return bool(self.data.val_files) and self._is_turn(self.trainer.eval_every, done)

    def saves_after(self, done: int) -> bool:
        """Whether a checkpoint follows: every `save_every`, and after the last, so that what ended can be extended."""
        return self._is_turn(self.trainer.save_every, done)

    def _is_turn(self, every: int, done: int) -> bool:
        return every > 0 and (done % every == 0 or done == self.trainer.iterations)

    @property
    def eval_response_tokens(self) -> int:
        return self.eval.max_response_tokens or self.rollout.max_response_tokens

    @property
    def longest_response_tokens(self) -> int:
        """Longest response of any sample, in training or of a held-out prompt."""
        return max(self.rollout.max_response_tokens, self.eval_response_tokens if self.data.val_files else 0)

    @property
    def longest_sample(self) -> tuple[int, int]:
        """Tokens of the longest prompt and of the longest response that is trained on; no longer auto."""
        return self.data.max_prompt_tokens, self.rollout.max_response_tokens

    @property
    def samples_per_iteration(self) -> int:
        return self.rollout.prompts_per_iteration * self.rollout.samples_per_prompt

    def roles(self) -> tuple[Role, ...]:
        """The models of this run; the actor always."""
        absent = {
            "critic": not self.algorithm.has_critic,
            "reference": self.reference.path.lower() == "none",
            "reward": not self.reward.path and bool(self.reward.function),
        }
        return tuple(role for role in ROLES if not absent.get(role))

    def trained(self) -> tuple[Role, ...]:
        """Roles that learn, the policy first."""
        return tuple(role for role in self.roles() if role.trains)

    def scorers(self) -> tuple[Role, ...]:
        """Roles whose models score finished samples, in the order in which they do; may be empty."""
        return self.roles()[1:]

    def threshold(self) -> int | None:
        """R_t as a number, or None for auto."""
        return None if self.fusion.threshold == "auto" else int(self.fusion.threshold)
