"""All tables that could run on so many ranks, as training rows and generation rows that combine freely.

Tensor ranks stay within a node; stages are whole layers; inference replicas lie within a generation instance; two
models that train have as many virtual stages. What a configuration says is held to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.role import Role
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.values import AUTO
from rlhfuse.decisions.layouts import divisors, fits_model, possible_layouts
from rlhfuse.planning.search.table import Table
from rlhfuse.planning.settled_run import SettledRun
from rlhfuse.schedule.ir.ranks import FusedShape, fused_shape

CHUNKS = (1, 2)  # virtual stages of a rank


@dataclass(frozen=True)
class TrainingRow:
    """The part of a table that training is about; `shape`: of its fused group."""

    actor: ParallelLayout
    critic: ParallelLayout | None
    microbatches: int
    recompute: str
    sequence_parallel: bool
    shape: FusedShape

    @property
    def layouts(self) -> dict[Role, ParallelLayout]:
        return {Role.ACTOR: self.actor, **({Role.CRITIC: self.critic} if self.critic else {})}


@dataclass(frozen=True)
class GenerationRow:
    generation: ParallelLayout
    inference: ParallelLayout


@dataclass(frozen=True)
class Given:
    """What a configuration leaves open is None; `inference` holds for all models that score."""

    generation: ParallelLayout | None = None
    inference: ParallelLayout | None = None
    actor_train: ParallelLayout | None = None
    critic_train: ParallelLayout | None = None
    microbatches: int | None = None
    recompute: str | None = None
    sequence_parallel: bool | None = None

    @staticmethod
    def of(config: RunConfig) -> Given:
        parallel, values = config.parallel, {}
        for row in ("generation", "inference", "actor_train", "critic_train"):
            text = getattr(parallel, row)
            values[row] = None if text == AUTO else ParallelLayout.parse(text)
        settings = config.fusion.actor_microbatches, config.trainer.recompute, parallel.sequence_parallel
        return Given(**values, **dict(zip(("microbatches", "recompute", "sequence_parallel"), map(_known, settings))))


def _known(value: Any) -> Any:
    return None if value == AUTO else value


@dataclass(frozen=True)
class Space:
    """Rows in the order of their text; `refused`: how many of them no run could have, by rule."""

    training: tuple[TrainingRow, ...]
    generation: tuple[GenerationRow, ...]
    refused: Mapping[str, int]

    @staticmethod
    def of(run: SettledRun, devices_per_node: int, given: Given) -> Space:
        """All rows of a run whose layouts are open, held to what is `given`.

        Raises InputError naming a row that is given and can be with nothing, or for want of any row.
        """
        refused: Counter[str] = Counter()
        training = sorted(_training_rows(run, devices_per_node, given, refused), key=_training_text)
        generation = sorted(_generation_rows(run, devices_per_node, given), key=_generation_text)
        for rows, names in ((training, ("actor_train", "critic_train")), (generation, ("generation", "inference"))):
            if not rows:
                fixed = [f"parallel.{name}={getattr(given, name)}" for name in names if getattr(given, name)]
                if rows is training and given.microbatches:
                    fixed.append(f"fusion.actor_microbatches={given.microbatches}")
                told = f"{' and '.join(fixed)}: " if fixed else ""
                raise InputError(
                    f"{told}no layouts of {' and '.join(names)} fit {run.world_size} ranks and these models; use "
                    "another number of ranks, or auto for these rows"
                )
        return Space(tuple(training), tuple(generation), refused)

    def table(self, training: int, generation: int) -> Table:
        row, decoding = self.training[training], self.generation[generation]
        layouts = decoding.generation, decoding.inference, row.actor, row.critic
        return Table(*layouts, row.microbatches, row.recompute, row.sequence_parallel)


def _training_rows(run: SettledRun, devices: int, given: Given, refused: Counter[str]) -> Iterator[TrainingRow]:
    config, specs = run.config, run.specs
    samples = config.samples_per_iteration // config.algorithm.minibatches
    rows = {Role.ACTOR: given.actor_train, Role.CRITIC: given.critic_train}
    options = [
        [layout]
        if (layout := rows[role])
        else list(possible_layouts(specs[role], run.world_size, devices, samples, CHUNKS))
        for role in config.trained()
    ]
    recomputes = [given.recompute] if given.recompute else ["none", "full"]
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
        k1, k2 = shape.shares[0].pipelines, shape.shares[-1].pipelines
        counts = [given.microbatches] if given.microbatches else divisors(samples // actor.dp)
        for count in counts:
            if k1 * count % k2:
                refused["K1*M1 != K2*M2"] += 1
            elif actor.dp * count <= samples:
                for recompute, sharded in product(recomputes, sharding):
                    yield TrainingRow(actor, critic, count, recompute, sharded, shape)


def _generation_rows(run: SettledRun, devices: int, given: Given) -> Iterator[GenerationRow]:
    config, specs, world_size = run.config, run.specs, run.world_size
    sizes = world_size, devices, config.samples_per_iteration
    decoding = [given.generation] if given.generation else possible_layouts(specs[Role.ACTOR], *sizes)
    scorers = [specs[role] for role in config.scorers()]
    for generation in decoding:
        if not scorers:
            yield GenerationRow(generation, given.inference or generation)
            continue
        every = possible_layouts(scorers[0], world_size, devices, world_size)
        scored = [given.inference] if given.inference else every
        for scoring in scored:
            if generation.tp % scoring.tp == 0 and all(fits_model(scoring, spec) for spec in scorers):
                yield GenerationRow(generation, scoring)


def _training_text(row: TrainingRow) -> str:
    return f"{row.actor} {row.critic} {row.microbatches:06d} {row.recompute} {row.sequence_parallel}"


def _generation_text(row: GenerationRow) -> str:
    return f"{row.generation} {row.inference}"
