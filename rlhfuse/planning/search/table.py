"""A table of layouts: what a search decides for a run, as a value that prints as overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import FusionConfig, RunConfig
from rlhfuse.config.values import AUTO, Recompute
from rlhfuse.tasks.task import TRAINED

Inference = tuple[tuple[str, ParallelLayout], ...]  # by row of `parallel`; "inference" alone where no model scores
TOKENS, NUMBER = "microbatch_tokens", "actor_microbatches"


class CutSetting(NamedTuple):
    """How mini-batches are cut: fusion.microbatch_tokens or fusion.actor_microbatches, and its value."""

    name: str
    value: int

    @staticmethod
    def given(fusion: FusionConfig) -> CutSetting | None:
        """None: both are auto."""
        values = {name: getattr(fusion, name) for name in (TOKENS, NUMBER)}
        return next((CutSetting(name, value) for name, value in values.items() if value != AUTO), None)

    @property
    def settings(self) -> dict[str, object]:
        """Settings of `fusion`: the other one is auto."""
        return {TOKENS: AUTO, NUMBER: AUTO, self.name: self.value}

    @property
    def text(self) -> str:
        return f"{self.name} {self.value:09d}"

    def __str__(self) -> str:
        """For a column of a table."""
        return f"{'T' if self.name == TOKENS else 'M1'}={self.value}"


@dataclass(frozen=True)
class Table:
    """Without a critic `critic_train` is None."""

    generation: ParallelLayout
    inference: Inference
    actor_train: ParallelLayout
    critic_train: ParallelLayout | None
    cut: CutSetting
    recompute: Recompute
    sequence_parallel: bool

    @cached_property
    def text(self) -> str:
        """Ties between tables are broken by it: the order of training rows, then of generation rows."""
        training = f"{self.actor_train} {self.critic_train} {self.cut.text} {self.recompute}"
        return f"{training} {self.sequence_parallel} {self.generation} {inference_text(self.inference)}"

    def __str__(self) -> str:
        return " ".join(self.overrides())

    def overrides(self) -> tuple[str, ...]:
        """Arguments of tools/train_ppo.py that make a run have this table."""
        return (
            *(f"parallel.{row}={layout}" for row, layout in self._rows(shared(self.inference)).items()),
            f"parallel.sequence_parallel={str(self.sequence_parallel).lower()}",
            *(f"fusion.{name}={value}" for name, value in self.cut.settings.items()),
            f"trainer.recompute={self.recompute}",
        )

    def of(self, config: RunConfig) -> RunConfig:
        """`config` with this table."""
        rows = self._rows({**shared(self.inference), **dict(self.inference)})
        parallel = {row: str(layout) for row, layout in rows.items()}
        return config.with_(
            parallel={**parallel, "sequence_parallel": self.sequence_parallel},
            fusion=self.cut.settings,
            trainer={"recompute": self.recompute},
        )

    def _rows(self, inference: Mapping[str, ParallelLayout]) -> dict[str, ParallelLayout]:
        trained = {row: layout for row in TRAINED if (layout := getattr(self, row))}
        return {"generation": self.generation, **inference, **trained}


def shared(inference: Inference) -> dict[str, ParallelLayout]:
    """The rows of models that score; their default alone where all have one layout."""
    layouts = dict(inference)
    one = next(iter(layouts.values()))
    return {"inference": one} if all(layout == one for layout in layouts.values()) else layouts


def inference_text(inference: Inference) -> str:
    """Their layouts, for a column of a table."""
    rows = shared(inference)
    own = " ".join(f"{row.removesuffix('_inference')}={layout}" for row, layout in rows.items())
    return own if len(rows) > 1 else own.removeprefix("inference=")
