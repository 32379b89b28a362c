"""What a rank of the inter-stage benchmark answers, and one run over all ranks.

Times are wall-clock seconds (`time.time`), as in the product's report. This file does without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfuse.decisions.migration import MigrationPlan


@dataclass(frozen=True)
class RankRun:
    """Generation and inference of one iteration as one rank saw it; the sums are over all ranks, equal on each."""

    begin: float
    total_seconds: float
    generation_seconds: float
    spans: tuple[tuple[str, float, float], ...]  # kind, start, end
    plans: tuple[str, ...]  # one for each trigger at which somebody was freed
    migrated_samples: int
    migrated_bytes: int
    needed_bytes: int  # of the blocks that had to move
    early: int  # samples scored before generation ended
    observed_seconds: Mapping[str, float]  # by kind of work, over all ranks
    cpu_seconds: float  # of the thread that computes, on this rank
    agreement_seconds: float  # of generation, the most of any rank
    pause_seconds: float  # longest that a migrated sample stood still
    digest: str  # of everything that came out


@dataclass(frozen=True)
class Run:
    """One run over all ranks."""

    ranks: tuple[RankRun, ...]
    plan: MigrationPlan | None = None

    @staticmethod
    def of(ranks: Sequence[RankRun]) -> Run:
        plans = ranks[0].plans  # two instances: at most one can be freed
        return Run(tuple(ranks), MigrationPlan.parse(plans[0]) if plans else None)

    @property
    def seconds(self) -> float:
        return max(rank.total_seconds for rank in self.ranks)

    @property
    def generation_seconds(self) -> float:
        return self.ranks[0].generation_seconds

    @property
    def inference_seconds(self) -> float:
        """Beyond generation."""
        return self.seconds - self.generation_seconds

    @property
    def agreement_share(self) -> float:
        """Of generation."""
        return self.ranks[0].agreement_seconds / self.generation_seconds

    def _generated_until(self, instance: int) -> float:
        return self._spans(instance, "generate")[0][2]

    def _spans(self, instance: int, kind: str) -> list[tuple[str, float, float]]:
        return [span for span in self.ranks[instance].spans if span[0] == kind]

    @property
    def migration_seconds(self) -> float:
        """From the last instance's last step before the trigger until the last destination decodes again."""
        if self.plan is None:
            return 0.0
        begun = max(self._generated_until(instance) for instance in range(len(self.ranks)))
        return max(self._spans(instance, "generate")[1][1] for instance in self.plan.destinations) - begun

    @property
    def cpu_share(self) -> float:
        """Processor time that the computing threads got, over the time that their work took."""
        busy = sum(self.ranks[0].observed_seconds[kind] for kind in ("decode", "prefill", "score"))
        return sum(rank.cpu_seconds for rank in self.ranks) / busy
