"""What generation and inference of one job cost by the roofline of its four models (paper section 6)."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfuse.base.errors import InputError
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.cost_model import CostModel, RewardCost


@dataclass(frozen=True)
class JobCost(CostModel):
    """The analytic CostModel of a job. `cross_node`: instances sit on different nodes: migration takes the network.

    `output_share`: part of the tokens scored that go through an output layer, those of responses.
    """

    convex = True

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

    def prefill_seconds(self, tokens: float, sequences: float) -> float:
        return self.actor.prefill_seconds(tokens, sequences)

    def decode_step_seconds(self, batch: float, context_tokens: float) -> float:
        return self.actor.decode_step_seconds(batch, context_tokens)

    def score_seconds(self, tokens: float, sequences: float) -> float:
        total = 0.0
        for scorer in self.scorers:  # several replicas fit into the instance and share the batch, one sequence at least
            share = max(scorer.layout.tp / self.actor.layout.tp, min(1.0, 1 / max(sequences, 1)))
            scored = tokens * share
            total += scorer.forward_seconds(scored, sequences * share, scored * self.output_share)
        return total

    def swap_in_seconds(self) -> float:
        return sum(scorer.weights_bytes() / scorer.hardware.host_bandwidth for scorer in self.scorers)

    def capture_seconds(self) -> float:
        return self.actor.capture_seconds()

    def reward_call(self) -> RewardCost | None:
        return self.reward

    def migration_seconds(self, kv_bytes: float) -> float:
        machine = self.actor.hardware
        link = machine.cross_link_bandwidth if self.cross_node else machine.node_link_bandwidth
        return kv_bytes / self.actor.layout.tp / link


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
