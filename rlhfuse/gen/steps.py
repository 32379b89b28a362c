"""One step of the engine: launched, and done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rlhfuse.costs.speculation import DecodeObservation
from rlhfuse.gen.core.sequence import Sequence
from rlhfuse.gen.gpu.draws import StepInFlight
from rlhfuse.gen.model_runner import DrawnStep


@dataclass(frozen=True)
class StepStats:
    """What one step did, as the cost model wants to know it. All 0 where no step's draws were read."""

    batch: int  # sequences that ran
    prefill_tokens: int  # tokens run for sequences that were not decoding
    context_tokens: int  # tokens in the cache of all that ran, after the step
    seconds: float  # in the engine since the step before; without the capture of a CUDA graph, once for a shape
    reused_tokens: int = 0  # tokens of sequences that entered, found in known prefixes instead of being run
    drafted_tokens: int = 0  # guesses that ran with sequences which decode
    accepted_tokens: int = 0  # those of them that were drawn

    def decode_observation(self) -> DecodeObservation:
        """The same, to fit costs to, of a step without prefill."""
        guesses = self.drafted_tokens, self.accepted_tokens
        return DecodeObservation(self.batch, self.context_tokens, self.seconds, *guesses)


class Drawing(NamedTuple):
    """A sequence that draws, and the guesses that draw behind it."""

    seq: Sequence
    guesses: list[int]


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose draws are yet to be read."""

    drawing: list[Drawing]
    launched: StepInFlight | DrawnStep
    batch: int  # these as in StepStats
    prefill_tokens: int
    context_tokens: int
    reused_tokens: int

    @property
    def drafted_tokens(self) -> int:
        return sum(len(guesses) for _, guesses in self.drawing)

    def stats(self, seconds: float, accepted: int) -> StepStats:
        facts = self.batch, self.prefill_tokens, self.context_tokens, seconds, self.reused_tokens
        return StepStats(*facts, self.drafted_tokens, accepted)
