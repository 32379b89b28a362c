"""The number of ranks that a run needs, for a refusal of a run that fits into no layouts."""

from __future__ import annotations

from dataclasses import replace

from rlhfuse.base.errors import InputError
from rlhfuse.planning.job import Job
from rlhfuse.planning.search.search import MORE, Ranking
from rlhfuse.planning.search.setting import Setting
from rlhfuse.planning.search.table import TOKENS, CutSetting

DOUBLINGS = 6  # of the number of ranks


def with_enough_ranks(refusal: str, run: Job) -> str:
    """The refusal with the smallest number of ranks that fits: doubled first, then halved by whole machines."""
    if MORE not in refusal:
        return refusal
    setting, world = Setting.of(run), run.world_size
    machine, rows = setting.inputs.hardware, {**setting.given.forwards, **setting.given.trained}
    given = [f"parallel.{row}" for row in rows]
    sizes = [world << times for times in range(1, DOUBLINGS + 1)]
    if given:
        return refusal.replace(MORE, f"use auto for {' and '.join(given)}")
    if "," in machine.name or (high := next((size for size in sizes if fits(setting, size)), None)) is None:
        least = f"what a rank holds is cut over the {machine.devices_per_node} tensor ranks of a machine at most"
        none = f"no number of ranks up to {sizes[-1]} would do ({least}, but for training)"
        return refusal.replace(MORE, f"{none}: use GPUs with more memory, or smaller models")
    low, step = high // 2, min(machine.devices_per_node, world)
    while (middle := (low + high) // 2 // step * step) > low:
        low, high = (low, middle) if fits(setting, middle) else (middle, high)
    return refusal.replace(MORE, f"use {high} ranks, which have room")


def fits(setting: Setting, ranks: int) -> bool:
    """Whether `ranks` fit the leanest layouts."""
    given, longest = setting.given, sum(setting.run.config.longest_sample)
    lean = replace(given, cut=given.cut or CutSetting(TOKENS, longest), recompute=given.recompute or "full")
    try:
        run = replace(setting.run, world_size=ranks)
        return Ranking(replace(setting, run=run, given=lean)).has_room()
    except InputError:
        return False
