"""From a configuration with layouts that are auto to one without: as in the checkpoint that is resumed, or searched.

Every rank does it for itself before there is a process group. Nothing in it is random or looks at a clock, so all of
them get the same. What a resumed run had stays, for another table would change the order of its sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhfuse.base.errors import InputError
from rlhfuse.config.auto_layouts import auto_layouts, layout_rows, searched_keys
from rlhfuse.config.device_defaults import resolve_device
from rlhfuse.config.role import Role
from rlhfuse.config.settings import ParallelConfig, RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO
from rlhfuse.decisions.batch_cut import resolve_batch
from rlhfuse.decisions.layouts import check_given_layouts, check_layouts, inference_layout
from rlhfuse.planning.search.search import TOP, Found, Ranking
from rlhfuse.planning.search.setting import Setting
from rlhfuse.planning.search.table import Table
from rlhfuse.schedule.io import load_schedule

SCORERS = ("reference_inference", "reward_inference", "critic_inference")


@dataclass(frozen=True)
class StoredLayouts:
    """How a run lay on its ranks when it saved a checkpoint, which people know as `where`."""

    where: str
    world_size: int
    layouts: Mapping[str, str]  # task -> layout, and dotted key -> value of settings that change the order of sums


@dataclass(frozen=True)
class Resolved:
    """A configuration in which no layout is auto; `found`: the search that chose them, if one did; `lines` say so."""

    config: RunConfig
    found: Found | None = None
    lines: tuple[str, ...] = ()


def resolve_layouts(
    config: RunConfig,
    specs: Mapping[Role, ModelSpec],
    world_size: int,
    stored: StoredLayouts | None = None,
) -> Resolved:
    """`config` with values for `searched_keys`; nothing to decide: as it is. data.max_prompt_tokens is a number.

    Raises InputError naming a row that is given and cannot be, or saying what no table of layouts fits.
    """
    if not searched_keys(config):
        return Resolved(_completed(config))
    asked = _open_layouts(config, specs, world_size)
    anew: tuple[str, ...] = ()
    if stored and auto_layouts(asked):
        try:
            return _as_stored(asked, specs, world_size, stored)
        except InputError as error:
            anew = (f"layouts that are auto are not those of {stored.where}: {error}",)
    setting = Setting.of(asked, specs, world_size)
    found = Ranking(setting).found(TOP)
    made = with_table(asked, found.best.table)
    why = str(found).splitlines()[0]
    return Resolved(made, found, (*anew, f"layouts of the search: {_values(asked, made)}: {why}", *setting.notes))


def open_setting(config: RunConfig, specs: Mapping[Role, ModelSpec], world_size: int) -> Setting:
    """What a search of the layouts that are auto goes by. Raises InputError as above."""
    return Setting.of(_open_layouts(config, specs, world_size), specs, world_size)


def with_table(config: RunConfig, table: Table) -> RunConfig:
    """`config` with the layouts of a table; none is auto."""
    return _completed(table.of(config))


def _open_layouts(config: RunConfig, specs: Mapping[Role, ModelSpec], world_size: int) -> RunConfig:
    """With all but layouts resolved. Raises InputError naming a row that is given and cannot be."""
    config = resolve_batch(resolve_device(config))
    check_given_layouts(config, specs, world_size)
    if config.fusion.schedule:
        load_schedule(config.fusion.schedule)  # every table reads it: here a file that cannot be read says so once
    return _with_one_inference(config)


def _with_one_inference(config: RunConfig) -> RunConfig:
    """All models that score have one layout: what a row says holds for those that are auto."""
    inference, rows = inference_layout(config), (f"{role}_inference" for role in config.scorers())
    return config.with_(parallel={"inference": inference, **dict.fromkeys(rows, inference)})


def _as_stored(config: RunConfig, specs: Mapping[Role, ModelSpec], world_size: int, stored: StoredLayouts) -> Resolved:
    """With what the checkpoint had. Raises InputError saying why this run cannot have it."""
    if stored.world_size != world_size:
        raise InputError(f"it was saved by {stored.world_size} ranks, these are {world_size}")
    groups: dict[str, dict[str, object]] = {"parallel": {}, "fusion": {}}
    for key in searched_keys(config):
        group, _, name = key.partition(".")
        if group == "trainer":  # recomputation changes no number
            continue
        if (text := stored.layouts.get(name, stored.layouts.get(key))) is None:
            raise InputError(f"it does not say {key}")
        groups[group][name] = text == "True" if name == "sequence_parallel" else text
    if microbatches := groups["fusion"].get("actor_microbatches"):
        groups["fusion"]["actor_microbatches"] = int(str(microbatches))
    rows = [f"{role}_inference" for role in config.scorers()]
    inference = groups["parallel"].get(rows[0] if rows else "generation", config.parallel.inference)
    groups["parallel"]["inference"] = inference
    made = _completed(config.with_(**groups))
    check_layouts(made.with_(trainer={"recompute": "none"}), specs, world_size)
    line = f"layouts of {stored.where}, which had: {_values(config, made)}"
    if made.trainer.recompute != AUTO:
        return Resolved(made, None, (line,))
    searched = resolve_layouts(made, specs, world_size)
    return Resolved(searched.config, searched.found, (line, *searched.lines))


def _completed(config: RunConfig) -> RunConfig:
    """Rows that follow others, and those of models that the run has not, which are as where nothing was said."""
    parallel, rows = config.parallel, layout_rows(config)
    scored = [getattr(parallel, row) for row in (*SCORERS, "generation") if row in rows]
    inference = next(layout for layout in (parallel.inference, *scored) if layout != AUTO)
    made = {"critic_train": ParallelConfig().critic_train, **dict.fromkeys(("inference", *SCORERS), inference)}
    open_ = {row: layout for row, layout in made.items() if getattr(parallel, row) == AUTO}
    return config.with_(parallel=open_) if open_ else config


def _values(asked: RunConfig, made: RunConfig) -> str:
    """What was decided, as words; models that score have one layout."""
    values = {key: value for key, value, _ in made.leaves()}
    found: dict[str, object] = {}
    for key in searched_keys(asked):
        name, value = key.rpartition(".")[2], values[key]
        if value != AUTO:
            found["inference" if name in SCORERS else name] = str(value).lower() if isinstance(value, bool) else value
    return " ".join(f"{name}={value}" for name, value in found.items())
