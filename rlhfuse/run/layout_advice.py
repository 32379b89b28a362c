"""Whether the run lies well on its ranks, said once, after the first iterations have shown what work takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhfuse.costs.cost_model import RewardCost
from rlhfuse.fusion.inter.report import GenInferReport
from rlhfuse.planning.draft import PlanDraft
from rlhfuse.planning.search.layout_comparison import LayoutComparison, SeenIteration
from rlhfuse.ppo.advantage import spared_samples
from rlhfuse.ppo.rollout import RolloutBatch
from rlhfuse.run.iteration_metrics import lengths_of
from rlhfuse.run.threshold_controller import step_observations

ADVISED_AFTER = 2  # iterations of a process: the first compiles kernels, the second is measured
SEARCH_SECONDS = 3.0


def layout_advice(draft: PlanDraft, report: GenInferReport, batch: RolloutBatch, metrics: Mapping[str, Any]) -> str:
    """For the log: the layouts of `draft` beside others at what an iteration took, or a warning; of one rank."""
    try:
        observations = report.observations
        seen = SeenIteration(
            lengths_of(batch, spared_samples(batch, draft.run.config.algorithm), report.turns),
            step_observations(observations["step"]),
            observations["score"],
            metrics["timing_s/train"],
            metrics["timing_s/reshard"],
            RewardCost.mean(observations["reward"]),
        )
        return str(LayoutComparison.of(draft, seen, SEARCH_SECONDS))
    except Exception as error:  # advice serves training, it does not end it
        told = " ".join(str(error).split())
        return f"warning: layouts are not compared at what was measured ({type(error).__name__}: {told})"
