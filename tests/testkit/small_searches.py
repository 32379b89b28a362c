"""Searches so small that every table can be priced, and rows of any price."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO
from rlhfuse.planning.search.resolve import open_setting
from rlhfuse.planning.search.search import Ranking, Row
from rlhfuse.planning.search.setting import Setting
from testkit.four_ranks import SPECS, config

LARGE = ModelSpec("llama", 8, 4096, 32, 8, 128, 14336, 32000, 4096)
LARGE_SPECS = dict.fromkeys(SPECS, LARGE)
LAYOUTS = ("actor_train", "critic_train", "generation", "inference", "sequence_parallel")
SCORERS = ("reference_inference", "reward_inference", "critic_inference")
OPEN = {f"parallel__{row}": AUTO for row in (*LAYOUTS, *SCORERS)} | {"fusion__actor_microbatches": AUTO}
FEW = {"rollout__prompts_per_iteration": 4, "rollout__samples_per_prompt": 1, "algorithm__minibatches": 1}
GPUS = {"trainer__device": "cuda", "trainer__hardware": "h100"}


def everything(**keys):
    """A run of few samples in which all that a search decides is auto, unless `keys` say it."""
    return config(**{**OPEN, **FEW, "trainer__recompute": AUTO, **keys})


def setting(world_size: int = 2, specs=SPECS, **keys) -> Setting:
    return open_setting(everything(**keys), specs, world_size)


def all_rows(made: Setting) -> list[Row]:
    """Every table that fits, by a search that has answered nothing else."""
    return [row for row, _ in Ranking(made).ranked()]


@cache
def known(world_size: int = 2, large: bool = False, **keys) -> tuple[Setting, list[Row]]:
    """A setting of small or large models and all its rows, ranked once."""
    made = setting(world_size, LARGE_SPECS if large else SPECS, **keys)
    return made, all_rows(made)


def with_price(row: Row, seconds: float, needed_bytes: float) -> Row:
    """As it is, with that price in all."""
    return replace(
        row, price=replace(row.price, schedules=row.price.schedules + seconds - row.seconds), needed_bytes=needed_bytes
    )
