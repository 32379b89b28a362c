"""What is to be scheduled: pipelines, the nodes their stages live on, times and memory (problem.json).

Any number of pipelines with any stage -> node map: K1:K2 groups, several models, a model that visits a node twice.
Times are in any one unit, and so is memory. `transfer` delays a dependent task on another node and occupies no node.
Paper: section 5.2, problem formulation.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlhfuse.config.spec import ParallelLayout
from rlhfuse.errors import InputError
from rlhfuse.schedule.ir.ranks import ModelShare, fused_shape

Number = int | float
_NAME = re.compile(r"[^\s:<>]+")


@dataclass(frozen=True)
class Pipeline:
    """One pipeline: `placement[s]` is the node of stage `s`; times and activation are per stage and micro-batch.

    `activation` is held from the start of a micro-batch's forward on a stage to the end of its backward
    (of its weight gradient when split). Raises InputError on lengths that differ and numbers out of range.
    """

    name: str
    model: str
    placement: tuple[int, ...]
    microbatches: int
    forward: tuple[Number, ...]
    backward: tuple[Number, ...]
    activation: tuple[Number, ...]
    weight_gradient: tuple[Number, ...] | None = None

    def __post_init__(self) -> None:
        where = f"pipeline {self.name!r}"
        for label, name in (("name", self.name), ("model", self.model)):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise InputError(f"{where}: {label} {name!r} must be text without spaces, ':', '<' or '>'")
        _check_integer(f"{where}: microbatches", self.microbatches, 1)
        if not self.placement:
            raise InputError(f"{where}: placement is empty; list the node of each stage")
        for node in self.placement:
            _check_integer(f"{where}: placement", node, 0)
        for key in ("forward", "backward", "activation", "weight_gradient"):
            values = getattr(self, key)
            if values is None and key == "weight_gradient":
                continue
            if len(values) != self.stages:
                raise InputError(f"{where}: {key} has {len(values)} entries for {self.stages} stages; give one each")
            for value in values:
                _check_number(f"{where}: {key}", value, positive=key != "activation")

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def split(self) -> bool:
        """Whether the weight gradient is an action of its own."""
        return self.weight_gradient is not None


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
        _check_integer("nodes", self.nodes, 1)
        _check_number("transfer", self.transfer, positive=False)
        if not self.pipelines:
            raise InputError("pipelines is empty; give at least one")
        for key in ("memory_cap", "static_memory"):
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

    def pipeline(self, name: str) -> Pipeline:
        """The pipeline called `name`. Raises InputError listing the known names."""
        for pipeline in self.pipelines:
            if pipeline.name == name:
                return pipeline
        raise InputError(f"pipeline {name!r} is not in the problem; it has {', '.join(p.name for p in self.pipelines)}")

    @property
    def models(self) -> tuple[str, ...]:
        """Model names in order of first appearance."""
        return tuple(dict.fromkeys(pipeline.model for pipeline in self.pipelines))

    def node_cap(self, node: int) -> float:
        """Memory left for activations on `node`: memory_cap minus static_memory (inf without a cap)."""
        if self.memory_cap is None:
            return math.inf
        cap = self.memory_cap[node] if isinstance(self.memory_cap, tuple) else self.memory_cap
        static = self.static_memory[node] if isinstance(self.static_memory, tuple) else self.static_memory
        return cap - static

    @staticmethod
    def from_dict(raw: Any, where: str = "problem") -> FusionProblem:
        """Read the JSON form. Raises InputError naming the place in `where` and the fix."""
        _check_keys(raw, where, {"version", "nodes", "pipelines"}, _OPTIONAL)
        if raw["version"] != 1:
            raise InputError(f"{where}: version {raw['version']!r} is unknown; this program reads version 1")
        if not isinstance(raw["pipelines"], list):
            raise InputError(f"{where}: pipelines must be a list")
        pipelines = tuple(_read_pipeline(entry, f"{where}: pipelines[{i}]") for i, entry in enumerate(raw["pipelines"]))
        try:
            return FusionProblem(
                nodes=raw["nodes"],
                pipelines=pipelines,
                transfer=raw.get("transfer", 0),
                memory_cap=_as_tuple(raw.get("memory_cap")),
                static_memory=_as_tuple(raw.get("static_memory", 0)),
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
            "pipelines": [_write_pipeline(pipeline) for pipeline in self.pipelines],
        }


_OPTIONAL = {"memory_cap", "static_memory", "transfer"}
_PER_STAGE = ("forward", "backward", "activation", "weight_gradient")


def load_problem(path: str | Path) -> FusionProblem:
    """Read problem.json. Raises InputError naming the file and the place in it."""
    return FusionProblem.from_dict(read_json(path), str(path))


def read_json(path: str | Path) -> Any:
    """Parse a JSON file. Raises InputError naming a file that is missing, unreadable or not JSON."""
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check the path") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None


def _read_pipeline(raw: Any, where: str) -> Pipeline:
    _check_keys(
        raw,
        where,
        {"name", "model", "placement", "microbatches", "forward", "backward", "activation"},
        {"weight_gradient"},
    )
    placement = raw["placement"]
    if not isinstance(placement, list):
        raise InputError(f"{where}: placement must be a list of nodes, one per stage")
    stages = {}
    for key in _PER_STAGE:
        value = raw.get(key)
        if value is None and key != "weight_gradient":
            raise InputError(f"{where}: {key} is null; give a number or one per stage")
        stages[key] = tuple(value) if isinstance(value, list) else None if value is None else (value,) * len(placement)
    try:
        return Pipeline(raw["name"], raw["model"], tuple(placement), raw["microbatches"], **stages)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _write_pipeline(pipeline: Pipeline) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for field in fields(pipeline):
        value = getattr(pipeline, field.name)
        if field.name in _PER_STAGE:
            if value is None:
                continue
            value = value[0] if len(set(value)) == 1 else list(value)
        raw[field.name] = list(value) if isinstance(value, tuple) else value
    return raw


def _check_keys(raw: Any, where: str, needed: set[str], optional: set[str]) -> None:
    if not isinstance(raw, dict):
        raise InputError(f"{where}: must be a JSON object, not {type(raw).__name__}")
    for key in sorted(needed - raw.keys()):
        raise InputError(f"{where}: {key} is missing; add it")
    for key in sorted(raw.keys() - needed - optional):
        raise InputError(f"{where}: unknown key {key!r}; known are {', '.join(sorted(needed | optional))}")


def _check_integer(what: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(f"{what} is {value!r}; an integer of at least {low} is needed")


def _check_number(what: str, value: Any, *, positive: bool) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (positive and value == 0):
        raise InputError(f"{what} is {value!r}; a {'positive' if positive else 'non-negative'} number is needed")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class StageCosts:
    """What one micro-batch costs on each real pipeline stage of a model: times in one unit, activation in another.

    With `weight_gradient` the backward is split.
    """

    forward: tuple[Number, ...]
    backward: tuple[Number, ...]
    activation: tuple[Number, ...]
    weight_gradient: tuple[Number, ...] | None = None


def fused_problem(
    layouts: Mapping[str, ParallelLayout],
    microbatches: int,
    costs: Mapping[str, StageCosts],
    others: Mapping[str, int] | None = None,
    alternate: bool = True,
) -> FusionProblem:
    """The problem of one fused group; every replica runs its schedule. `transfer` is 0 and there is no cap.

    `microbatches` are per pipeline of the first model; the other models' follow from K1*M1 = Kn*Mn, and those given
    in `others` are checked against it. A merged stage costs the sum of its sub-stages in time; in memory it counts
    its fullest sub-stage, since each lives on ranks of its own. Raises InputError with the arithmetic that fails.
    """
    shape = fused_shape(layouts, alternate)
    first = shape.shares[0]
    _check_integer(f"{first.model}_microbatches", microbatches, 1)
    pipelines: tuple[Pipeline, ...] = ()
    for number, share in enumerate(shape.shares, start=1):
        count = _microbatches(first, microbatches, share, number, (others or {}).get(share.model))
        pipelines += _pipelines(share, count, costs[share.model])
    return FusionProblem(nodes=shape.nodes, pipelines=pipelines)


def _microbatches(first: ModelShare, microbatches: int, share: ModelShare, number: int, given: int | None) -> int:
    """Micro-batches per pipeline of the `number`-th model."""
    total = first.pipelines * microbatches
    product = f"K1*M1 = {first.pipelines}*{microbatches} = {total}"
    layouts = f"({first.layout} with {share.layout})"
    if given is not None:
        _check_integer(f"{share.model}_microbatches", given, 1)
        if total != share.pipelines * given:
            raise InputError(
                f"{product} but K{number}*M{number} = {share.pipelines}*{given} = {share.pipelines * given} {layouts}; "
                "all models train on the same micro-batches, make the products equal"
            )
    if total % share.pipelines:
        raise InputError(
            f"{product} micro-batches do not divide over K{number} = {share.pipelines} {share.model} pipelines "
            f"{layouts}; make {first.model}_microbatches a multiple of {share.pipelines}"
        )
    return total // share.pipelines


def _pipelines(share: ModelShare, microbatches: int, costs: StageCosts) -> tuple[Pipeline, ...]:
    layout = share.layout

    def merged(key: str, join: Callable[[tuple[Number, ...]], Number]) -> tuple[Number, ...]:
        values = getattr(costs, key)
        if len(values) != layout.stages:
            chunks = f" * v({layout.chunks})" if layout.chunks > 1 else ""
            raise InputError(f"{share.model} costs: {key} has {len(values)} entries for pp({layout.pp}){chunks} stages")
        return tuple(join(values[i : i + share.merge]) for i in range(0, len(values), share.merge))

    stages = {
        "forward": merged("forward", sum),
        "backward": merged("backward", sum),
        "activation": merged("activation", max),
        "weight_gradient": None if costs.weight_gradient is None else merged("weight_gradient", sum),
    }
    return tuple(
        Pipeline(name=name, model=share.model, placement=share.placement(k), microbatches=microbatches, **stages)
        for k, name in enumerate(share.names)
    )
