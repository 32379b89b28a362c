"""A table of layouts: what a search decides for a run, as a value that prints as overrides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.values import AUTO


@dataclass(frozen=True)
class Table:
    """`microbatch_tokens` is None where the configuration gives a number of micro-batches, `critic_train` where there
    is no critic."""

    generation: ParallelLayout
    inference: ParallelLayout
    actor_train: ParallelLayout
    critic_train: ParallelLayout | None
    microbatch_tokens: int | None
    recompute: str
    sequence_parallel: bool

    @cached_property
    def text(self) -> str:
        """Ties between tables are broken by it: the order of training rows, then of generation rows."""
        training = f"{self.actor_train} {self.critic_train} {self.microbatch_tokens or 0:09d} {self.recompute}"
        return f"{training} {self.sequence_parallel} {self.generation} {self.inference}"

    def __str__(self) -> str:
        return " ".join(self.overrides())

    def overrides(self) -> tuple[str, ...]:
        """Arguments of tools/train_ppo.py that make a run have this table."""
        return (
            *(f"parallel.{row}={layout}" for row, layout in self._rows().items()),
            f"parallel.sequence_parallel={str(self.sequence_parallel).lower()}",
            *((f"fusion.microbatch_tokens={self.microbatch_tokens}",) if self.microbatch_tokens else ()),
            f"trainer.recompute={self.recompute}",
        )

    def of(self, config: RunConfig) -> RunConfig:
        """`config` with this table; models that score share one layout."""
        rows = self._rows() | dict.fromkeys((f"{role}_inference" for role in config.scorers()), self.inference)
        parallel = {row: str(layout) for row, layout in rows.items()}
        return config.with_(
            parallel={**parallel, "sequence_parallel": self.sequence_parallel},
            fusion={"microbatch_tokens": self.microbatch_tokens or AUTO},
            trainer={"recompute": self.recompute},
        )

    def _rows(self) -> dict[str, ParallelLayout]:
        rows = {"generation": self.generation, "inference": self.inference, "actor_train": self.actor_train}
        return rows | ({"critic_train": self.critic_train} if self.critic_train else {})
