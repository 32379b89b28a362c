"""Profiles in which calls take the same seconds whatever their size."""

from collections.abc import Mapping
from typing import Any

from rlhfuse.config.device_defaults import resolve_device
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.fits import Grid
from rlhfuse.costs.profiled import ProfiledCost, TrainingGrids, made_for
from rlhfuse.decisions.layouts import given_tasks


def facts_of(made: RunConfig, specs: Mapping[str, ModelSpec]) -> dict[str, Any]:
    """What a profile of the run is made for."""
    return made_for(made.trainer, given_tasks(made.parallel, made.roles(), 1), specs)


def line(seconds: float, largest: float | None = None) -> Grid:
    """By one count, up to `largest`."""
    axis = (1.0,) if largest is None else (1.0, largest)
    return Grid((axis,), (seconds,) * len(axis))


def plane(seconds: float, largest: float | None = None) -> Grid:
    """By two counts."""
    axis = (1.0,) if largest is None else (1.0, largest)
    return Grid((axis, axis), (seconds,) * len(axis) ** 2)


def training(layer: float, ends: float, *split: float, backward: float | None = None) -> TrainingGrids:
    """Grids of one rank; `split`: B and W of a layer, `backward`: the whole one where it takes other seconds."""
    return TrainingGrids(1, line(layer), line(backward or layer), line(ends), line(ends), *map(line, split))


def trained(made: RunConfig, specs: dict[str, ModelSpec], grids: Mapping[str, TrainingGrids]) -> ProfiledCost:
    """A second for all other work, and nothing to load weights."""
    score = dict.fromkeys(made.scorers(), plane(1.0))
    facts = facts_of(resolve_device(made), specs)
    return ProfiledCost(facts, plane(1.0), plane(1.0), score, 0.0, line(1.0), None, dict(grids))


def of_degree(made: RunConfig, specs: Mapping[str, ModelSpec], degree: int, largest: float = 2.0) -> ProfiledCost:
    """As many seconds as tensor ranks, for counts up to `largest`."""
    by_two, by_one = plane(float(degree), largest), line(float(degree), largest)
    facts = facts_of(made, specs)
    facts |= {key: degree for key in facts if key.endswith("_tp")}
    score = dict.fromkeys(made.scorers(), by_two)
    grids = dict.fromkeys(made.trained(), TrainingGrids(degree, by_one, by_one, by_one, by_one))
    return ProfiledCost(facts, by_two, by_two, score, float(degree), by_one, by_one, grids)
