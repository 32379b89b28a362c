"""Seconds and bytes that no run of a table goes below, cheap enough to be asked of every table.

A price lies above its floors, and a table that is refused for its floor's bytes would be refused for its own. What
tables have in common is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from operator import mul
from statistics import fmean
from typing import Any

import numpy as np

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.forms.training import TICK_SECONDS
from rlhfuse.costs.table import CostTable
from rlhfuse.planning.rooflines import optimizer_step_seconds
from rlhfuse.planning.search.setting import Setting
from rlhfuse.planning.search.space import TrainingRow
from rlhfuse.planning.training.stage_cuts import with_cut
from rlhfuse.planning.training.training_problem import equal_microbatch, longest_microbatch, transfer_ticks
from rlhfuse.schedule.ir.problem import FusionProblem, Number, StageCosts, fused_problem
from rlhfuse.schedule.ir.ranks import ModelShare
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.tasks.instance_limits import InstanceLimits
from rlhfuse.tasks.role import Role, role_named

NO_TIME = 1e-12  # ticks of a part of a problem's backward, which must take some
Bound = Callable[[FusionProblem], Number]  # ticks that no schedule beats
Problems = tuple[tuple[float, FusionProblem], ...]  # of a table's mini-batches: shares of them, and what is to schedule


class TrainingFloors:
    """Lower bounds of training rows: first from the work of all models shared evenly, then from that of every node."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._known: dict[Any, Any] = {}

    def rough_seconds(self, row: TrainingRow) -> float:
        """Seconds of an iteration: the mean work of a node, and the optimizer's steps.

        Raises InputError where a profile has not measured a tensor degree of the row.
        """
        ticks = 0.0
        for rung, part in self._shares(row).items():
            for share in row.shape.shares:
                work = self._work(row, rung, share) - 1.5 * share.layout.stages  # half a tick for each of three times
                ticks += part * row.batch.microbatches_of(rung)[share.model] * work / share.depth
        return row.batch.optimizer_steps * (max(0.0, ticks) * TICK_SECONDS + self._least_steps(row))

    def _shares(self, row: TrainingRow) -> Mapping[int, float]:
        return self.setting.inputs.drawn.rungs(row.batch.cut)

    def _work(self, row: TrainingRow, rung: int, share: ModelShare) -> float:
        """Ticks of a micro-batch over all stages of a model."""
        micro = equal_microbatch(self.setting.inputs.drawn, row.batch, rung, share)
        key = "work", share.model, share.layout.tp, share.layout.stages, row.recompute, row.sequence_parallel, micro
        if key not in self._known:
            cost = self._cost(row, role_named(share.model))
            seconds = self.setting.stage_seconds(share.model, cost, micro)
            forward, backward = seconds.layer
            if seconds.split:
                parts = backward, sum(seconds.split)
                backward = min(parts[split] for split in self.setting.may_split(share.model))
            whole = cost.spec.layers * (forward + backward) + sum(map(sum, seconds.ends))
            self._known[key] = whole / TICK_SECONDS
        return self._known[key]

    def rough_bytes(self, row: TrainingRow) -> tuple[float, float]:
        """What a mean rank holds while it trains, activations apart, and the weights alone, which it always holds."""
        held = weights = 0.0
        for role, layout in row.layouts.items():
            cost = self._cost(row, role)
            key = "parameters", role, layout.tp, layout.pp
            if key not in self._known:
                self._known[key] = fmean(cost.memory.place_parameters)
            parameters, main = self._known[key], 0 if cost.element_bytes == 4 else 4
            weights += parameters * cost.element_bytes
            held += parameters * (cost.element_bytes + 4 + (8 + main) / layout.dp)
        return held, weights

    def problems(self, row: TrainingRow) -> Problems:
        """The scheduling problems of the row's mini-batches, without a cap; where a draft chooses which backwards are
        split ones that are no longer than any of those."""
        return self._problems(row, {share.model: self.setting.may_split(share.model) for share in row.shape.shares})

    def choices(self, row: TrainingRow) -> Iterator[Problems]:
        """All that a draft of the row chooses from."""
        models = [share.model for share in row.shape.shares]
        for splits in product(*map(self.setting.may_split, models)):
            yield self._problems(row, {model: (split,) for model, split in zip(models, splits)})

    def _problems(self, row: TrainingRow, splits: Mapping[str, tuple[bool, ...]]) -> Problems:
        return tuple((share, self._problem(row, rung, splits)) for rung, share in self._shares(row).items())

    def _problem(self, row: TrainingRow, rung: int, splits: Mapping[str, tuple[bool, ...]]) -> FusionProblem:
        stages, transfer = {}, 0
        longest = longest_microbatch(self.setting.run.config.longest_sample, row.batch)
        for share in row.shape.shares:
            cost = self._cut(row, share.layout, role_named(share.model))
            micro = equal_microbatch(self.setting.inputs.drawn, row.batch, rung, share)
            cut, split = (cost.layout.tp, cost.layout.pp, cost.layout.chunks, cost.layout.cut), splits[share.model]
            key = "stages", share.model, cut, row.recompute, row.sequence_parallel, micro, longest, split
            if key not in self._known:
                seconds = self.setting.stage_seconds(share.model, cost, micro)
                if not seconds.split:  # a draft refuses what is asked
                    split = (False,)
                made = [cost.stage_costs(longest, parts, seconds) for parts in split]
                self._known[key] = made[0] if len(made) == 1 else no_longer_than(*made)
            stages[share.model] = self._known[key]
            transfer = max(transfer, transfer_ticks(cost, micro))
        layouts = {share.model: share.layout for share in row.shape.shares}
        problem = fused_problem(layouts, rung, stages, alternate=self.setting.run.config.fusion.alternates)
        return replace(problem, transfer=transfer)

    def seconds(self, row: TrainingRow, problems: Problems, bound: Bound) -> float:
        """Seconds of an iteration: a bound of its schedules, and the steps."""
        least, ticks = self.setting.inputs.cores.least_time, 0.0
        measured, host = self.setting.inputs.measured, {}
        if not (measured and measured.measures_training):
            host = {str(role): self._cut(row, layout, role).host_seconds for role, layout in row.layouts.items()}
        for share, problem in problems:
            ticks += share * max(float(bound(problem)), float(least(problem, row.shape, host)))
        return row.batch.optimizer_steps * (ticks * TICK_SECONDS + self._steps(row))

    def cut_layouts(self, row: TrainingRow) -> dict[Role, ParallelLayout]:
        """Layouts of the models that train, with the layers of each stage."""
        return {role: self._cut(row, layout, role).layout for role, layout in row.layouts.items()}

    def _least_steps(self, row: TrainingRow) -> float:
        """Seconds of a mini-batch's optimizer steps if every rank held as much; an optimizer waits for the fullest."""
        key = "least steps", row.actor, row.critic, row.sequence_parallel
        if key not in self._known:
            costs = {f"{role}_train": self._cost(row, role) for role in row.layouts}
            even = min(fmean(cost.memory.place_parameters) / cost.memory.parameters() for cost in costs.values())
            self._known[key] = even * optimizer_step_seconds(costs)
        return self._known[key]

    def _steps(self, row: TrainingRow) -> float:
        """Seconds of a mini-batch's optimizer steps."""
        costs = {f"{role}_train": self._cut(row, layout, role) for role, layout in row.layouts.items()}
        key = "steps", tuple(costs.values())
        if key not in self._known:
            self._known[key] = optimizer_step_seconds(costs)
        return self._known[key]

    def _cost(self, row: TrainingRow, role: Role) -> AnalyticCost:
        """Its stages have the same number of layers."""
        return self.setting.training_cost(role, row.layouts[role], row.recompute, row.sequence_parallel)

    def _cut(self, row: TrainingRow, layout: ParallelLayout, role: Role) -> AnalyticCost:
        """Its stages have the layers that the run's have."""
        cost, longest = self._cost(row, role), longest_microbatch(self.setting.run.config.longest_sample, row.batch)
        stages = layout.tp, layout.pp, layout.chunks, layout.cut
        key = "cut", role, stages, row.recompute, row.sequence_parallel, longest
        if key not in self._known:
            how, seconds = self.setting.run.config.parallel, self.setting.stage_seconds(role, cost, longest)
            self._known[key] = with_cut(how.stage_layers, cost, seconds).cut
        return cost.with_cut(self._known[key])


def no_longer_than(whole: StageCosts, split: StageCosts) -> StageCosts:
    """Split backwards that a schedule can put in the place of whole ones and of split ones."""
    assert split.weight_gradient is not None, "its backwards are split"
    backward = tuple(map(min, whole.backward, split.backward))
    rest = (max(NO_TIME, both - before) for both, before in zip(whole.backward, backward))
    weights = tuple(map(min, rest, split.weight_gradient))
    return replace(whole, backward=backward, weight_gradient=weights, weight_activation=(0,) * len(weights))


def work_bound(problem: FusionProblem) -> float:
    """Ticks that no schedule beats: of every node the work of some of its stages, the shortest way to the first
    operation of these and the shortest from their last; and of every pipeline the way of its last micro-batch."""
    stages: list[list[tuple[float, float, float]]] = [[] for _ in range(problem.nodes)]  # by node: way to, work, from
    longest = 0.0
    for pipeline in problem.pipelines:
        before = after = 0.0
        count, last = pipeline.microbatches, pipeline.placement[0]
        weights = pipeline.weight_gradient or (0,) * pipeline.stages
        for node, forward, backward, weight in zip(pipeline.placement, pipeline.forward, pipeline.backward, weights):
            hop, last = problem.transfer if node != last else 0, node
            before, after = before + hop, after + hop
            stages[node].append((before, count * (forward + backward + weight), 0 if pipeline.split else after))
            before, after = before + forward, after + backward
        slowest = max(max(pipeline.forward), max(pipeline.backward))
        longest = max(longest, before + after + (count - 1) * slowest)
    most = max(map(len, stages))
    padded = np.array([[*rows, *[(-np.inf, 0.0, -np.inf)] * (most - len(rows))] for rows in stages])
    first, work, rest = np.moveaxis(padded, 2, 0)  # each [node, stage of it]
    later = (first[:, None, :] >= first[:, :, None])[:, :, None, :] & (rest[:, None, :] >= rest[:, :, None])[
        :, None, :, :
    ]
    bounds = first[:, :, None] + rest[:, None, :] + (later * work[:, None, None, :]).sum(-1)
    return max(longest, float(bounds.max()))


def generation_floor(
    batches: tuple[SampleLengths, ...], costs: CostTable, limits: InstanceLimits, instances: int, replicas: int
) -> float:
    """Generation and inference of an iteration, mean over the batches, of each the larger of two: the longest sample
    alone on an instance; all decode steps and scores shared evenly, every token at the cheapest batch there may be.

    `replicas`: most of a model that scores, in a worker or in the instance around it.
    """
    return fmean(_batch_floor(batch, costs, limits, instances, replicas) for batch in batches)


def _batch_floor(
    batch: SampleLengths, costs: CostTable, limits: InstanceLimits, instances: int, replicas: int
) -> float:
    """What was measured ascends and need not be convex, so that contexts count as the shortest there."""
    convex, most = costs.convex, min(limits.max_sequences, len(batch))
    ends = [len(own) + 1 for own in batch.turns] or [2] * len(batch)  # a prefill makes a turn's first; one more moves
    counts = [max(0, drawn - few) for drawn, few in zip(batch.drawn, ends)]
    contexts = [prompt + (count + 1) / 2 for prompt, count in zip(batch.prompt, counts)]
    shortest = min(batch.prompt) + 1.0
    output, prompt, count = max(zip(batch.output, batch.prompt, counts))
    reached = prompt + (count + 1) / 2 if convex else shortest
    sizes = (1, most) if convex else range(1, most + 1)  # a token is cheapest in the largest batch, alone a step is
    step = min(costs.decode_step_seconds(size, reached if convex else size * shortest) for size in sizes)
    alone = costs.prefill_seconds(1, 1) + count * step + _least_score(costs, prompt + output, replicas)
    context = sum(map(mul, counts, contexts)) / max(1, sum(counts)) if convex else shortest
    decoding = sum(counts) * min(costs.decode_step_seconds(size, size * context) / size for size in sizes)
    bends = (replicas * tokens for tokens in costs.score_bends())  # where a token may cost least
    packs = [max(limits.score_tokens, limits.longest), *bends]
    scoring = (sum(batch.prompt) + sum(batch.output)) * min(_least_score(costs, p, replicas) / p for p in packs)
    return max(alone, (decoding + scoring * limits.instances_per_worker) / instances)


def _least_score(costs: CostTable, tokens: float, replicas: int) -> float:
    """Least seconds of a pack of so many tokens, however many sequences: replicas share sequences. Analytic costs fall
    with their number, measured ones rise."""
    return min(costs.score_seconds(tokens, sequences) for sequences in (1, replicas, max(replicas, tokens)))
