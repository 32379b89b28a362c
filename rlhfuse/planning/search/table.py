"""What a search decides for a run: its layouts and what goes with them."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ParallelLayout


@dataclass(frozen=True)
class Table:
    """Layouts of the tasks, micro-batches per actor pipeline (M1), trainer.recompute, parallel.sequence_parallel."""

    generation: ParallelLayout
    inference: ParallelLayout
    actor_train: ParallelLayout
    critic_train: ParallelLayout | None
    microbatches: int
    recompute: str
    sequence_parallel: bool

    def overrides(self) -> tuple[str, ...]:
        """As arguments of the programs."""
        rows = {"generation": self.generation, "inference": self.inference, "actor_train": self.actor_train}
        rows |= {"critic_train": self.critic_train} if self.critic_train else {}
        return (
            *(f"parallel.{row}={layout}" for row, layout in rows.items()),
            f"parallel.sequence_parallel={str(self.sequence_parallel).lower()}",
            f"fusion.actor_microbatches={self.microbatches}",
            f"trainer.recompute={self.recompute}",
        )

    def of(self, config: RunConfig) -> RunConfig:
        """`config` with all of it filled in."""
        scored = dict.fromkeys((f"{role}_inference" for role in config.scorers()), str(self.inference))
        rows = {"generation": str(self.generation), "inference": str(self.inference), **scored}
        rows |= {"actor_train": str(self.actor_train)}
        rows |= {"critic_train": str(self.critic_train)} if self.critic_train else {}
        return config.with_(
            parallel={**rows, "sequence_parallel": self.sequence_parallel},
            fusion={"actor_microbatches": self.microbatches},
            trainer={"recompute": self.recompute},
        )
