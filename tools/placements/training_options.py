"""What the training of a model may choose from on a mesh: layout, micro-batches, recomputation, where its optimizer
rests; each with seconds of an iteration and bytes of the fullest rank.

A model trains alone, as fast as no order of its pipeline beats and a search nearly always is; it keeps what 1F1B does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from placements.problem import Option
from placements.run_work import RunWork

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.decisions.layouts import divisors
from rlhfuse.planning.memory import RESTING, OptimizerOffload, input_bytes
from rlhfuse.planning.stage_cuts import with_cut

RECOMPUTE = ("none", "full")


def pipeline_seconds(stages: Sequence[tuple[float, float]], microbatches: int, transfer: float = 0.0) -> float:
    """Seconds of one model over stages (forward, backward), each a `transfer` from the next: each begins when all
    before it have had the first micro-batch, does all of them, and those before end after it.

    No order of work is faster (`latency_bound`), and without transfers 1F1B is as fast where no stage before the last
    is slower than it.
    """
    before = most = 0.0
    for hops, (forward, backward) in enumerate(stages):
        way = before + 2 * hops * transfer
        most = max(most, way + microbatches * (forward + backward))
        before += forward + backward
    return max(most, before + 2 * (len(stages) - 1) * transfer)


def training_options(work: RunWork, task: str, ranks: int, hardware: HardwareSpec, room: float) -> list[Option]:
    """Those of `actor_train` or `critic_train` that fit into `room` bytes of a rank."""
    found = []
    for layout in work.layouts(task, ranks, hardware.devices_per_node):
        for recompute, cut in product(RECOMPUTE, work.cuts):
            if not cut or layout.tp > 1 or work.cuts == (True,):
                found += _Training(work, task, work.cost(task, layout, hardware, recompute, cut)).options(room)
    return found


class _Training:
    """One layout of a model that trains; with each number of micro-batches its layers are cut as a run would."""

    def __init__(self, work: RunWork, task: str, cost: AnalyticCost) -> None:
        self.work, self.task, self.cost = work, task, cost
        self._by_cut: dict[ParallelLayout, _Cut] = {}

    def options(self, room: float) -> Iterator[Option]:
        layout, samples = self.cost.layout, self.work.samples_per_minibatch / self.cost.layout.dp  # of a pipeline
        offloading, on_gpu = self.work.config.trainer.offload_optimizer, self.cost.hardware.device.own_memory
        for microbatches in divisors(int(samples)):
            each = samples / microbatches
            cut = self._cut(each)
            step = cut.minibatch_seconds(self.work, microbatches)
            seconds = self.work.optimizer_steps * (step + cut.step_seconds)
            note = f"M{microbatches}" + (", recompute" if self.cost.recompute else "")
            note += ", sequence parallel" if self.cost.sequence_parallel and len(self.work.cuts) > 1 else ""
            beside, passing = cut.activations(self.work, each, microbatches)
            if offloading != "true" or not on_gpu:
                held = [sum(parts) for parts in zip(cut.weights, cut.optimizer, beside)]
                passes = [sum(parts) for parts in zip(cut.gradients, passing)]
                yield from _fitting(Option(layout, seconds, note=note), held, passes, room)
            if offloading != "false" and on_gpu:
                most = max(cut.optimizer)
                rests = OptimizerOffload(RESTING[0], most, most / self.cost.hardware.host_bandwidth)
                held = [sum(parts) for parts in zip(cut.weights, beside)]
                passes = [sum(parts) for parts in zip(cut.optimizer, cut.gradients, passing)]
                seen = seconds + rests.seen_seconds(0.0, step)
                yield from _fitting(Option(layout, seen, note=f"{note}, optimizer on the host"), held, passes, room)

    def _cut(self, samples: float) -> _Cut:
        """For micro-batches of so many samples, the longest."""
        layout = with_cut(self.work.config, self.cost, self.cost, self.work.longest_microbatch(samples))
        if layout not in self._by_cut:
            self._by_cut[layout] = _Cut.of(replace(self.cost, layout=layout))
        return self._by_cut[layout]


@dataclass(frozen=True)
class _Cut:
    """A model's layers on the stages of a pipeline; bytes of the `places` that none is fuller than: the ends, and of
    those between the first with so many layers, which has the most micro-batches under way."""

    cost: AnalyticCost
    layers: tuple[int, ...]
    places: tuple[int, ...]
    weights: tuple[int, ...]
    optimizer: tuple[int, ...]
    gradients: tuple[int, ...]
    step_seconds: float

    @staticmethod
    def of(cost: AnalyticCost) -> _Cut:
        layers = tuple(map(len, cost.layout.stage_layers(cost.spec.layers)))
        last = len(layers) - 1
        between = {count: place for place, count in reversed(list(enumerate(layers))[1:last])}
        places = tuple(sorted({0, last, *between.values()}))
        weights, optimizer = map(cost.memory.weights_bytes, places), map(cost.memory.optimizer_bytes, places)
        gradients, step = map(cost.memory.gradient_bytes, places), cost.optimizer_step_seconds()
        return _Cut(cost, layers, places, tuple(weights), tuple(optimizer), tuple(gradients), step)

    def minibatch_seconds(self, work: RunWork, microbatches: int) -> float:
        """Without its optimizer step; of micro-batches as the plan draws them. Where ranks share cores a mini-batch
        takes the work of all at least, as `SharedCores.least_time` says."""
        layout, cost = self.cost.layout, self.cost
        micro = work.drawn.microbatch(layout.dp, microbatches, layout.pp)
        stages = cost.stage_seconds(micro).of(self.layers)
        worked = microbatches * sum(map(sum, stages)) / layout.pp
        return max(pipeline_seconds(stages, microbatches, cost.send_seconds(micro.tokens)), worked * work.cores.waiting)

    def activations(self, work: RunWork, samples: float, microbatches: int) -> tuple[list[float], list[float]]:
        """Bytes of each place: buffers that stay; and what 1F1B keeps and what passes, of the longest samples."""
        cost, longest, pp = self.cost, work.longest_microbatch(samples), self.cost.layout.pp
        kept = cost.stage_costs(longest).activation
        inputs = input_bytes(work.config, cost.hardware, samples) // cost.layout.dp
        stays = cost.memory.gathering_bytes(longest.tokens) + cost.memory.rotation_bytes(
            work.longest_microbatch(1).tokens
        )
        beside, passing = [], []
        for place in self.places:
            beside.append(stays + cost.memory.receiving_bytes(longest.tokens, place))
            under_way = min(microbatches, pp - place) * kept[place]
            passing.append(inputs + under_way + cost.memory.passing_bytes(longest.tokens, place))
        return beside, passing


def _fitting(option: Option, held: list[float], passing: list[float], room: float) -> Iterator[Option]:
    """With the bytes of the fullest ranks: while it trains, and while it does not."""
    most, rests = max(map(sum, zip(held, passing))), max(held)
    if most <= room:
        yield replace(option, held_bytes=rests, passing_bytes=most - rests)
