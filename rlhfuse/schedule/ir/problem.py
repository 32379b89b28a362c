"""What is to be scheduled: pipelines, the nodes their stages live on, times and memory (problem.json).

Any number of pipelines with any stage -> node map: K1:K2 groups, several models, a model that visits a node twice.
Times are in any one unit, and so is memory. `transfer` delays a dependent task on another node and occupies no node.
Paper: section 5.2, problem formulation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import JsonModel, JsonNumber, JsonNumbers, parse_json, read_json
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.schedule.ir.ranks import ModelShare, fused_shape

Number = int | float
PerStage = Callable[[tuple[Number, ...]], tuple[Number, ...]]
_NAME = re.compile(r"[^\s:<>]+")
_PER_STAGE = ("forward", "backward", "activation", "weight_gradient", "weight_activation")
_MEMORY = ("activation", "weight_activation")
SMALLEST, LARGEST = 1e-12, 1e18  # numbers but 0: sums and quotients of them keep within float64 and int64
MOST_NODES, MOST_TASKS = 10_000, 500_000


@dataclass(frozen=True)
class Pipeline:
    """One pipeline: `placement[s]` is the node of stage `s`; times and activation are per stage and micro-batch.

    `activation` is held from the start of a micro-batch's forward on a stage to the end of its backward. With
    `weight_gradient` the backward is split: `backward` is then the input gradient, the weight gradient W follows it,
    and from the end of the one to the end of the other `weight_activation` is held (None: the activation). Where that
    is more, B takes it when it starts. Raises InputError on lengths that differ and numbers out of range.
    """

    name: str
    model: str
    placement: tuple[int, ...]
    microbatches: int
    forward: tuple[Number, ...]
    backward: tuple[Number, ...]
    activation: tuple[Number, ...]
    weight_gradient: tuple[Number, ...] | None = None
    weight_activation: tuple[Number, ...] | None = None

    def __post_init__(self) -> None:
        where = f"pipeline {self.name!r}"
        for label, name in (("name", self.name), ("model", self.model)):
            if not _NAME.fullmatch(name):
                raise InputError(f"{where}: {label} {name!r} must be text without spaces, ':', '<' or '>'")
        if not self.placement:
            raise InputError(f"{where}: placement is empty; list the node of each stage")
        if self.microbatches < 1:
            raise InputError(f"{where}: microbatches is {self.microbatches}; at least 1 is needed")
        if self.weight_activation is not None and not self.split:
            raise InputError(f"{where}: weight_activation is held for W; give weight_gradient as well, or neither")
        for key in _PER_STAGE:
            values = getattr(self, key)
            if values is None:
                continue
            if len(values) != self.stages:
                raise InputError(f"{where}: {key} has {len(values)} entries for {self.stages} stages; give one each")
            if SMALLEST <= min(values) <= max(values) <= LARGEST and math.isfinite(sum(values)):
                continue  # plans make thousands of problems
            for value in values:
                _check_number(f"{where}: {key}", value, positive=key not in _MEMORY)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def split(self) -> bool:
        """Whether the weight gradient is an action of its own."""
        return self.weight_gradient is not None

    @property
    def held_for_weights(self) -> tuple[Number, ...]:
        """Memory of a micro-batch on each stage from the end of B to the end of W."""
        if not self.split:
            return (0,) * self.stages
        return self.activation if self.weight_activation is None else self.weight_activation

    def with_facts(self, times: PerStage, memory: PerStage, **others: Any) -> Pipeline:
        """The pipeline with `others`, and with what `times` and `memory` make of each fact that it has per stage."""
        given = {key: values for key in _PER_STAGE if (values := getattr(self, key)) is not None}
        changed = {key: (memory if key in _MEMORY else times)(values) for key, values in given.items()}
        return replace(self, **others, **changed)


@dataclass(frozen=True)
class FusionProblem:
    """Pipelines over `nodes` nodes. `memory_cap` and `static_memory` are scalars or one per node.

    A schedule keeps static_memory + activations <= memory_cap on every node. Raises InputError on a
    pipeline placed outside the nodes, on a name used twice and on lists of the wrong length.
    """

    nodes: int
    pipelines: tuple[Pipeline, ...]
    transfer: Number = 0
    memory_cap: Number | tuple[Number, ...] | None = None
    static_memory: Number | tuple[Number, ...] = 0

    def __post_init__(self) -> None:
        if self.nodes > MOST_NODES:
            raise InputError(f"nodes is {self.nodes}; at most {MOST_NODES} can be scheduled")
        for key in ("transfer", "memory_cap", "static_memory"):
            value = getattr(self, key)
            if isinstance(value, tuple) and len(value) != self.nodes:
                raise InputError(f"{key} has {len(value)} entries for {self.nodes} nodes; give one each or a scalar")
            for entry in value if isinstance(value, tuple) else () if value is None else (value,):
                _check_number(key, entry, positive=False)
        names = [pipeline.name for pipeline in self.pipelines]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"pipeline name {name!r} is used {names.count(name)} times; names must differ")
        for pipeline in self.pipelines:
            if max(pipeline.placement) >= self.nodes:
                raise InputError(
                    f"pipeline {pipeline.name!r}: placement names node {max(pipeline.placement)}, "
                    f"but nodes are 0..{self.nodes - 1}"
                )
        if self.tasks > MOST_TASKS:
            raise InputError(
                f"at most {MOST_TASKS} tasks can be scheduled, these are {self.tasks}; use fewer micro-batches: raise "
                "fusion.microbatch_tokens or algorithm.minibatches"
            )

    def pipeline(self, name: str) -> Pipeline:
        """The pipeline called `name`. Raises InputError listing the known names."""
        for pipeline in self.pipelines:
            if pipeline.name == name:
                return pipeline
        raise InputError(f"pipeline {name!r} is not in the problem; it has {', '.join(p.name for p in self.pipelines)}")

    @property
    def tasks(self) -> int:
        """How many actions a schedule has."""
        return sum(p.stages * p.microbatches * (3 if p.split else 2) for p in self.pipelines)

    @property
    def models(self) -> tuple[str, ...]:
        """Model names in order of first appearance."""
        return tuple(dict.fromkeys(pipeline.model for pipeline in self.pipelines))

    def with_microbatches(self, first: int) -> FusionProblem:
        """The same where the first pipeline has so many micro-batches, and the others as many in proportion."""
        present = self.pipelines[0].microbatches
        counts = (pipeline.microbatches * first // present for pipeline in self.pipelines)
        return replace(
            self, pipelines=tuple(replace(p, microbatches=count) for p, count in zip(self.pipelines, counts))
        )

    def without_idle_cap(self) -> FusionProblem:
        """Without the cap and amounts of memory, if every node has room for all micro-batches of all its stages, so
        that no schedule can break the cap: then problems of equal times are equal. Else as it is."""
        most = [0.0] * self.nodes
        for p in self.pipelines:
            for node, *held in zip(p.placement, p.activation, p.held_for_weights):
                most[node] += p.microbatches * max(held)
        if any(held > self.node_cap(node) for node, held in enumerate(most)):
            return self
        bare = (p.with_facts(tuple, lambda amounts: (0,) * len(amounts)) for p in self.pipelines)
        return replace(self, pipelines=tuple(bare), memory_cap=None, static_memory=0)

    def node_cap(self, node: int) -> float:
        """Memory left for activations on `node`: memory_cap minus static_memory (inf without a cap)."""
        cap = self.memory_cap[node] if isinstance(self.memory_cap, tuple) else self.memory_cap
        return math.inf if cap is None else cap - self.node_static(node)

    def node_static(self, node: int) -> Number:
        """Static memory of `node`."""
        return self.static_memory[node] if isinstance(self.static_memory, tuple) else self.static_memory

    @staticmethod
    def from_dict(raw: Any, where: str = "problem") -> FusionProblem:
        """Read the JSON form. Raises InputError naming the place in `where` and the fix."""
        form = parse_json(_ProblemJson, raw, where)
        try:
            return FusionProblem(
                form.nodes,
                tuple(pipeline.value() for pipeline in form.pipelines),
                form.transfer,
                _as_tuple(form.memory_cap),
                _as_tuple(form.static_memory),
            )
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; equal values over all stages become one scalar. Inverse of `from_dict`."""
        return {
            "version": 1,
            "nodes": self.nodes,
            "memory_cap": _as_list(self.memory_cap),
            "static_memory": _as_list(self.static_memory),
            "transfer": self.transfer,
            "pipelines": [_pipeline_dict(pipeline) for pipeline in self.pipelines],
        }


def load_problem(path: str | Path) -> FusionProblem:
    """Read problem.json. Raises InputError naming the file and the place in it."""
    return FusionProblem.from_dict(read_json(path), str(path))


Node = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class _PipelineJson(JsonModel):
    name: str
    model: str
    placement: list[Node]
    microbatches: Count
    forward: list[JsonNumber]
    backward: list[JsonNumber]
    activation: list[JsonNumber]
    weight_gradient: list[JsonNumber] | None = None
    weight_activation: list[JsonNumber] | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_per_stage(cls, raw: Any) -> Any:
        """A scalar stands for the same value on every stage."""
        if not isinstance(raw, dict) or not isinstance(raw.get("placement"), list):
            return raw
        scalars = {key for key in _PER_STAGE if raw.get(key) is not None and not isinstance(raw[key], list)}
        return raw | {key: [raw[key]] * len(raw["placement"]) for key in scalars}

    def value(self) -> Pipeline:
        return Pipeline(**{name: _as_tuple(getattr(self, name)) for name in type(self).model_fields})


class _ProblemJson(JsonModel):
    version: Literal[1]
    nodes: Count
    pipelines: Annotated[list[_PipelineJson], Field(min_length=1)]
    transfer: JsonNumber = 0
    memory_cap: JsonNumbers | None = None
    static_memory: JsonNumbers = 0


def _pipeline_dict(pipeline: Pipeline) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for field in fields(pipeline):
        value = getattr(pipeline, field.name)
        if field.name in _PER_STAGE:
            if value is None:
                continue
            value = value[0] if len(set(value)) == 1 else list(value)
        raw[field.name] = list(value) if isinstance(value, tuple) else value
    return raw


def _check_number(what: str, value: Number, *, positive: bool) -> None:
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise InputError(f"{what} is {value!r}; a {'positive' if positive else 'non-negative'} number is needed")
    if value and not SMALLEST <= value <= LARGEST:
        raise InputError(f"{what} is {value!r}; use a unit in which it is in [{SMALLEST:g}, {LARGEST:g}]")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class StageCosts:
    """What one micro-batch costs on each real pipeline stage of a model: times in one unit, activation in another.

    With `weight_gradient` the backward is split, and `weight_activation` is held between its parts (None: activation).
    """

    forward: tuple[Number, ...]
    backward: tuple[Number, ...]
    activation: tuple[Number, ...]
    weight_gradient: tuple[Number, ...] | None = None
    weight_activation: tuple[Number, ...] | None = None


def fused_problem(
    layouts: Mapping[str, ParallelLayout],
    microbatches: int,
    costs: Mapping[str, StageCosts],
    alternate: bool = True,
) -> FusionProblem:
    """The problem of one fused group; every replica runs its schedule. `transfer` is 0 here and there is no cap.

    `microbatches` are per pipeline of the first model; the other models' follow from K1*M1 = Kn*Mn. A merged stage
    costs the sum of its sub-stages in time; in memory it counts its fullest sub-stage, since each lives on ranks of its
    own. Raises InputError with the arithmetic that fails.
    """
    shape = fused_shape(layouts, alternate)
    first = shape.shares[0]
    if microbatches < 1:
        raise InputError(f"{first.model}_microbatches is {microbatches}; at least 1 is needed")
    pipelines: tuple[Pipeline, ...] = ()
    for number, share in enumerate(shape.shares, start=1):
        pipelines += _pipelines(share, _microbatches(first, microbatches, share, number), costs[share.model])
    return FusionProblem(nodes=shape.nodes, pipelines=pipelines)


def _microbatches(first: ModelShare, microbatches: int, share: ModelShare, number: int) -> int:
    """Micro-batches per pipeline of the `number`-th model."""
    total = first.pipelines * microbatches
    if total % share.pipelines:
        raise InputError(
            f"K1*M1 = {first.pipelines}*{microbatches} = {total} micro-batches do not divide over K{number} = "
            f"{share.pipelines} {share.model} pipelines ({first.layout} with {share.layout}); make "
            f"{first.model}_microbatches a multiple of {share.pipelines}"
        )
    return total // share.pipelines


def _pipelines(share: ModelShare, microbatches: int, costs: StageCosts) -> tuple[Pipeline, ...]:
    layout = share.layout

    def merged(key: str, join: Callable[[tuple[Number, ...]], Number]) -> tuple[Number, ...]:
        values = getattr(costs, key)
        if len(values) != layout.stages:
            chunks = f" * v({layout.chunks})" if layout.chunks > 1 else ""
            raise InputError(f"{share.model} costs: {key} has {len(values)} entries for pp({layout.pp}){chunks} stages")
        if share.merge == 1:
            return tuple(values)
        return tuple(join(values[i : i + share.merge]) for i in range(0, len(values), share.merge))

    given = [key for key in _PER_STAGE if getattr(costs, key) is not None]
    stages: dict[str, Any] = {key: merged(key, max if key in _MEMORY else sum) for key in given}
    return tuple(
        Pipeline(name=name, model=share.model, placement=share.placement(k), microbatches=microbatches, **stages)
        for k, name in enumerate(share.names)
    )
