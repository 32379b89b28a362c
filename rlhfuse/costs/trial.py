"""Costs of which prefill and decoding were measured on this machine and the rest was not.

A generation trial runs the actor alone: it shows what steps cost, but nothing of scoring, of loading or of what
happens beside a neighbour. These come from another cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhfuse.costs.analytic import CostModel
from rlhfuse.costs.lines import Line
from rlhfuse.costs.measured import DecodeObservation, TokensObservation
from rlhfuse.errors import InputError


@dataclass(frozen=True)
class TrialCost:
    """A CostModel: the trial's two lines, and `rest` for all else."""

    decode: Line  # of batch, context tokens
    prefill: Line  # of tokens, sequences
    rest: CostModel

    @staticmethod
    def fit(decode: Sequence[DecodeObservation], prefill: Sequence[TokensObservation], rest: CostModel) -> TrialCost:
        """Raises InputError where there are no steps to fit to."""
        if not decode or not prefill:
            raise InputError(f"the trial made {len(prefill)} prefill and {len(decode)} decode steps; raise --trial")
        return TrialCost(
            Line.fit([(o.batch, o.context_tokens) for o in decode], [o.seconds for o in decode]),
            Line.fit([(o.tokens, o.sequences) for o in prefill], [o.seconds for o in prefill]),
            rest,
        )

    def prefill_seconds(self, tokens: float, sequences: float) -> float:
        return self.prefill(tokens, sequences) if tokens > 0 else 0.0

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        return self.decode(batch, context_tokens)

    def score_seconds(self, tokens: float, sequences: float) -> float:
        return self.rest.score_seconds(tokens, sequences)

    def swap_in_seconds(self) -> float:
        return self.rest.swap_in_seconds()

    def migration_seconds(self, kv_bytes: float) -> float:
        return self.rest.migration_seconds(kv_bytes)

    def meeting_seconds(self) -> float:
        return self.rest.meeting_seconds()

    def release_seconds(self) -> float:
        return self.rest.release_seconds()

    def beside(self, neighbour: str) -> TrialCost:
        """Steps as in the trial, which had no neighbour; the rest beside it."""
        return replace(self, rest=self.rest.beside(neighbour))
