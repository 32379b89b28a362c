"""What generation and inference of one job cost by the roofline of its four models (paper section 6)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rlhfuse.base.errors import InputError
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.cost_model import CostModel, RewardCost
from rlhfuse.costs.forms.form import DecodeRow, Form, LinePart


@dataclass(frozen=True)
class JobCost(CostModel):
    """The analytic CostModel of a job. `cross_node`: instances sit on different nodes: migration takes the network.

    `output_share`: part of the tokens scored that go through an output layer, those of responses.
    """

    convex = True
    meeting = release = 0.0

    actor: AnalyticCost
    scorers: tuple[AnalyticCost, ...]
    cross_node: bool = False
    output_share: float = 1.0
    reward: RewardCost | None = None  # as a run measured it

    def __post_init__(self) -> None:
        for scorer in self.scorers:
            if self.actor.layout.tp % scorer.layout.tp:
                raise InputError(
                    f"an inference replica of tp({scorer.layout.tp}) does not divide a generation instance of "
                    f"tp({self.actor.layout.tp}); use a divisor"
                )

    @cached_property
    def decode_form(self) -> Form:
        return Form((self.actor.roofline,))

    @cached_property
    def prefill_form(self) -> Form:
        return Form((self.actor.prefill_roofline,))

    @cached_property
    def score_form(self) -> Form:
        tp, outputs = self.actor.layout.tp, {"outputs_per_token": self.output_share, "outputs_per_sequence": 0.0}
        return Form([scorer.roofline._replace(share=scorer.layout.tp / tp, **outputs) for scorer in self.scorers])

    @cached_property
    def transfer_form(self) -> Form:
        hardware = self.actor.hardware
        link = hardware.cross_link_bandwidth if self.cross_node else hardware.node_link_bandwidth
        return Form((LinePart(0.0, 1.0, ranks=self.actor.layout.tp, bandwidth=link),))

    def decode_row(self, batch: float) -> DecodeRow:
        return self.actor.decode_row(batch)

    @cached_property
    def swap_in(self) -> float:
        return sum(scorer.memory.weights_bytes() / scorer.hardware.host_bandwidth for scorer in self.scorers)

    @cached_property
    def capture(self) -> float:
        return self.actor.capture_seconds()


def largest_flat_batch(costs: CostModel, median_context_tokens: float, limit: int, tolerance: float = 0.1) -> int:
    """BS_max: the largest batch <= `limit` whose decode step is within `tolerance` of batch 1's at that context."""
    allowed = (1 + tolerance) * costs.decode_step_seconds(1, median_context_tokens)
    low, high = 1, max(1, limit)
    while low < high:  # a step's seconds grow with the batch, so bisection finds the edge
        middle = (low + high + 1) // 2
        if costs.decode_step_seconds(middle, middle * median_context_tokens) <= allowed:
            low = middle
        else:
            high = middle - 1
    return low
