"""What the training of a model may choose from on a mesh: layout, micro-batches, recomputation, where its optimizer
rests; each with seconds of an iteration and bytes of the fullest rank.

A model trains alone, its schedule's problem and price those of a search's tables; it keeps what 1F1B does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from operator import add
from typing import get_args

from placements.problem import Option
from placements.run_work import RunWork

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import HardwareSpec
from rlhfuse.config.values import AUTO, Recompute
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.analytic_table import analytic_table
from rlhfuse.costs.forms.training import MicrobatchTokens
from rlhfuse.decisions.batch_arithmetic import BatchArithmetic
from rlhfuse.planning.memory.memory_budget import RESTING, OptimizerOffload, input_bytes
from rlhfuse.planning.search.floors import work_bound
from rlhfuse.planning.search.space import token_budgets
from rlhfuse.planning.training.stage_cuts import with_cut
from rlhfuse.planning.training.training_problem import TICK_SECONDS, TrainingWork, longest_microbatch
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.ir.ranks import fused_shape
from rlhfuse.tasks.task import TASKS


def training_options(work: RunWork, task: str, ranks: int, hardware: HardwareSpec, room: float) -> list[Option]:
    """Those of `actor_train` or `critic_train` that fit into `room` bytes of a rank."""
    options = []
    for layout in work.layouts(task, ranks, hardware.devices_per_node):
        for recompute, sharded in product(get_args(Recompute), work.sharding):
            if not sharded or layout.tp > 1 or work.sharding == (True,):
                options += _layout_options(work, task, work.cost(task, layout, hardware, recompute, sharded), room)
    return options


def _layout_options(work: RunWork, task: str, uncut: AnalyticCost, room: float) -> Iterator[Option]:
    """One layout with each budget of a micro-batch, for which its layers are cut as a run would."""
    config, role, layout = work.config, TASKS[task].role, uncut.layout
    offloading, on_gpu = config.trainer.offload_optimizer, uncut.hardware.device.own_memory
    known: dict[ParallelLayout, AnalyticCost] = {}  # by cut: what a cost has computed it keeps
    samples, tokens = config.samples_per_iteration // int(config.algorithm.minibatches), sum(config.longest_sample)
    for budget in token_budgets(tokens, samples, layout.dp):
        layouts: dict[str, ParallelLayout] = {"generation": layout, "actor_train": layout}
        fusion = config.fusion.with_(microbatch_tokens=budget, actor_microbatches=AUTO)
        try:
            batch = BatchArithmetic.of(config.rollout, config.algorithm, fusion, layouts, tokens)
        except InputError:  # no samples for all pipelines
            continue
        longest = longest_microbatch(config.longest_sample, batch)
        cut = with_cut(config.parallel.stage_layers, uncut, uncut.stage_seconds(longest))
        cost = known.setdefault(cut, replace(uncut, layout=cut))
        step, problem = 0.0, None
        for rung, share in work.inputs.drawn.rungs(batch.cut).items():
            problem = TrainingWork({task: cost}, analytic_table(cost), batch, work.inputs.drawn, longest).problem(rung)
            shape, host = fused_shape({role: cut}), {str(role): cost.host_seconds}
            least = work.inputs.cores.least_time(problem, shape, host)
            step += share * max(work_bound(problem), float(least)) * TICK_SECONDS
        assert problem is not None, "a batch is drawn"
        seconds = batch.optimizer_steps * (step + cost.optimizer_step_seconds())
        note = f"T{budget}" + ("" if cost.recompute == "none" else f", recompute {cost.recompute}")
        note += ", sequence parallel" if cost.sequence_parallel and len(work.sharding) > 1 else ""
        places = _fullest_places(cost)
        optimizer = [cost.memory.optimizer_bytes(place) for place in places]
        held, passes = zip(*(_bytes_of(work, cost, batch, problem, longest, place) for place in places))
        if offloading != "true" or not on_gpu:
            yield from _fitting(Option(layout, seconds, note=note), _sums(held, optimizer), passes, room)
        if offloading != "false" and on_gpu:
            most = max(optimizer)
            seconds += OptimizerOffload(RESTING[0], most, most / cost.hardware.host_bandwidth).seen_seconds(0.0, step)
            option = Option(layout, seconds, note=f"{note}, optimizer on the host")
            yield from _fitting(option, held, _sums(passes, optimizer), room)


def _fullest_places(cost: AnalyticCost) -> list[int]:
    """Places of a pipeline that none is fuller than: the ends, and of those between the first with so many layers,
    which has the most micro-batches under way."""
    layers = [len(stage) for stage in cost.layout.stage_layers(cost.spec.layers)]
    last = len(layers) - 1
    between = {count: place for place, count in reversed(list(enumerate(layers))[1:last])}
    return sorted({0, last, *between.values()})


def _bytes_of(
    work: RunWork,
    cost: AnalyticCost,
    batch: BatchArithmetic,
    problem: FusionProblem,
    longest: MicrobatchTokens,
    place: int,
) -> tuple[float, float]:
    """What a place holds all the time beside its optimizer, and what passes in training, of the longest samples."""
    (pipeline,), dp = problem.pipelines, cost.layout.dp
    inputs = input_bytes(batch, work.config.longest_sample, cost.hardware) // dp
    held = cost.memory.gathering_bytes(longest.tokens) + cost.memory.rotation_bytes(work.longest_tokens)
    held += cost.memory.weights_bytes(place) + cost.memory.receiving_bytes(longest.tokens, place)
    under_way = min(pipeline.microbatches, pipeline.stages - place) * pipeline.activation[place]
    return held, cost.memory.gradient_bytes(place) + inputs + under_way + cost.memory.passing_bytes(
        longest.tokens, place
    )


def _sums(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return list(map(add, left, right))


def _fitting(option: Option, held: Sequence[float], passing: Sequence[float], room: float) -> Iterator[Option]:
    """With the bytes of the fullest ranks: while it trains, and while it does not."""
    most, rests = max(_sums(held, passing)), max(held)
    if most <= room:
        yield replace(option, held_bytes=rests, passing_bytes=most - rests)
