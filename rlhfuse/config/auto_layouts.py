"""Which settings the search of layouts decides: layouts that are auto, and what is auto beside them.

planning/search/resolve.py puts values in their place before anything reads a layout; programs that do not ask it
refuse them here.
"""

from __future__ import annotations

from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.values import AUTO


def layout_rows(config: RunConfig) -> tuple[str, ...]:
    """Keys of `parallel` that hold the layouts of the run's tasks."""
    trained, scored = ([f"{role}_train" for role in config.trained()], [f"{r}_inference" for r in config.scorers()])
    return ("generation", *scored, *trained)


def auto_layouts(config: RunConfig) -> tuple[str, ...]:
    """Dotted keys of the layouts that are auto, and of sequence_parallel, which is one more choice of training's."""
    rows = (*layout_rows(config), "sequence_parallel")
    return tuple(f"parallel.{row}" for row in rows if getattr(config.parallel, row) == AUTO)


def searched_keys(config: RunConfig) -> tuple[str, ...]:
    """Dotted keys that a search has to decide; none where layouts are given and trainer.recompute is.

    Micro-batches that are auto are searched with layouts. Beside recomputation alone they are not: it leaves bits as
    they are, they do not.
    """
    layouts = auto_layouts(config)
    batches = ("fusion.actor_microbatches",) if layouts and config.fusion.actor_microbatches == AUTO else ()
    return (*layouts, *batches, *(("trainer.recompute",) if config.trainer.recompute == AUTO else ()))


def refuse_auto(config: RunConfig, why: str) -> None:
    """Raise InputError where a search has something to decide, for a program that makes none."""
    if keys := searched_keys(config):
        fix = "or give values, such as those in the config.yaml of a run"
        raise InputError(f"{keys[0]}=auto: {why}; {fix}")
