"""Batches as the kernel of generation and inference takes them.

The kernel is compiled at its first use on a machine, in a process of its own, which says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain

import numpy as np

from rlhfuse.base.errors import InputError
from rlhfuse.base.kernel_cache import KernelGroup, compile_apart, tell_what_is_compiled
from rlhfuse.costs import fits
from rlhfuse.costs.forms import form
from rlhfuse.costs.table import CostTable
from rlhfuse.simulator.cost_numbers import cost_numbers
from rlhfuse.simulator.gen_infer_kernel import gen_infer
from rlhfuse.simulator.instance_kernel import SAMPLE, SPAN, SWAP_IN, TURN, Batch, MoveNumbers, State
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.tasks import packing
from rlhfuse.tasks.instance_limits import InstanceLimits
from rlhfuse.tasks.migration import check_threshold
from rlhfuse.tasks.packing import split_samples

SPANS = 6  # of an instance at most, beside those of scored packs


@dataclass(frozen=True)
class GenInferSeconds:
    """Mean over batches; `generation`: until the last sample is finished; `agreed`: until instances may score."""

    total: float
    generation: float
    migration: float  # from the trigger until every destination decodes again; 0 where it stays serial
    agreed: float


class Simulation:
    """Batches of samples on so many instances, at the costs and within the limits of one."""

    def __init__(self, batches: Sequence[SampleLengths], instances: int, costs: CostTable, limits: InstanceLimits):
        """Raises InputError for lengths beyond the limits."""
        if instances < 1:
            raise InputError(f"{instances} generation instances; at least 1 is needed")
        for lengths in batches:
            _check_lengths(lengths, limits)
        self._limits, self._instances = limits, instances
        most = min(limits.max_sequences, max(map(len, batches)))
        self._costs, move = cost_numbers(costs, most), MoveNumbers(*map(float, astuple(costs.move_cost(limits))))
        self._batches = [self._batch(lengths, move) for lengths in batches]

    def seconds(self, thresholds: Sequence[int]) -> dict[int, GenInferSeconds]:
        """By R_t, means over the batches. Raises InputError for one that is none of a batch's."""
        falling = sorted(set(thresholds), reverse=True)  # large R_t come first in time: simulated so
        outcomes = np.array([self._run(batch, falling, spans=0)[0] for batch in self._batches])
        parts = ("total", "generation", "migration", "agreed")
        means = ([float(outcomes[part][:, n].mean()) for part in parts] for n in range(len(falling)))
        return {threshold: GenInferSeconds(*seconds) for threshold, seconds in zip(falling, means)}

    def trace(self, threshold: int) -> tuple[np.ndarray, State, np.ndarray]:
        """OUTCOME of the first batch, how it ended, and SPAN of what its instances did. Raises InputError likewise."""
        batch = self._batches[0]
        outcomes, state = self._run(batch, (threshold,), spans=len(batch.samples) + SPANS * self._instances)
        spans = state.spans[: state.written[0]]
        scoring = spans[spans["kind"] >= SWAP_IN]  # of the first instance of a worker
        others = [scoring.copy() for _ in range(1, batch.per_worker)]
        for number, own in enumerate(others, start=1):
            own["instance"] += number
        return outcomes[0], state, np.concatenate([spans, *others])

    def _run(self, batch: Batch, thresholds: Sequence[int], spans: int) -> tuple[np.ndarray, State]:
        for threshold in thresholds:
            check_threshold(threshold, len(batch.samples))
        if not gen_infer.signatures:
            compile_apart([kernel_group()])
        several = self._instances > 1
        counts = [self._limits.destinations(threshold, self._instances) if several else 0 for threshold in thresholds]
        return gen_infer(batch, self._costs, np.array(thresholds), np.array(counts), np.zeros(spans, SPAN))

    def _batch(self, lengths: SampleLengths, move: MoveNumbers) -> Batch:
        limits, samples = self._limits, np.zeros(len(lengths), SAMPLE)
        samples["prompt"], samples["output"], samples["ended"] = lengths.prompt, lengths.output, np.nan
        samples["scored"] = samples["prompt"] + samples["output"]
        turns = np.zeros(0, TURN)
        if lengths.turns:
            turns = np.array(list(chain(*lengths.turns)), TURN)
            ends = np.cumsum([*map(len, lengths.turns)])
            samples["turn"], samples["last_turn"] = np.append(0, ends[:-1]), ends - 1
            samples["output"] = turns["drawn"][samples["turn"]]
        shares = map(len, split_samples(len(lengths), self._instances))
        samples["home"] = samples["at"] = np.repeat(np.arange(self._instances), list(shares))
        return Batch(
            samples=samples,
            turns=turns,
            longest_first=np.argsort(-samples["scored"], kind="stable"),
            instances=self._instances,
            per_worker=limits.instances_per_worker,
            max_sequences=limits.max_sequences,
            capacity=limits.kv_capacity_tokens,
            block_tokens=limits.block_tokens,
            score_tokens=limits.score_tokens,
            models=limits.scoring_models,
            early_models=limits.early_models,
            reward_workers=limits.reward_workers,
            move=move,
        )


def priced_limits(given: int, limits: InstanceLimits, costs: CostTable, lengths: SampleLengths) -> InstanceLimits:
    """`limits` with what follows from these costs at the median context: BS_max, unless one is `given`
    (fusion.bs_max), the share of their time in which so many samples decode, and how a sample moves."""
    context = lengths.median_context
    bs_max = given or costs.largest_flat_batch(context, limits.max_sequences)
    active = lengths.active_share(costs.decode_step_seconds(bs_max, bs_max * context))
    return replace(limits, bs_max=bs_max, active_share=active, move_cost=costs.move_cost(limits))


def _check_lengths(lengths: SampleLengths, limits: InstanceLimits) -> None:
    """Raise InputError for samples that are longer than the limits say."""
    if max(lengths.prompt) > limits.max_prompt_tokens or max(lengths.output) > limits.max_output_tokens:
        raise InputError(
            f"lengths up to {max(lengths.prompt)} + {max(lengths.output)} tokens exceed the run's "
            f"{limits.max_prompt_tokens} + {limits.max_output_tokens}; clip them first"
        )


def kernel_group() -> KernelGroup:
    """What `compile_apart` compiles for simulations."""
    return KernelGroup(
        (gen_infer,), "rlhfuse.simulator.simulation", sources=(form.__file__, fits.__file__, packing.__file__)
    )


def _compile_kernel() -> None:
    """Simulate one sample, so that the kernel is in numba's cache afterwards."""
    line = form.Form((form.LinePart(1.0, 0.0),))
    costs = CostTable(decode=line, prefill=line, score=line, transfer=line)
    simulation = Simulation([SampleLengths((1,), (1,))], 1, costs, InstanceLimits(1, 2.0, 1.0, 1, 1, 1, 1, 1))
    (batch,) = simulation._batches
    gen_infer(batch, simulation._costs, np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(0, SPAN))


if __name__ == "__main__":
    tell_what_is_compiled()
    _compile_kernel()
