"""Seconds of generation and inference by R_t, without time lines: what a sweep and a search ask for.

Costs that have a form in numbers (cost_numbers.py) are simulated by a kernel once it is compiled, others by time lines:
with the same seconds to the last bit. To compile it takes as long as many sweeps without it, so that a program says
when (`compile_kernel_apart`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlhfuse.base.kernel_cache import KernelGroup, compile_apart, is_cached, tell_what_is_compiled
from rlhfuse.costs.cost_model import CostModel
from rlhfuse.costs.fits import Line
from rlhfuse.costs.measured import MeasuredCost
from rlhfuse.decisions.migration import FusionLimits, check_threshold, destination_count
from rlhfuse.simulator.cost_numbers import CostNumbers, numbers_of
from rlhfuse.simulator.gen_infer_kernel import seconds_by_threshold
from rlhfuse.simulator.instance_kernel import SAMPLE, Batch
from rlhfuse.simulator.instances import InstanceLimits, check_lengths
from rlhfuse.simulator.iteration import BatchSimulation, fusion_limits
from rlhfuse.simulator.lengths import SampleLengths


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
    for lengths in batches:
        check_lengths(lengths, instances, limits)
        for threshold in thresholds:
            check_threshold(threshold, len(lengths))
    falling = sorted(set(thresholds), reverse=True)  # large R_t come first in time: simulated so
    most = min(limits.max_sequences, max(map(len, batches)))
    numbers = numbers_of(costs, most) if is_kernel_ready() else None
    if numbers is None:
        simulations = [BatchSimulation(lengths, instances, costs, limits) for lengths in batches]
        found = np.array([_by_time_lines(simulation, falling) for simulation in simulations])
    else:
        fusion = fusion_limits(costs, limits)
        found = np.array([_by_kernel(lengths, instances, numbers, limits, fusion, falling) for lengths in batches])
    means = ((float(np.mean(column)) for column in found[:, n].T) for n in range(len(falling)))
    return {threshold: GenInferSeconds(*seconds) for threshold, seconds in zip(falling, means)}


def _by_time_lines(simulation: BatchSimulation, thresholds: Sequence[int]) -> list[tuple[float, float, float]]:
    lines = map(simulation.timeline, thresholds)
    return [(line.total_seconds, line.generation_seconds, line.migration_seconds) for line in lines]


def _by_kernel(
    lengths: SampleLengths,
    instances: int,
    numbers: CostNumbers,
    limits: InstanceLimits,
    fusion: FusionLimits,
    thresholds: Sequence[int],
) -> np.ndarray:
    """[thresholds, 3] seconds."""
    sizes = limits.bs_max, limits.sample_kv_bytes, limits.kv_capacity_bytes
    counts = [destination_count(threshold, *sizes, instances) if instances > 1 else 0 for threshold in thresholds]
    batch = _kernel_batch(lengths, instances, limits, fusion)
    return seconds_by_threshold(batch, numbers, np.array(thresholds), np.array(counts))


def _kernel_batch(lengths: SampleLengths, instances: int, limits: InstanceLimits, fusion: FusionLimits) -> Batch:
    move, samples = fusion.move_cost, np.zeros(len(lengths), SAMPLE)
    samples["prompt"], samples["output"], samples["ended"] = lengths.prompt, lengths.output, np.nan
    samples["scored"] = limits.padded_score_tokens or samples["prompt"] + samples["output"]
    ends = len(lengths) * np.arange(1, instances + 1) // instances  # of the shares of split_samples
    samples["home"] = np.searchsorted(ends, np.arange(len(lengths)), side="right")
    return Batch(
        samples=samples,
        longest_first=np.argsort(-samples["scored"], kind="stable"),
        instances=instances,
        max_sequences=limits.max_sequences,
        capacity=limits.kv_capacity_tokens,
        kv_bytes_per_token=float(limits.kv_bytes_per_token),
        block_tokens=limits.block_tokens,
        score_tokens=limits.score_tokens,
        models=limits.scoring_models,
        early_models=limits.early_models,
        reward_workers=limits.reward_workers,
        transfer_latency=float(move.transfer_latency_seconds),
        transfer_per_byte=float(move.transfer_seconds_per_byte),
        run_latency=float(move.prefill_latency_seconds),
        run_per_token=float(move.prefill_seconds_per_token),
    )


def is_kernel_ready() -> bool:
    """Whether the kernel has been compiled, in this process or by another on this machine."""
    return bool(seconds_by_threshold.signatures) or is_cached(seconds_by_threshold)


def compile_kernel_apart(progress: Callable[[str], None] = lambda _: None) -> None:
    """Compile the kernel in another process, unless it is ready. Raises CalledProcessError where that fails."""
    if not is_kernel_ready():
        compile_apart([KernelGroup((seconds_by_threshold,), "rlhfuse.simulator.seconds")], progress)


def _compile_kernel() -> None:
    """Simulate one sample, so that the kernel is in numba's cache afterwards."""
    line = Line(1.0, (0.0, 0.0))
    costs = MeasuredCost(line, line, line, Line(1.0, (0.0,)), swap_in=0.0, meeting=0.0, release=0.0)
    limits = InstanceLimits(1, 2.0, 1.0, 1, 1, 1, 1, 1)
    numbers, fusion = numbers_of(costs, 1), fusion_limits(costs, limits)
    assert numbers is not None, "straight lines have a form in numbers"
    batch = _kernel_batch(SampleLengths((1,), (1,)), 1, limits, fusion)
    seconds_by_threshold(batch, numbers, np.zeros(1, np.int64), np.zeros(1, np.int64))


if __name__ == "__main__":
    tell_what_is_compiled()
    _compile_kernel()
