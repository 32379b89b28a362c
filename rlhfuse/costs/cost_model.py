"""The interface of what generation and inference cost on one instance.

Four implementations: `JobCost` (job_cost.py, from hardware numbers), `MeasuredCost` (of a running job), `TrialCost` (of
a trial generation), `ProfiledCost` (of tools/profile_costs.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rlhfuse.base.errors import InputError
from rlhfuse.config.values import LARGEST
from rlhfuse.costs.fits import check_seconds
from rlhfuse.costs.forms.form import DecodeRow, Form, decode_seconds, packed_seconds, transfer_seconds


@dataclass(frozen=True)
class RewardCost:
    """One call of the reward function: seconds, and how many calls a worker has under way at once."""

    seconds: float
    at_once: int = 1

    def __post_init__(self) -> None:
        check_seconds("seconds of a reward call", self.seconds)
        if not 1 <= self.at_once <= LARGEST:
            raise InputError(f"calls of a reward function at_once must be in [1, {LARGEST}], not {self.at_once}")


class CostModel(Protocol):
    """Seconds of the work of generation and inference on ONE generation instance.

    An implementation says them as forms (forms/), which a compiled kernel evaluates as the methods here do.
    """

    @property
    def decode_form(self) -> Form:
        """One part: seconds of (sequences, tokens of context over all of them)."""
        ...

    @property
    def prefill_form(self) -> Form:
        """Seconds of (tokens, sequences)."""
        ...

    @property
    def score_form(self) -> Form:
        """Seconds of (tokens, sequences)."""
        ...

    @property
    def transfer_form(self) -> Form:
        """Seconds of bytes."""
        ...

    def decode_row(self, batch: float) -> DecodeRow:
        """What a decode step of `batch` sequences has beside its form."""
        return DecodeRow()

    def prefill_seconds(self, tokens: float, sequences: float) -> float:
        """Prefill of `sequences` prompts of `tokens` tokens in all."""
        form = self.prefill_form
        return packed_seconds(form.parts, 0, len(form.parts), form.points, tokens, sequences)

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        """One decode step of `batch` sequences that hold `context_tokens` of keys and values in all."""
        if batch <= 0:
            return 0.0
        form, row = self.decode_form, self.decode_row(batch)
        return decode_seconds(form.parts[0], form.points, row, batch, context_tokens)

    def score_seconds(self, tokens: float, sequences: float) -> float:
        """Reference, reward and critic forward over a packed batch, one model after the other."""
        form = self.score_form
        return packed_seconds(form.parts, 0, len(form.parts), form.points, tokens, sequences)

    def migration_seconds(self, kv_bytes: float) -> float:
        """Sending (or receiving) `kv_bytes` of keys and values between two instances."""
        form = self.transfer_form
        return transfer_seconds(form.parts, 0, len(form.parts), form.points, kv_bytes)

    def swap_in_seconds(self) -> float:
        """Loading the weights of the three models from host memory."""
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
