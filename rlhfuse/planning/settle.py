"""From a configuration as it is given to a run of which nothing is left open: once, by every program.

First what the machine, the prompts and the reward function say, then the batch, then layouts: as in the checkpoint that
is resumed, or searched. Every rank does it for itself before there is a process group. Nothing in it is random or looks
at a clock, so all get the same. What a resumed run had stays, for another table would change the order of its sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlhfuse.base.errors import InputError
from rlhfuse.config.auto_layouts import completed, decided, searched_keys, with_one_inference
from rlhfuse.config.device_defaults import resolve_device, without_shared_graphs
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO, known
from rlhfuse.costs.machine import Host
from rlhfuse.decisions.batch_arithmetic import resolve_batch
from rlhfuse.planning.search.search import Ranking
from rlhfuse.planning.search.setting import Setting
from rlhfuse.planning.search.table import Table
from rlhfuse.planning.settled_run import SettledRun
from rlhfuse.schedule.io import load_schedule
from rlhfuse.tasks.role import Role

RECOMPUTE = "trainer.recompute"


@dataclass(frozen=True)
class StoredLayouts:
    """How a run lay on its ranks when it saved a checkpoint, which people know as `where`."""

    where: str
    world_size: int
    layouts: Mapping[str, str]  # task -> layout, and dotted key -> value of settings that change the order of sums


@dataclass(frozen=True)
class Facts:
    """What settles a run beside its configuration: models, number of ranks, and what was found where it starts.

    `device`: for trainer.device=auto, auto where that stays open; the GPU of `host` is for trainer.hardware=auto.
    `longest_prompt`: tokens, for data.max_prompt_tokens=auto. `signature`: of reward.function. `stored`: of the
    checkpoint that is resumed.
    """

    specs: Mapping[Role, ModelSpec]
    world_size: int
    host: Host = field(default_factory=lambda: Host.here())
    device: str = AUTO
    longest_prompt: int | None = None
    signature: str = AUTO
    stored: StoredLayouts | None = None


def settle(config: RunConfig, facts: Facts) -> SettledRun:
    """The run in which nothing is auto that `facts` or a search of layouts decide; what is given stays.

    Raises InputError naming a key that cannot be, or saying what no table of layouts fits.
    """
    run = settle_but_layouts(config, facts)
    if not searched_keys(run.config):
        return _ready(run.with_config(completed(run.config)))
    anew: tuple[str, ...] = ()
    if facts.stored and any(key != RECOMPUTE for key in searched_keys(run.config)):
        try:
            return _as_stored(run, facts.stored)
        except InputError as error:
            anew = (f"layouts that are auto are not those of {facts.stored.where}: {error}",)
    return _searched(run, anew)


def settle_but_layouts(config: RunConfig, facts: Facts) -> SettledRun:
    """The same, with what a search decides still open, for whoever ranks tables. Raises InputError likewise."""
    device = known(config.trainer.device, facts.device)
    gpu = facts.host.gpu if device == "cuda" else ""
    made = config.with_(
        trainer={"device": device, "hardware": known(config.trainer.hardware, gpu or AUTO)},
        data={"max_prompt_tokens": known(config.data.max_prompt_tokens, facts.longest_prompt or AUTO)},
        reward={"signature": known(facts.signature, config.reward.signature)},
    )
    made = resolve_batch(without_shared_graphs(resolve_device(made)))
    run = SettledRun(config, made, facts.specs, facts.world_size, facts.host)
    if not searched_keys(made):
        return run
    run.rules.given_rows()
    if made.fusion.schedule:
        load_schedule(made.fusion.schedule)  # every table reads it: here a file that cannot be read says so once
    return run.with_config(with_one_inference(made))


def _searched(run: SettledRun, lines: tuple[str, ...]) -> SettledRun:
    setting = Setting.of(run)
    search = Ranking(setting).fastest(1)
    made = with_table(run.config, search.best.table)
    chosen = f"layouts of the search: {decided(run.config, made)}: {str(search).splitlines()[0]}"
    return _ready(run.with_config(made), *lines, chosen, *setting.notes)


def _ready(run: SettledRun, *lines: str) -> SettledRun:
    return replace(run, config=without_shared_graphs(run.config), lines=lines)


def with_table(config: RunConfig, table: Table) -> RunConfig:
    """`config` with the layouts of a table; none is auto."""
    return completed(table.of(config))


def _as_stored(run: SettledRun, stored: StoredLayouts) -> SettledRun:
    """With what the checkpoint had. Raises InputError saying why this run cannot have it."""
    if stored.world_size != run.world_size:
        raise InputError(f"it was saved by {stored.world_size} ranks, these are {run.world_size}")
    config = run.config
    groups: dict[str, dict[str, object]] = {"parallel": {}, "fusion": {}}
    for key in searched_keys(config):
        group, _, name = key.partition(".")
        if key == RECOMPUTE:  # it changes no number
            continue
        if group == "fusion":
            groups["fusion"] = _stored_cut(stored)
            continue
        if (text := stored.layouts.get(name, stored.layouts.get(key))) is None:
            raise InputError(f"it does not say {key}")
        groups[group][name] = text == "True" if name == "sequence_parallel" else text
    rows = [f"{role}_inference" for role in config.scorers()]
    inference = groups["parallel"].get(rows[0] if rows else "generation", config.parallel.inference)
    groups["parallel"]["inference"] = inference
    made = completed(config.with_(**groups))
    run.with_config(made.with_(trainer={"recompute": "none"})).rules.table()
    line = f"layouts of {stored.where}, which had: {decided(config, made)}"
    if made.trainer.recompute != AUTO:
        return _ready(run.with_config(made), line)
    return _searched(run.with_config(made), (line,))


def _stored_cut(stored: StoredLayouts) -> dict[str, object]:
    """Micro-batches of the run that saved the checkpoint: most tokens, or a number. Raises InputError for neither."""
    for name in ("microbatch_tokens", "actor_microbatches"):
        if (text := stored.layouts.get(f"fusion.{name}", AUTO)) != AUTO:
            return {name: int(text)}
    raise InputError("it does not say fusion.microbatch_tokens")
