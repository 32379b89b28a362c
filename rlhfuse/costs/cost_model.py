"""The interfaces of what work costs: `CostModel` of generation and inference, `TrainingCost` of a model that trains.

CostModels: `JobCost` (a roofline, job_cost.py), `ProfiledCost` (of tools/profile_costs.py), `MeasuredCost` (of a job)
and `TrialCost` (with the steps of a trial generation). TrainingCosts: `AnalyticCost` and `ProfiledTraining`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.values import LARGEST
from rlhfuse.costs.fits import check_seconds
from rlhfuse.costs.stage_cut import MicrobatchTokens, StageSeconds


@dataclass(frozen=True)
class RewardCost:
    """One call of the reward function: seconds, and how many calls a worker has under way at once."""

    seconds: float
    at_once: int = 1

    def __post_init__(self) -> None:
        check_seconds("seconds of a reward call", self.seconds)
        if not 1 <= self.at_once <= LARGEST:
            raise InputError(f"calls of a reward function at_once must be in [1, {LARGEST}], not {self.at_once}")


class TrainingCost(Protocol):
    """Seconds of the stages of ONE pipeline of a model that trains."""

    @property
    def layout(self) -> ParallelLayout: ...

    @property
    def splits(self) -> bool:
        """Whether the parts of a split backward have a price."""
        ...

    def stage_seconds(self, micro: MicrobatchTokens) -> StageSeconds:
        """Seconds of one micro-batch, of a layer and of the ends."""
        ...


class CostModel(Protocol):
    """Seconds of the work of generation and inference on ONE generation instance."""

    convex: ClassVar[bool] = False  # whether seconds of steps and forwards are known to be, in each count
    measures_training: ClassVar[bool] = False

    def training_cost(self, role: str, analytic: TrainingCost) -> TrainingCost:
        """Costs of training `role`, which `analytic` prices where nothing was measured. Raises InputError where its
        tensor degree was not."""
        return analytic

    def score_bends(self) -> tuple[float, ...]:
        """Tokens of one replica's pack at which seconds of scoring bend."""
        return ()

    def beyond(self, sequences: float, context: float, pack: float, training: Mapping[str, float]) -> tuple[str, ...]:
        """What is larger than anything measured, in words: decoding so many `sequences` of up to `context` tokens,
        packs of so many tokens of an instance, and by role micro-batches of so many."""
        return ()

    def prefill_seconds(self, tokens: float, sequences: float) -> float:
        """Prefill of `sequences` prompts of `tokens` tokens in all."""
        ...

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        """One decode step of `batch` sequences that hold `context_tokens` of keys and values in all."""
        ...

    def score_seconds(self, tokens: float, sequences: float) -> float:
        """Reference, reward and critic forward over a packed batch, one model after the other."""
        ...

    def swap_in_seconds(self) -> float:
        """Loading the weights of the three models from host memory."""
        ...

    def migration_seconds(self, kv_bytes: float) -> float:
        """Sending (or receiving) `kv_bytes` of keys and values between two instances."""
        ...

    def capture_seconds(self) -> float:
        """Recording one shape of a decode step as a CUDA graph; 0 where that is not done, or was not measured."""
        return 0.0

    def barrier_seconds(self) -> float:
        """Agreeing who holds what, from the last to come until all go on; 0 where only a job could measure it."""
        return 0.0

    def release_seconds(self) -> float:
        """Giving back the cache and the weights of an instance that decodes no more, before others are loaded."""
        return 0.0

    def reward_call(self) -> RewardCost | None:
        """A sample's call of the reward function; None where there is no such function or it was not measured."""
        return None
