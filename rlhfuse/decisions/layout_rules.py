"""Every rule that a run's table of layouts must keep.

Rules are equations; the InputError that refuses a table prints the one that fails with its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.auto_layouts import auto_layouts, refuse_auto, searched_keys
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO
from rlhfuse.decisions.batch_arithmetic import BatchArithmetic
from rlhfuse.decisions.layouts import given_tasks, training_layouts
from rlhfuse.schedule.ir.ranks import fused_shape
from rlhfuse.tasks.placement import worker_fault
from rlhfuse.tasks.role import Role
from rlhfuse.tasks.task import ModelTask


@dataclass(frozen=True)
class LayoutRules:
    """The rules of one run: its settings, its models, and how many ranks it has."""

    config: RunConfig
    specs: Mapping[Role, ModelSpec]
    world_size: int

    def table(self) -> tuple[ModelTask, ...]:
        """The task table, held against every rule with models and batch.

        Raises InputError with the equation that fails.
        """
        refuse_auto(searched_keys(self.config), "no layouts are searched here: tools/plan.py chooses some")
        tasks = self.given_rows()
        self._check_batch(tasks)
        self._check_cache()
        return tasks

    def batch(self, tasks: tuple[ModelTask, ...]) -> BatchArithmetic:
        """The batch with this task table. Raises InputError as `BatchArithmetic.of`."""
        layouts, config = {task.name: task.layout for task in tasks}, self.config
        longest = sum(config.longest_sample)
        return BatchArithmetic.of(config.rollout, config.algorithm, config.fusion, layouts, longest)

    def given_rows(self) -> tuple[ModelTask, ...]:
        """The rows that are not auto, held against world, models and each other. Raises InputError that names a row."""
        tasks = tuple(map(self._on_all_ranks, given_tasks(self.config.parallel, self.config.roles(), self.world_size)))
        for task in tasks:
            self._check_model(task)
        forwards = 1 + len(self.config.scorers())  # rows beside those of training; some may be auto
        if len(tasks) - len(training_layouts(tasks)) == forwards and (fault := worker_fault(tasks)):
            raise InputError(f"parallel.{fault}; use degrees that divide one another")
        if len(training_layouts(tasks)) == len(self.config.trained()):
            self._check_training(training_layouts(tasks))
        self._check_lengths()
        self._check_minibatches()
        return tasks

    def _on_all_ranks(self, task: ModelTask) -> ModelTask:
        """Raises InputError for a row that does not fill the world, or cannot run yet."""
        layout, world_size = task.layout, self.world_size
        where = f"parallel.{task.name}={getattr(self.config.parallel, task.name)}"
        if layout.ranks and layout.ranks != (task.mesh[0], task.mesh[-1]):
            raise InputError(
                f"{where}: {task.name} on ranks {layout.ranks[0]}-{layout.ranks[1]} of {world_size} is not yet "
                f"runnable; drop @{layout.ranks[0]}-{layout.ranks[1]} to run it on all ranks"
            )
        if layout.size != world_size:
            otherwise = "; or auto, as other layouts are" if auto_layouts(self.config) else ""
            raise InputError(
                f"{where}: dp({layout.dp}) * tp({layout.tp}) * pp({layout.pp}) = {layout.size} "
                f"!= world_size({world_size}){otherwise}"
            )
        return replace(task, layout=replace(layout, ranks=None))

    def _check_model(self, task: ModelTask) -> None:
        where, layout = f"parallel.{task.name}", task.layout
        if not task.training and layout.pp != 1:
            raise InputError(f"{where}={layout}: pp({layout.pp}) != 1; generation and inference have no pipeline")
        self.specs[task.role].check_layout(layout, where)
        if not task.role.scalar_head and task.name != "generation":
            _check_vocab_shares(task, self.specs[task.role], least_vocab(self.specs))

    def _check_training(self, layouts: Mapping[str, ParallelLayout]) -> None:
        named = [f"parallel.{role}_train={layout}" for role, layout in layouts.items()]
        if self.config.parallel.sequence_parallel is True and max(layout.tp for layout in layouts.values()) == 1:
            raise InputError(
                f"parallel.sequence_parallel=true cuts tokens over tensor ranks, but {' and '.join(named)} "
                f"{'has' if len(named) == 1 else 'have'} tp(1); set it to false or use t2"
            )
        try:
            shape = fused_shape(layouts)
        except InputError as error:
            raise InputError(f"{' with '.join(named)}: {error}") from None
        k1, k2 = shape.shares[0].pipelines, shape.shares[-1].pipelines
        m1 = self.config.fusion.actor_microbatches
        if m1 != AUTO and k1 * m1 % k2:
            raise InputError(
                f"fusion.actor_microbatches={m1}: K1({k1}) * M1({m1}) = {k1 * m1} is no multiple of K2({k2}), so no M2 "
                f"has K1*M1 = K2*M2 ({' with '.join(map(str, layouts.values()))}); use a multiple of {k2}"
            )

    def _check_lengths(self) -> None:
        """Samples fit every model's context, and stop tokens its vocabulary."""
        config, specs = self.config, self.specs
        prompt, responses = config.data.max_prompt_tokens, {"rollout": config.rollout.max_response_tokens}
        if config.data.val_files:
            responses["eval"] = config.eval_response_tokens
        for role, (group, response) in product(specs, responses.items()):
            spec = specs[role]
            if prompt + response > spec.context:
                limit = "sliding_window" if spec.sliding_window else "context"
                raise InputError(
                    f"data.max_prompt_tokens({prompt}) + {group}.max_response_tokens({response}) = "
                    f"{prompt + response} > {limit}({spec.context}) of {role}; lower one of them"
                )
        stop, vocab = config.rollout.stop_token_ids, least_vocab(specs)
        if wrong := [token for token in stop if token >= vocab]:
            raise InputError(f"rollout.stop_token_ids={list(stop)}: {wrong[0]} is not an id in [0, {vocab})")

    def _check_minibatches(self) -> None:
        config = self.config
        samples, minibatches = config.samples_per_iteration, config.algorithm.minibatches
        prompts, copies = config.rollout.prompts_per_iteration, config.rollout.samples_per_prompt
        if samples % minibatches:
            raise InputError(
                f"algorithm.minibatches={minibatches}: prompts({prompts}) * copies({copies}) = {samples} samples; "
                f"{samples} % {minibatches} = {samples % minibatches}, must be 0"
            )

    def _check_batch(self, tasks: tuple[ModelTask, ...]) -> None:
        config = self.config
        samples, minibatches = config.samples_per_iteration, config.algorithm.minibatches
        if (m1 := config.fusion.actor_microbatches) == AUTO:
            self.batch(tasks)  # refuses tokens that cannot be
            return
        fused = fused_shape(training_layouts(tasks))
        k1 = fused.shares[0].pipelines
        needed = fused.replicas * k1 * m1
        if samples // minibatches < needed:
            least = fused.shares[-1].pipelines // math.gcd(k1, fused.shares[-1].pipelines)
            fixes = (
                ("fewer micro-batches", m1 > least),
                ("fewer mini-batches", minibatches > 1),
                ("more prompts", True),
            )
            raise InputError(
                f"fusion.actor_microbatches={m1}: a mini-batch has {samples} / {minibatches} = "
                f"{samples // minibatches} samples, fewer than replicas({fused.replicas}) * K1({k1}) * M1({m1}) = "
                f"{needed} micro-batches; use {' or '.join(fix for fix, helps in fixes if helps)}"
            )

    def _check_cache(self) -> None:
        """Blocks that are given hold one sample at full length."""
        rollout, longest = self.config.rollout, self.config.data.max_prompt_tokens + self.config.longest_response_tokens
        blocks, block = rollout.kv_blocks_per_instance, rollout.block_tokens
        if blocks and blocks * block < longest:
            raise InputError(
                f"rollout.kv_blocks_per_instance={blocks}: {blocks} * {block} = {blocks * block} tokens < {longest} of "
                f"one sample at full length; use at least {-(-longest // block)}"
            )


def _check_vocab_shares(task: ModelTask, spec: ModelSpec, vocab: int) -> None:
    """Log-probabilities need a row of the vocabulary on every tensor rank."""
    tp, rows = task.layout.tp, spec.padded_vocab // task.layout.tp
    if (tp - 1) * rows >= vocab:
        raise InputError(
            f"parallel.{task.name}={task.layout}: the last of tp({tp}) ranks has rows {(tp - 1) * rows} to "
            f"{tp * rows - 1} of the padded vocabulary, none of vocab({vocab}); use a smaller tp"
        )


def least_vocab(specs: Mapping[Role, ModelSpec]) -> int:
    """Ids that every model has a row for.

    Those beyond take no part, as rows of padding take none: the actor's and the reference's probabilities are over
    the others alone, in generation, inference and training, so that no token is drawn that another model cannot read.
    """
    return min(spec.vocab for spec in specs.values())
