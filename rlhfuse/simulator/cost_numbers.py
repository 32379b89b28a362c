"""Cost models as numbers for the kernel that simulates generation and inference: tables by batch, and coefficients.

The kernel does with them the very operations that the cost model does, in the same order: seconds are equal to the last
bit. A model is known by its methods, so that a subclass that changes one of them is never priced by its parent's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

import numpy as np

from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.collectives import RankGroup
from rlhfuse.costs.cost_model import CostModel
from rlhfuse.costs.fits import Line
from rlhfuse.costs.job_cost import JobCost
from rlhfuse.costs.measured import FittedSteps, MeasuredCost, TrialCost

Known = TypeVar("Known")
STEP = np.dtype(  # what a decode step of so many sequences depends on beside its context
    [
        ("flops", np.float64),  # of a layer
        ("all_reduce", np.float64),  # seconds of a layer
        ("head", np.float64),  # seconds
        ("sampler", np.float64),  # seconds
        ("tokens", np.float64),  # that a sequence gains: 1 without guesses
    ]
)
FORWARD = np.dtype(  # a forward of one model by the roofline; bytes, FLOPs and floors are of a layer
    [
        ("share", np.float64),  # least part of the batch that one replica takes
        ("layers", np.float64),
        ("flops_per_token", np.float64),
        ("flops_per_pair", np.float64),
        ("flop_rate", np.float64),
        ("weight_bytes", np.float64),
        ("kv_bytes", np.float64),  # per token
        ("byte_rate", np.float64),
        ("floor", np.float64),  # seconds
        ("moved_per_token", np.float64),  # bytes between the products
        ("bandwidth", np.float64),
        ("ring_share", np.float64),  # of a message that each rank sends in half of an all-reduce
        ("hidden", np.float64),
        ("element_bytes", np.float64),
        ("link", np.float64),
        ("sum_start", np.float64),  # seconds of an all-reduce beside its message
        ("output_share", np.float64),  # of the tokens
        ("head_flops", np.float64),  # per output
        ("head_floor", np.float64),  # seconds
        ("in_turns", np.float64),  # 1: the two of a roofline and the floor add up
        ("passed", np.float64),  # seconds beside all layers
    ]
)


class DecodeNumbers(NamedTuple):
    """A decode step by the roofline; FLOPs and bytes are of a layer."""

    by_batch: np.ndarray  # of STEP
    layers: float
    floor: float  # seconds of a layer
    flops_per_token: float  # of context
    flop_rate: float
    weight_bytes: float
    kv_bytes: float  # per token of context
    byte_rate: float
    in_turns: bool = False  # the two add up


class ForwardNumbers(NamedTuple):
    """Forwards by the roofline, one model after the other; or all of them as a straight line, where `lines` is true."""

    models: np.ndarray  # of FORWARD
    lines: bool = False
    constant: float = 0.0
    per_token: float = 0.0
    per_sequence: float = 0.0


class TransferNumbers(NamedTuple):
    """latency + factor x bytes / parts / bandwidth seconds."""

    latency: float
    factor: float
    parts: float
    bandwidth: float


class CostNumbers(NamedTuple):
    """All that a simulation asks of a cost model."""

    decode: DecodeNumbers
    prefill: ForwardNumbers
    score: ForwardNumbers
    transfer: TransferNumbers
    swap_in: float
    barrier: float
    release: float
    reward_seconds: float
    reward_at_once: int  # calls of one worker; 0 without a reward function


def numbers_of(costs: CostModel, most: int) -> CostNumbers | None:
    """For batches up to `most`; None for a cost model of another form, such as measured grids."""
    decode, prefill = _decode(costs, most), _prefill(costs)
    score, transfer = _score(costs), _transfer(costs)
    if decode is None or prefill is None or score is None or transfer is None:
        return None
    once = float(costs.swap_in_seconds()), float(costs.barrier_seconds()), float(costs.release_seconds())
    call = costs.reward_call()
    reward = (float(call.seconds), call.at_once) if call else (0.0, 0)
    return CostNumbers(decode, prefill, score, transfer, *once, *reward)


def _is(costs: CostModel, known: type[Known], method: str) -> TypeGuard[Known]:
    """Whether this method is that of a known cost model."""
    return isinstance(costs, known) and getattr(type(costs), method) is getattr(known, method)


def _are_rooflines(models: Sequence[Any]) -> bool:
    return all(type(model) is AnalyticCost for model in models)


def _decode(costs: CostModel, most: int) -> DecodeNumbers | None:
    batches = range(most + 1)
    if _is(costs, JobCost, "decode_step_seconds") and _are_rooflines([costs.actor]):
        actor, spec, machine, tp = costs.actor, costs.actor.spec, costs.actor.hardware, costs.actor.layout.tp
        return DecodeNumbers(
            by_batch=np.array([(2 * spec.layer_parameters * n, *_added(actor, n), 1) for n in batches], STEP),
            layers=float(spec.layers),
            floor=float(machine.decode_layer_seconds),
            flops_per_token=float(4 * spec.heads * spec.head_dim),
            flop_rate=float(tp * machine.flops),
            weight_bytes=float(spec.layer_parameters * actor.element_bytes),
            kv_bytes=float(2 * spec.kv_heads * spec.head_dim * actor.element_bytes),
            byte_rate=float(tp * machine.memory_bandwidth),
            in_turns=actor.in_turns,
        )
    if _is(costs, FittedSteps, "decode_step_seconds"):
        per_sequence, per_token = map(float, costs.decode.slopes)
        steps = [costs.speculation.step(n) if costs.speculation else (0.0, 1.0) for n in batches]
        rows = [(per_sequence * n, 0, guessing, 0, tokens) for n, (guessing, tokens) in zip(batches, steps)]
        return DecodeNumbers(np.array(rows, STEP), 1.0, float(costs.decode.constant), per_token, 1.0, 0.0, 0.0, 1.0)
    return None


def _prefill(costs: CostModel) -> ForwardNumbers | None:
    if _is(costs, JobCost, "prefill_seconds") and _are_rooflines([costs.actor]):
        return _rooflines([(costs.actor, costs.actor.prefill_starts, 0.0)], costs.actor.layout.tp, 0.0)
    if _is(costs, FittedSteps, "prefill_seconds"):
        return _line(costs.prefill)
    return None


def _score(costs: CostModel) -> ForwardNumbers | None:
    if _is(costs, JobCost, "score_seconds") and _are_rooflines(costs.scorers):
        scorers = [(cost, cost.hardware.launch_seconds, cost.hardware.pass_seconds) for cost in costs.scorers]
        return _rooflines(scorers, costs.actor.layout.tp, costs.output_share)
    if _is(costs, MeasuredCost, "score_seconds"):
        return _line(costs.score)
    if _is(costs, TrialCost, "score_seconds"):
        return _score(costs.rest)
    return None


def _transfer(costs: CostModel) -> TransferNumbers | None:
    if _is(costs, JobCost, "migration_seconds"):
        machine = costs.actor.hardware
        link = machine.cross_link_bandwidth if costs.cross_node else machine.node_link_bandwidth
        return TransferNumbers(0.0, 1.0, float(costs.actor.layout.tp), float(link))
    if _is(costs, MeasuredCost, "migration_seconds"):
        return TransferNumbers(float(costs.migration.constant), float(costs.migration.slopes[0]), 1.0, 1.0)
    if _is(costs, TrialCost, "migration_seconds"):
        return _transfer(costs.rest)
    return None


def _added(cost: AnalyticCost, batch: int) -> tuple[float, float, float]:
    return cost.decode_all_reduce_seconds(batch), cost.head_seconds(batch), cost.sampler_seconds(batch)


def _rooflines(
    models: Sequence[tuple[AnalyticCost, float, float]], instance_tp: int, output_share: float
) -> ForwardNumbers:
    """`models`: each with the seconds of a layer's launches, and those beside all layers."""
    rows = [(model.layout.tp / instance_tp, *_roofline(model, output_share, *rest)) for model, *rest in models]
    return ForwardNumbers(np.array(rows, FORWARD))


def _roofline(cost: AnalyticCost, output_share: float, starts: float, passed: float) -> tuple[float, ...]:
    """Fields of FORWARD from `layers` on."""
    spec, machine, tp, kernels = cost.spec, cost.hardware, cost.layout.tp, cost.kernels
    whole, group = spec.hidden / (tp if cost.sequence_parallel else 1), RankGroup(machine, tp)
    head = 0 if cost.scalar_head else spec.embedding_parameters
    return (
        spec.layers,
        2 * spec.layer_parameters,
        4 * spec.heads * spec.head_dim,
        tp * machine.flops,
        spec.layer_parameters * cost.element_bytes,
        2 * spec.kv_heads * spec.head_dim * cost.element_bytes,
        tp * machine.memory_bandwidth,
        starts,
        kernels.forward_bytes(spec, whole, tp, cost.element_bytes) if kernels else 0.0,
        cost.moving_bandwidth,
        (tp - 1) / tp,
        spec.hidden,
        cost.element_bytes,
        group.bandwidth,
        group.all_reduce_seconds(0),
        output_share,
        2 * head,
        head * cost.element_bytes / (tp * machine.memory_bandwidth),
        cost.in_turns,
        passed,
    )


def _line(line: Line) -> ForwardNumbers:
    return ForwardNumbers(np.zeros(0, FORWARD), True, float(line.constant), *map(float, line.slopes))
