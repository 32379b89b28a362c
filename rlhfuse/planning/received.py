"""On GPUs: memory for hidden states and gradients that stages receive, where a schedule keeps more than is usual.

What is received stays where it arrived: a hidden state until B, which ends its micro-batch on the stage; a gradient
until W, where the backward is split. The memory is taken once, for the most that are kept at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rlhfuse.schedule.ir.schedule import Schedule


def received_beyond(schedule: Schedule, node: int, places: Mapping[str, int], received: Mapping[str, float]) -> float:
    """Bytes on a rank of `node` beyond `AnalyticCost.receiving_bytes`.

    By model: `places` of its pipeline, and bytes `received` of one hidden state between two of its stages.
    """
    pipelines = {pipeline.name: pipeline for pipeline in schedule.problem.pipelines}
    held: Counter[tuple[str, int, str]] = Counter()  # (model, stage, F: hidden states, B: gradients)
    most: Counter[tuple[str, int, str]] = Counter()
    for one in schedule.orders[node]:
        pipeline = pipelines[one.pipeline]
        states, gradients = ((pipeline.model, one.stage, kind) for kind in "FB")
        held[states] += {"F": 1, "B": -1}.get(one.kind, 0)
        held[gradients] += {"B": 1, "W": -1}.get(one.kind, 0) if pipeline.split else 0
        for key in (states, gradients):
            most[key] = max(most[key], held[key])
    depth = {pipeline.model: pipeline.stages for pipeline in schedule.problem.pipelines}
    beyond = 0.0
    for (model, stage, kind), count in most.items():
        usual = places[model] - stage % places[model] if kind == "F" else 1
        if stage > 0 if kind == "F" else stage < depth[model] - 1:
            beyond += max(0, count - usual) * received[model]
    return beyond
