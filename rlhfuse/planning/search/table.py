"""A table of layouts: what a search decides for a run, as a value that prints as overrides and parses back."""

from __future__ import annotations

from collections.abc import Sequence
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
        rows = {"generation": self.generation, "inference": self.inference, "actor_train": self.actor_train}
        rows |= {"critic_train": self.critic_train} if self.critic_train else {}
        return (
            *(f"parallel.{row}={layout}" for row, layout in rows.items()),
            f"parallel.sequence_parallel={str(self.sequence_parallel).lower()}",
            f"fusion.actor_microbatches={self.microbatches}",
            f"trainer.recompute={self.recompute}",
        )

    def of(self, config: RunConfig) -> RunConfig:
        """`config` with this table; models that score share one layout."""
        rows = {"generation": self.generation, "inference": self.inference, "actor_train": self.actor_train}
        rows |= {"critic_train": self.critic_train} if self.critic_train else {}
        rows |= dict.fromkeys((f"{role}_inference" for role in config.scorers()), self.inference)
        parallel = {row: str(layout) for row, layout in rows.items()}
        return config.with_(
            parallel={**parallel, "sequence_parallel": self.sequence_parallel},
            fusion={"actor_microbatches": self.microbatches},
            trainer={"recompute": self.recompute},
        )

    @staticmethod
    def parse(overrides: Sequence[str]) -> Table:
        """Inverse of `overrides`."""
        rows = dict(word.split("=", 1) for word in overrides)
        critic = rows.get("parallel.critic_train")
        return Table(
            ParallelLayout.parse(rows["parallel.generation"]),
            ParallelLayout.parse(rows["parallel.inference"]),
            ParallelLayout.parse(rows["parallel.actor_train"]),
            ParallelLayout.parse(critic) if critic else None,
            int(rows["fusion.actor_microbatches"]),
            rows["trainer.recompute"],
            rows["parallel.sequence_parallel"] == "true",
        )
