"""The CostModel of a run whose steps a generation trial has measured on this machine; all else is priced as before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhfuse.base.errors import InputError
from rlhfuse.costs.cost_model import CostModel, RewardCost
from rlhfuse.costs.fits import Line
from rlhfuse.costs.forms.form import DecodeRow, Form
from rlhfuse.costs.speculation import Speculation, StepObservation, fit_steps


@dataclass(frozen=True)
class TrialCost(CostModel):
    """Prefills and decode steps as straight lines; what is no step is `rest`'s."""

    decode: Line  # of batch, context tokens; without guesses
    prefill: Line  # of tokens, sequences
    speculation: Speculation | None  # None: no step had guesses
    rest: CostModel
    reward: RewardCost | None = None

    @staticmethod
    def fit(steps: Sequence[StepObservation], rest: CostModel) -> TrialCost:
        """Raises InputError where there are no steps to fit to."""
        prefills = sum(step.prefill_tokens > 0 for step in steps)
        if not 0 < prefills < len(steps):
            made = f"{prefills} prefill and {len(steps) - prefills} decode steps"
            raise InputError(f"the trial made {made}; raise --trial")
        return TrialCost(*fit_steps(steps), rest, rest.reward)

    @property
    def decode_form(self) -> Form:
        return Form.of_line(self.decode)

    @property
    def prefill_form(self) -> Form:
        return Form.of_line(self.prefill)

    def decode_row(self, batch: float) -> DecodeRow:
        return DecodeRow() if self.speculation is None else self.speculation.decode_row(batch)

    @property
    def score_form(self) -> Form:
        return self.rest.score_form

    @property
    def transfer_form(self) -> Form:
        return self.rest.transfer_form

    @property
    def swap_in(self) -> float:
        return self.rest.swap_in

    @property
    def meeting(self) -> float:
        return self.rest.meeting

    @property
    def release(self) -> float:
        return self.rest.release

    @property
    def capture(self) -> float:
        return self.rest.capture
