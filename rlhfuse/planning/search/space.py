"""All tables that could run on so many ranks, as training rows and generation rows that combine freely.

Tensor ranks stay within a node; stages are whole layers; two models that train have as many virtual stages. Models that
score are as wide as their workers where their shapes allow that. What a configuration says is held to.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import get_args

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.auto_layouts import auto_layouts
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.values import AUTO, Recompute, known
from rlhfuse.decisions.batch_arithmetic import BatchArithmetic, multiple_of
from rlhfuse.decisions.layouts import divisors, possible_layouts, widest_layout
from rlhfuse.planning.job import Job
from rlhfuse.planning.search.table import NUMBER, TOKENS, CutSetting, Inference, Table, inference_text, shared
from rlhfuse.planning.training.drawn_batches import DrawnBatches
from rlhfuse.schedule.ir.ranks import FusedShape, fused_shape
from rlhfuse.tasks.placement import worker_fault
from rlhfuse.tasks.role import LEARNERS, POLICY, Role
from rlhfuse.tasks.task import TRAINED, ModelTask

CHUNKS = (1, 2)  # virtual stages of a rank
LONGEST_TIMES = (1, 1.5, 2, 3, 4)  # tokens of a micro-batch that are tried, over those of the longest sample


@dataclass(frozen=True)
class TrainingRow:
    """The part of a table that training is about; `shape`: of its fused group; `batch`: its instances are of no
    meaning."""

    actor: ParallelLayout
    critic: ParallelLayout | None
    cut: CutSetting
    recompute: Recompute
    sequence_parallel: bool
    shape: FusedShape
    batch: BatchArithmetic

    def __str__(self) -> str:
        return f"{self.actor} {self.critic} {self.cut.text} {self.recompute} {self.sequence_parallel}"

    @property
    def layouts(self) -> dict[Role, ParallelLayout]:
        return {role: layout for role, layout in zip(LEARNERS, (self.actor, self.critic)) if layout}


@dataclass(frozen=True)
class GenerationRow:
    generation: ParallelLayout
    inference: Inference


@dataclass(frozen=True)
class Given:
    """What a configuration leaves open is None, or no row of `inference`."""

    generation: ParallelLayout | None = None
    inference: Inference = ()
    actor_train: ParallelLayout | None = None
    critic_train: ParallelLayout | None = None
    cut: CutSetting | None = None
    recompute: Recompute | None = None
    sequence_parallel: bool | None = None

    @staticmethod
    def of(config: RunConfig) -> Given:
        parallel, scored = config.parallel, [f"{role}_inference" for role in config.scorers()] or ["inference"]
        texts = {row: getattr(parallel, row) for row in ("generation", *scored, *TRAINED)}
        rows = {row: ParallelLayout.parse(text) for row, text in texts.items() if text != AUTO}
        inference = tuple((row, rows.pop(row)) for row in scored if row in rows)
        recompute, sharded = known(config.trainer.recompute, None), known(parallel.sequence_parallel, None)
        more = {"cut": CutSetting.given(config.fusion), "recompute": recompute, "sequence_parallel": sharded}
        return Given(inference=inference, **rows, **more)

    @property
    def forwards(self) -> dict[str, ParallelLayout]:
        """The rows of generation and of models that score."""
        scored = shared(self.inference) if self.inference else {}
        return {**({"generation": self.generation} if self.generation else {}), **scored}

    @property
    def trained(self) -> dict[str, ParallelLayout]:
        return {row: layout for row in TRAINED if (layout := getattr(self, row))}


@dataclass(frozen=True)
class Space:
    """Rows in the order of their text; `refused`: how many of them no run could have, by rule."""

    training: tuple[TrainingRow, ...]
    generation: tuple[GenerationRow, ...]
    refused: Mapping[str, int]

    @staticmethod
    def of(run: Job, devices_per_node: int, given: Given, drawn: DrawnBatches) -> Space:
        """All rows of a run whose layouts are open, held to what is `given`; of the budgets of tokens that cut all
        that is `drawn` alike the smallest, which takes least memory.

        Raises InputError naming a row that is given and can be with nothing, or for want of any row.
        """
        refused: Counter[str] = Counter()
        training = sorted(_training_rows(run, devices_per_node, given, drawn, refused), key=str)
        decoding = _generation_rows(run, devices_per_node, given)
        generation = sorted(decoding, key=lambda row: f"{row.generation} {inference_text(row.inference)}")
        for rows, names, own in (
            (training, TRAINED, given.trained),
            (generation, ("generation", "inference"), given.forwards),
        ):
            if not rows:
                if rows is training and not auto_layouts(run.config):
                    tokens = run.config.samples_per_iteration * sum(run.config.longest_sample)
                    cut = given.cut or CutSetting(TOKENS, tokens)
                    run.with_config(run.config.with_(fusion=cut.settings)).rules.table()  # which says why
                fixed = [f"parallel.{name}={layout}" for name, layout in own.items()]
                if rows is training and given.cut:
                    fixed.append(f"fusion.{given.cut.name}={given.cut.value}")
                told = f"{' and '.join(fixed)}: " if fixed else ""
                fix = "use auto for these rows" if fixed else f"use whole machines of {devices_per_node} ranks"
                raise InputError(
                    f"{told}no layouts of {' and '.join(names)} fit {run.world_size} ranks and these models; {fix}"
                )
        return Space(tuple(training), tuple(generation), refused)

    def table(self, training: int, generation: int) -> Table:
        row, decoding = self.training[training], self.generation[generation]
        layouts = decoding.generation, decoding.inference, row.actor, row.critic
        return Table(*layouts, row.cut, row.recompute, row.sequence_parallel)


def _training_rows(
    run: Job, devices: int, given: Given, drawn: DrawnBatches, refused: Counter[str]
) -> Iterator[TrainingRow]:
    config, specs = run.config, run.specs
    samples = config.samples_per_iteration // config.algorithm.minibatches
    rows = dict(zip(LEARNERS, (given.actor_train, given.critic_train)))
    options = [
        [layout]
        if (layout := rows[role])
        else list(possible_layouts(specs[role], run.world_size, devices, samples, CHUNKS))
        for role in config.trained()
    ]
    recomputes = (given.recompute,) if given.recompute else get_args(Recompute)
    for layouts in product(*options):
        if len({layout.chunks for layout in layouts}) > 1:
            continue
        try:
            shape = fused_shape(dict(zip(config.trained(), layouts)), config.fusion.alternates)
        except InputError:
            refused["shapes that share no ranks"] += 1
            continue
        actor, critic = layouts[0], layouts[1] if len(layouts) > 1 else None
        sharding = [given.sequence_parallel] if given.sequence_parallel is not None else [False, True]
        sharding = [sharded for sharded in sharding if not sharded or shape.node_ranks > 1]
        budgets = token_budgets(sum(config.longest_sample), samples, actor.dp)
        cuts = [given.cut] if given.cut else [CutSetting(TOKENS, tokens) for tokens in budgets]
        seen: set[Sequence[int]] = set()
        for cut in cuts:
            if (batch := _batch(run, cut, actor, critic, refused)) is None:
                continue
            rungs = drawn.rung_of_each(batch.cut)
            if rungs in seen:
                refused["micro-batches as of fewer tokens"] += 1
            else:
                seen.add(rungs)
                for recompute, sharded in product(recomputes, sharding):
                    yield TrainingRow(actor, critic, cut, recompute, sharded, shape, batch)


def token_budgets(longest: int, samples: int, pipelines: int) -> list[int]:
    """Most tokens of a micro-batch that are tried for a mini-batch of so many samples: a few from the longest sample
    up, and all that a pipeline has."""
    every = max(1, -(-samples // pipelines)) * longest
    return sorted({min(math.ceil(times * longest), every) for times in LONGEST_TIMES} | {every})


def _batch(
    run: Job, cut: CutSetting, actor: ParallelLayout, critic: ParallelLayout | None, refused: Counter[str]
) -> BatchArithmetic | None:
    """The batch of a row. None: no run could have it."""
    trained = zip(TRAINED, filter(None, (actor, critic)))
    layouts = {"generation": actor, **dict(trained)}
    config = run.config
    samples = config.samples_per_iteration // config.algorithm.minibatches
    if cut.name == NUMBER:
        if cut.value % multiple_of([actor, critic] if critic else [actor], by_rule=False):
            refused["K1*M1 != K2*M2"] += 1
            return None
        if actor.dp * cut.value > samples:
            return None
    fusion, longest = config.fusion.with_(**cut.settings), sum(config.longest_sample)
    try:
        return BatchArithmetic.of(config.rollout, config.algorithm, fusion, layouts, longest)
    except InputError:
        refused["micro-batches of so many tokens"] += 1
        return None


def _generation_rows(run: Job, devices: int, given: Given) -> Iterator[GenerationRow]:
    config, specs, world_size = run.config, run.specs, run.world_size
    sizes = world_size, devices, config.samples_per_iteration
    decoding = [given.generation] if given.generation else possible_layouts(specs[POLICY], *sizes)
    scorers, known_rows = {f"{role}_inference": specs[role] for role in config.scorers()}, dict(given.inference)
    widths = [tp for tp in divisors(world_size) if devices % tp == 0] if len(known_rows) < len(scorers) else [1]
    for generation in decoding:
        if not scorers:
            yield GenerationRow(generation, given.inference or (("inference", generation),))
            continue
        seen = set[Inference]()
        for width in widths:
            rows = {row: known_rows.get(row) or widest_layout(spec, world_size, width) for row, spec in scorers.items()}
            tasks = [
                ModelTask.of(row, layout, world_size) for row, layout in (("generation", generation), *rows.items())
            ]
            if (inference := tuple(rows.items())) not in seen and not worker_fault(tasks):
                seen.add(inference)
                yield GenerationRow(generation, inference)
