"""What generation and inference of one job cost by the rooflines of its models (paper section 6)."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.forms.form import Form, LinePart
from rlhfuse.costs.table import CostTable, RewardCost


def analytic_table(
    actor: AnalyticCost,
    scorers: Sequence[AnalyticCost] = (),
    cross_node: bool = False,
    output_share: float = 1.0,
    reward: RewardCost | None = None,
) -> CostTable:
    """`cross_node`: instances sit on different nodes: migration takes the network. `output_share`: part of the tokens
    scored that go through an output layer, those of responses. `reward`: as a run measured it.
    """
    hardware, tp, outputs = actor.hardware, actor.layout.tp, {"outputs_per_token": output_share}
    link = hardware.cross_link_bandwidth if cross_node else hardware.node_link_bandwidth
    widest = max(tp, *(scorer.layout.tp for scorer in scorers), 1)
    shares = [(scorer.roofline, scorer.layout.tp / widest) for scorer in scorers]
    return CostTable(
        decode=Form((actor.roofline,)),
        prefill=Form((actor.prefill_roofline,)),
        score=Form([part._replace(share=share, **outputs, outputs_per_sequence=0.0) for part, share in shares]),
        transfer=Form((LinePart(0.0, 1.0, ranks=tp, bandwidth=link),)),
        beside=actor,
        swap_in=sum(scorer.memory.weights_bytes() / scorer.hardware.host_bandwidth for scorer in scorers),
        capture=actor.capture_seconds(),
        reward=reward,
    )
