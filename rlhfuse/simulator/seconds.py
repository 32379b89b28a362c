"""Seconds of generation and inference by R_t, without time lines: what a sweep and a search ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhfuse.costs.cost_model import CostModel
from rlhfuse.simulator.instance_limits import InstanceLimits
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.simulation import Simulation


@dataclass(frozen=True)
class GenInferSeconds:
    """Mean over batches; `generation`: until the last sample is finished."""

    total: float
    generation: float
    migration: float  # from the trigger until every destination decodes again; 0 where it stays serial


def gen_infer_seconds(
    batches: Sequence[SampleLengths],
    instances: int,
    costs: CostModel,
    limits: InstanceLimits,
    thresholds: Sequence[int],
) -> dict[int, GenInferSeconds]:
    """By R_t, means over the batches (see `simulate_gen_infer`). Raises InputError for what is beyond the limits."""
    falling = sorted(set(thresholds), reverse=True)  # large R_t come first in time: simulated so
    outcomes = Simulation(batches, instances, costs, limits).run(falling)
    return {
        threshold: GenInferSeconds(
            *(float(outcomes[part][:, n].mean()) for part in ("total", "generation", "migration"))
        )
        for n, threshold in enumerate(falling)
    }
