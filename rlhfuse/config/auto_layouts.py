"""Which settings the search of layouts decides: layouts that are auto, and what is auto beside them.

planning/settle.py puts values in their place before anything reads a layout; programs that do not ask it
refuse them here.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import ParallelConfig, RunConfig
from rlhfuse.config.values import AUTO
from rlhfuse.tasks.task import SCORERS

MICROBATCH_TOKENS = "fusion.microbatch_tokens"


def layout_rows(config: RunConfig) -> tuple[str, ...]:
    """Keys of `parallel` that hold the layouts of the run's tasks."""
    trained, scored = ([f"{role}_train" for role in config.trained()], [f"{r}_inference" for r in config.scorers()])
    return ("generation", *scored, *trained)


def auto_layouts(config: RunConfig) -> tuple[str, ...]:
    """Dotted keys of the layouts that are auto, and of sequence_parallel, which is one more choice of training's."""
    rows = (*layout_rows(config), "sequence_parallel")
    return tuple(f"parallel.{row}" for row in rows if getattr(config.parallel, row) == AUTO)


def searched_keys(config: RunConfig) -> tuple[str, ...]:
    """Dotted keys that a search has to decide; none where layouts, micro-batches and trainer.recompute are given."""
    fusion = config.fusion
    cut = (MICROBATCH_TOKENS,) if fusion.actor_microbatches == fusion.microbatch_tokens == AUTO else ()
    return (*auto_layouts(config), *cut, *(("trainer.recompute",) if config.trainer.recompute == AUTO else ()))


def refuse_auto(keys: Sequence[str], why: str) -> None:
    """Raise InputError where a search would have `keys` to decide, for a program that makes none."""
    if keys:
        fix = "or give values, such as those in the config.yaml of a run"
        raise InputError(f"{keys[0]}=auto: {why}; {fix}")


def completed(config: RunConfig) -> RunConfig:
    """Rows that follow others, and those of models that the run has not, which are as where nothing was said."""
    parallel, rows = config.parallel, layout_rows(config)
    scored = [getattr(parallel, row) for row in (*SCORERS, "generation") if row in rows]
    inference = next(layout for layout in (parallel.inference, *scored) if layout != AUTO)
    made = {"critic_train": ParallelConfig().critic_train, **dict.fromkeys(("inference", *SCORERS), inference)}
    open_ = {row: layout for row, layout in made.items() if getattr(parallel, row) == AUTO}
    return config.with_(parallel=open_) if open_ else config


def decided(asked: RunConfig, made: RunConfig) -> str:
    """What was decided, as words; one for all models that score where they have one layout."""
    values = {key: value for key, value, _ in made.leaves()}
    one = len({getattr(made.parallel, f"{role}_inference") for role in made.scorers()}) == 1
    chosen: dict[str, object] = {}
    for key in searched_keys(asked):
        name, value = key.rpartition(".")[2], values[key]
        if value != AUTO:
            name = "inference" if one and name in SCORERS else name
            chosen[name] = str(value).lower() if isinstance(value, bool) else value
    return " ".join(f"{name}={value}" for name, value in chosen.items())
