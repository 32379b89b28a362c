"""A table of layouts: what a search decides for a run, as a value that prints as overrides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import RunConfig


@dataclass(frozen=True)
class Table:
    """`microbatches`: of an actor pipeline (M1). Without a critic `critic_train` is None."""

    generation: ParallelLayout
    inference: ParallelLayout
    actor_train: ParallelLayout
    critic_train: ParallelLayout | None
    microbatches: int
    recompute: str
    sequence_parallel: bool

    @cached_property
    def text(self) -> str:
        """Ties between tables are broken by it: the order of training rows, then of generation rows."""
        training = f"{self.actor_train} {self.critic_train} {self.microbatches:06d} {self.recompute}"
        return f"{training} {self.sequence_parallel} {self.generation} {self.inference}"

    def __str__(self) -> str:
        return " ".join(self.overrides())

    def overrides(self) -> tuple[str, ...]:
        """Arguments of tools/train_ppo.py that make a run have this table."""
        return (
            *(f"parallel.{row}={layout}" for row, layout in self._rows().items()),
            f"parallel.sequence_parallel={str(self.sequence_parallel).lower()}",
            f"fusion.actor_microbatches={self.microbatches}",
            f"trainer.recompute={self.recompute}",
        )

    def of(self, config: RunConfig) -> RunConfig:
        """`config` with this table; models that score share one layout."""
        rows = self._rows() | dict.fromkeys((f"{role}_inference" for role in config.scorers()), self.inference)
        parallel = {row: str(layout) for row, layout in rows.items()}
        return config.with_(
            parallel={**parallel, "sequence_parallel": self.sequence_parallel},
            fusion={"actor_microbatches": self.microbatches},
            trainer={"recompute": self.recompute},
        )

    def _rows(self) -> dict[str, ParallelLayout]:
        rows = {"generation": self.generation, "inference": self.inference, "actor_train": self.actor_train}
        return rows | ({"critic_train": self.critic_train} if self.critic_train else {})
