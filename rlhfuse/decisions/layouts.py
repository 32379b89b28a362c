"""The task table: which of up to six tasks runs in which layout, and every rule that a table must keep.

Rules are equations; the InputError that refuses a table prints the one that fails with its numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.auto_layouts import auto_layouts, layout_rows, refuse_auto
from rlhfuse.config.role import Role
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO
from rlhfuse.schedule.ir.ranks import FusedShape, fused_shape

# Config key of each task and the role of the model it runs, in the order of an iteration. A run has those of its roles.
TASK_ROLES = (
    ("generation", Role.ACTOR),
    ("reference_inference", Role.REFERENCE),
    ("reward_inference", Role.REWARD),
    ("critic_inference", Role.CRITIC),
    ("actor_train", Role.ACTOR),
    ("critic_train", Role.CRITIC),
)
LayoutText = Annotated[ParallelLayout, PlainValidator(ParallelLayout.parse), PlainSerializer(str)]  # in JSON


@dataclass(frozen=True)
class Task:
    """One row: the task, the model's role, the layout, and its first and last rank."""

    name: str
    role: Role
    layout: LayoutText
    ranks: tuple[int, int]

    @property
    def training(self) -> bool:
        return self.name.endswith("_train")

    def __str__(self) -> str:
        return f"{self.name:20s} {self.role:10s} {str(self.layout):10s} ranks {self.ranks[0]}-{self.ranks[1]}"


@dataclass(frozen=True)
class BatchArithmetic:
    """From prompts to micro-batches; every count names what it counts."""

    prompts: int
    samples_per_prompt: int
    samples: int
    instances: int
    samples_per_instance: int  # of the fullest
    minibatches: int
    samples_per_minibatch: int
    actor_pipelines: int
    actor_microbatches: int  # per pipeline (M1)
    critic_pipelines: int  # 0 without a critic
    critic_microbatches: int  # per pipeline (M2)
    epochs: int = 1  # passes over the samples

    @property
    def microbatches(self) -> int:
        """Micro-batches of one mini-batch over all pipelines; as many for both models."""
        return self.actor_pipelines * self.actor_microbatches

    @property
    def optimizer_steps(self) -> int:
        """Per iteration."""
        return self.minibatches * self.epochs

    @property
    def samples_per_microbatch(self) -> float:
        return self.samples_per_minibatch / self.microbatches

    @property
    def microbatches_of(self) -> dict[str, int]:
        """Micro-batches per pipeline of each model that trains."""
        critic = {"critic": self.critic_microbatches} if self.critic_pipelines else {}
        return {"actor": self.actor_microbatches, **critic}

    def lines(self) -> list[str]:
        """The equations as text for people."""
        lines = [
            f"{self.prompts} prompts x {self.samples_per_prompt} copies = {self.samples} samples per iteration",
            f"{self.samples} samples over {self.instances} generation instances: up to "
            f"{self.samples_per_instance} each",
            f"{self.samples} samples / {self.minibatches} mini-batches = {self.samples_per_minibatch} samples "
            "per optimizer step",
        ]
        pipelines = {"actor": self.actor_pipelines, "critic": self.critic_pipelines}
        for model, microbatches in self.microbatches_of.items():
            cut = f"({pipelines[model]} {model} pipelines x {microbatches} micro-batches)"
            each = f"{self.samples_per_microbatch:.4g} samples per micro-batch"
            lines.append(f"{self.samples_per_minibatch} samples / {cut} = {each}")
        steps = f"{self.minibatches} mini-batches x {self.epochs} epochs = {self.optimizer_steps} optimizer steps"
        return [*lines, steps] if self.epochs > 1 else lines


def planned_world_size(config: RunConfig, given: int | None) -> int:
    """Ranks to plan for: as given, else WORLD_SIZE, else as many as a layout has, parallel.actor_train's first.

    Raises InputError, also where all layouts are auto.
    """
    if given is not None:
        return given
    text = os.environ.get("WORLD_SIZE", "")
    if not text:
        layouts = (getattr(config.parallel, row) for row in ("actor_train", *layout_rows(config)))
        if (layout := next((layout for layout in layouts if layout != AUTO), None)) is None:
            fix = "start under torchrun, which says how many, or give a layout or --world-size"
            raise InputError(f"parallel.actor_train=auto: the number of ranks is not known; {fix}")
        return ParallelLayout.parse(layout).size
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"WORLD_SIZE={text!r} is no number of ranks; unset it or give --world-size")
    return int(text)


def _task_table(config: RunConfig, world_size: int) -> tuple[Task, ...]:
    """The rows of the run's models that are not auto. Raises InputError for one that does not fill the world, or
    cannot run yet."""
    rows = []
    for name, role in TASK_ROLES:
        text = getattr(config.parallel, name)
        if role not in config.roles() or text == AUTO:
            continue
        layout = ParallelLayout.parse(text)
        where = f"parallel.{name}={text}"
        if layout.ranks and layout.ranks != (0, world_size - 1):
            raise InputError(
                f"{where}: {name} on ranks {layout.ranks[0]}-{layout.ranks[1]} of {world_size} is not yet runnable; "
                f"drop @{layout.ranks[0]}-{layout.ranks[1]} to run it on all ranks"
            )
        if layout.size != world_size:
            raise InputError(
                f"{where}: dp({layout.dp}) * tp({layout.tp}) * pp({layout.pp}) = {layout.size} "
                f"!= world_size({world_size})" + ("; or auto, as other layouts are" if auto_layouts(config) else "")
            )
        rows.append(Task(name, role, replace(layout, ranks=None), (0, world_size - 1)))
    return tuple(rows)


def check_layouts(config: RunConfig, specs: Mapping[Role, ModelSpec], world_size: int) -> tuple[Task, ...]:
    """The task table, held against every rule with models and batch. Raises InputError with the equation that fails."""
    refuse_auto(config, "no layouts are searched here: tools/plan.py chooses some")
    tasks = check_given_layouts(config, specs, world_size)
    _check_batch(config, fused_shape(training_layouts(tasks)))
    return tasks


def check_given_layouts(config: RunConfig, specs: Mapping[Role, ModelSpec], world_size: int) -> tuple[Task, ...]:
    """The rows that are not auto, held against world, models and each other. Raises InputError that names a row."""
    tasks, vocab = _task_table(config, world_size), least_vocab(specs)
    for task in tasks:
        where = f"parallel.{task.name}"
        if not task.training and task.layout.pp != 1:
            raise InputError(
                f"{where}={task.layout}: pp({task.layout.pp}) != 1; generation and inference have no pipeline"
            )
        specs[task.role].check_layout(task.layout, where)
        if not task.role.scalar_head and task.name != "generation":
            _check_vocab_shares(task, specs[task.role], vocab)
    layouts = {task.name: task.layout for task in tasks}
    if generation := layouts.get("generation"):
        for name in ("reference_inference", "reward_inference", "critic_inference"):
            _check_divides(name, layouts.get(name, generation), generation)
    if len(training_layouts(tasks)) == len(config.trained()):
        _check_training(config, tasks)
    _check_models(config, specs)
    return tasks


def _check_divides(name: str, layout: ParallelLayout, generation: ParallelLayout) -> None:
    if generation.tp % layout.tp:
        raise InputError(
            f"parallel.{name}={layout}: generation tp({generation.tp}) % tp({layout.tp}) = "
            f"{generation.tp % layout.tp}, must be 0, so that a freed instance can score alone; use a divisor"
        )


def possible_layouts(
    spec: ModelSpec, ranks: int, devices_per_node: int, most_replicas: int, chunks: Sequence[int] = ()
) -> Iterator[ParallelLayout]:
    """Layouts of a model over so many ranks that its shape allows: whole tensor groups in a node, at most so many
    replicas, and pipelines with any of these numbers of virtual stages; none: no pipelines."""
    for tp in divisors(ranks):
        if devices_per_node % tp:
            continue
        for pp in divisors(ranks // tp) if chunks else (1,):
            for count in chunks if pp > 1 else (1,):
                layout = ParallelLayout(ranks // (tp * pp), tp, pp, chunks=count)
                if layout.dp <= most_replicas and fits_model(layout, spec):
                    yield layout


def fits_model(layout: ParallelLayout, spec: ModelSpec) -> bool:
    """Whether `check_model` accepts it."""
    try:
        spec.check_layout(layout, "")
    except InputError:
        return False
    return True


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def least_vocab(specs: Mapping[Role, ModelSpec]) -> int:
    """Ids that every model has a row for.

    Those beyond take no part, as rows of padding take none: the actor's and the reference's probabilities are over
    the others alone, in generation, inference and training, so that no token is drawn that another model cannot read.
    """
    return min(spec.vocab for spec in specs.values())


def _check_vocab_shares(task: Task, spec: ModelSpec, vocab: int) -> None:
    """Log-probabilities need a row of the vocabulary on every tensor rank."""
    tp, rows = task.layout.tp, spec.padded_vocab // task.layout.tp
    if (tp - 1) * rows >= vocab:
        raise InputError(
            f"parallel.{task.name}={task.layout}: the last of tp({tp}) ranks has rows {(tp - 1) * rows} to "
            f"{tp * rows - 1} of the padded vocabulary, none of vocab({vocab}); use a smaller tp"
        )


def batch_arithmetic(config: RunConfig, tasks: tuple[Task, ...]) -> BatchArithmetic:
    """Resolve the batch for a table that `check_layouts` accepted."""
    layouts = {task.name: task.layout for task in tasks}
    rows = layouts["generation"], layouts["actor_train"], layouts.get("critic_train")
    return batch_of(config, *rows, config.fusion.actor_microbatches)


def batch_of(
    config: RunConfig,
    generation: ParallelLayout,
    actor: ParallelLayout,
    critic: ParallelLayout | None,
    actor_microbatches: int,
) -> BatchArithmetic:
    """The same of layouts and micro-batches that `config` need not name."""
    samples, instances = config.samples_per_iteration, generation.dp
    microbatches = actor.dp * actor_microbatches
    return BatchArithmetic(
        prompts=config.rollout.prompts_per_iteration,
        samples_per_prompt=config.rollout.samples_per_prompt,
        samples=samples,
        instances=instances,
        samples_per_instance=-(-samples // instances),
        minibatches=config.algorithm.minibatches,
        samples_per_minibatch=samples // config.algorithm.minibatches,
        actor_pipelines=actor.dp,
        actor_microbatches=actor_microbatches,
        critic_pipelines=critic.dp if critic else 0,
        critic_microbatches=microbatches // critic.dp if critic else 0,
        epochs=config.algorithm.epochs,
    )


def training_layouts(tasks: tuple[Task, ...]) -> dict[str, ParallelLayout]:
    """Layout of each model that trains, the actor first: what a fused group is made of."""
    return {task.role: task.layout for task in tasks if task.training}


def _check_training(config: RunConfig, tasks: tuple[Task, ...]) -> None:
    layouts = training_layouts(tasks)
    named = [f"parallel.{role}_train={layout}" for role, layout in layouts.items()]
    if config.parallel.sequence_parallel is True and max(layout.tp for layout in layouts.values()) == 1:
        raise InputError(
            f"parallel.sequence_parallel=true cuts tokens over tensor ranks, but {' and '.join(named)} "
            f"{'has' if len(named) == 1 else 'have'} tp(1); set it to false or use t2"
        )
    try:
        shape = fused_shape(layouts)
    except InputError as error:
        raise InputError(f"{' with '.join(named)}: {error}") from None
    k1, k2 = shape.shares[0].pipelines, shape.shares[-1].pipelines
    m1 = config.fusion.actor_microbatches
    if m1 != AUTO and k1 * m1 % k2:
        raise InputError(
            f"fusion.actor_microbatches={m1}: K1({k1}) * M1({m1}) = {k1 * m1} is no multiple of K2({k2}), so no M2 has "
            f"K1*M1 = K2*M2 ({' with '.join(map(str, layouts.values()))}); use a multiple of {k2}"
        )


def _check_models(config: RunConfig, specs: Mapping[Role, ModelSpec]) -> None:
    prompt, responses = config.data.max_prompt_tokens, {"rollout": config.rollout.max_response_tokens}
    if config.data.val_files:
        responses["eval"] = config.eval_response_tokens
    for role, (group, response) in product(specs, responses.items()):
        spec = specs[role]
        if prompt + response > spec.context:
            limit = "sliding_window" if spec.sliding_window else "context"
            raise InputError(
                f"data.max_prompt_tokens({prompt}) + {group}.max_response_tokens({response}) = {prompt + response} > "
                f"{limit}({spec.context}) of {role}; lower one of them"
            )

    stop, vocab = config.rollout.stop_token_ids, least_vocab(specs)
    if wrong := [token for token in stop if token >= vocab]:
        raise InputError(f"rollout.stop_token_ids={list(stop)}: {wrong[0]} is not an id in [0, {vocab})")


def _check_batch(config: RunConfig, fused: FusedShape) -> None:
    samples, minibatches = config.samples_per_iteration, config.algorithm.minibatches
    prompts, copies = config.rollout.prompts_per_iteration, config.rollout.samples_per_prompt
    if samples % minibatches:
        raise InputError(
            f"algorithm.minibatches={minibatches}: prompts({prompts}) * copies({copies}) = {samples} samples; "
            f"{samples} % {minibatches} = {samples % minibatches}, must be 0"
        )
    k1, m1 = fused.shares[0].pipelines, config.fusion.actor_microbatches
    needed = fused.replicas * k1 * m1
    if samples // minibatches < needed:
        least = fused.shares[-1].pipelines // math.gcd(k1, fused.shares[-1].pipelines)
        fixes = (("fewer micro-batches", m1 > least), ("fewer mini-batches", minibatches > 1), ("more prompts", True))
        raise InputError(
            f"fusion.actor_microbatches={m1}: a mini-batch has {samples} / {minibatches} = {samples // minibatches} "
            f"samples, fewer than replicas({fused.replicas}) * K1({k1}) * M1({m1}) = {needed} micro-batches; use "
            f"{' or '.join(fix for fix, helps in fixes if helps)}"
        )
    blocks, block = config.rollout.kv_blocks_per_instance, config.rollout.block_tokens
    longest = config.data.max_prompt_tokens + config.longest_response_tokens
    if blocks and blocks * block < longest:
        raise InputError(
            f"rollout.kv_blocks_per_instance={blocks}: {blocks} * {block} = {blocks * block} tokens < {longest} of one "
            f"sample at full length; use at least {-(-longest // block)}"
        )
