"""Resolves every `auto` of a job's configuration.

The machine, the prompts and the reward function come first, then the batch, then layouts: those of the checkpoint that
is resumed, or searched ones. Nothing in it is random or depends on a clock, so two plans of one job choose alike. The
layouts of a resumed run stay, because other ones would change the order of its sums.
"""

from __future__ import annotations

from dataclasses import replace

from rlhfuse.base.errors import InputError
from rlhfuse.config.auto_layouts import completed, decided, searched_keys
from rlhfuse.config.device_defaults import resolve_device, without_shared_graphs
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.values import AUTO, known
from rlhfuse.decisions.batch_arithmetic import resolve_batch
from rlhfuse.planning.job import Job, StoredLayouts
from rlhfuse.planning.search.search import Ranking
from rlhfuse.planning.search.setting import Setting
from rlhfuse.planning.search.table import Table
from rlhfuse.schedule.io import load_schedule

RECOMPUTE = "trainer.recompute"


def check_job(job: Job) -> None:
    """Raise InputError for settings that cannot be, whatever the lengths of samples."""
    shortest = job.config.with_(data={"max_prompt_tokens": 1}, rollout={"max_response_tokens": 1})
    run = settle_but_layouts(replace(job, config=shortest))
    if not searched_keys(run.config):
        run.rules.table()


def settle(job: Job) -> Job:
    """The run in which nothing is auto that the job or a search of layouts decides; given values stay.

    Raises InputError naming a key that cannot be, or saying what no table of layouts fits.
    """
    run = settle_but_layouts(job)
    if not searched_keys(run.config):
        return _ready(run.with_config(completed(run.config)))
    anew: tuple[str, ...] = ()
    if job.stored and any(key != RECOMPUTE for key in searched_keys(run.config)):
        try:
            return _as_stored(run, job.stored)
        except InputError as error:
            anew = (f"layouts that are auto are not those of {job.stored.where}: {error}",)
    return _searched(run, anew)


def settle_but_layouts(job: Job) -> Job:
    """The same, with what a search decides still open, for whoever ranks tables. Raises InputError likewise."""
    config = job.config
    device = known(config.trainer.device, job.device)
    gpu = job.host.gpu if device == "cuda" else ""
    made = config.with_(
        trainer={"device": device, "hardware": known(config.trainer.hardware, gpu or AUTO)},
        data={"max_prompt_tokens": known(config.data.max_prompt_tokens, job.longest_prompt or AUTO)},
        reward={"signature": known(job.signature, config.reward.signature)},
    )
    made = resolve_batch(without_shared_graphs(resolve_device(made)))
    run = job.with_config(made)
    if not searched_keys(made):
        return run
    run.rules.given_rows()
    if made.fusion.schedule:
        load_schedule(made.fusion.schedule)  # every table reads it: here a file that cannot be read says so once
    return run


def _searched(run: Job, lines: tuple[str, ...]) -> Job:
    setting = Setting.of(run)
    search = Ranking(setting).fastest(1)
    made = with_table(run.config, search.best.table)
    chosen = f"layouts of the search: {decided(run.config, made)}: {str(search).splitlines()[0]}"
    return _ready(run.with_config(made), *lines, chosen, *setting.notes)


def _ready(run: Job, *lines: str) -> Job:
    return replace(run, config=without_shared_graphs(run.config), lines=lines)


def with_table(config: RunConfig, table: Table) -> RunConfig:
    """`config` with the layouts of a table; none is auto."""
    return completed(table.of(config))


def _as_stored(run: Job, stored: StoredLayouts) -> Job:
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
