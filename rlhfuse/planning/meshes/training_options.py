"""What the training of a model may choose from on a mesh: layout, micro-batches, recomputation, where its optimizer
rests; each with seconds of an iteration and bytes of the fullest rank. A model trains alone, by 1F1B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlhfuse.config.spec import HardwareSpec, ParallelLayout
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.stage_cut import fastest_cut
from rlhfuse.planning.memory import RESTING, OptimizerOffload, input_bytes
from rlhfuse.planning.meshes.problem import Option
from rlhfuse.planning.meshes.run_work import RunWork, divisors

RECOMPUTE = (False, True)


def pipeline_seconds(stages: Sequence[tuple[float, float]], microbatches: int) -> float:
    """1F1B of one model over stages (forward, backward): a stage begins when all before it have had the first
    micro-batch, does all of them, and those before end after it.

    No order of work is faster (`latency_bound`), and 1F1B is as fast where stages are about even.
    """
    before = most = 0.0
    for forward, backward in stages:
        most = max(most, before + microbatches * (forward + backward))
        before += forward + backward
    return max(most, before)


def training_options(work: RunWork, task: str, ranks: int, hardware: HardwareSpec, room: float) -> list[Option]:
    """Those of `actor_train` or `critic_train` that fit into `room` bytes of a rank."""
    found = []
    for layout in work.layouts(task, ranks, hardware.devices_per_node):
        for recompute in RECOMPUTE:
            found += _Training(work, replace(work.cost(task, layout, hardware), recompute=recompute)).options(room)
    return found


class _Training:
    """One layout of a model that trains, its layers cut as a run would cut them."""

    def __init__(self, work: RunWork, cost: AnalyticCost) -> None:
        self.work, self.layout = work, cost.layout
        self.cost = replace(cost, layout=self._cut(work, cost))
        self._cuts = tuple(map(len, self.cost.layout.stage_layers(cost.spec.layers)))
        self._places = self._full_places()
        self._weights = [self.cost.weights_bytes(place) for place in self._places]
        self._optimizer = [self.cost.optimizer_bytes(place) for place in self._places]
        self._gradients = [self.cost.gradient_bytes(place) for place in self._places]
        self._steps = self.cost.optimizer_step_seconds()

    def _full_places(self) -> list[int]:
        """Of a pipeline: its ends, and of the places between those that no other is fuller than. Of places with as
        many layers the first has the most micro-batches under way."""
        last = self.layout.pp - 1
        between = {layers: place for place, layers in reversed(list(enumerate(self._cuts))[1:last])}
        return sorted({0, last, *between.values()})

    @staticmethod
    def _cut(work: RunWork, cost: AnalyticCost) -> ParallelLayout:
        """For micro-batches of a sample: shares of a layer and of the ends hardly depend on how many there are."""
        layout, spec = cost.layout, cost.spec
        if layout.pp == 1 or work.config.parallel.stage_layers != "auto":
            return layout
        seconds = cost.stage_seconds(work.longest_microbatch(1))
        cut = fastest_cut(spec.layers, layout.pp, seconds, spec.layer_parameters, cost.end_parameters())
        return layout.with_cut(cut)

    def options(self, room: float) -> Iterator[Option]:
        samples = self.work.samples_per_minibatch / self.layout.dp  # of a pipeline
        offloading, on_gpu = self.work.config.trainer.offload_optimizer, self.cost.hardware.name != "cpu"
        for microbatches in divisors(int(samples)):
            each = samples / microbatches
            stages = self.cost.stage_seconds(self.work.microbatch(each)).of(self._cuts)
            step = pipeline_seconds(stages, microbatches)
            seconds = self.work.optimizer_steps * (step + self._steps)
            standing, passing = self._activations(each, microbatches)
            if offloading != "true" or not on_gpu:
                held = [sum(parts) for parts in zip(self._weights, self._optimizer, standing)]
                passes = [sum(parts) for parts in zip(self._gradients, passing)]
                yield from self._fitting(seconds, held, passes, room, f"M{microbatches}")
            if offloading != "false" and on_gpu:
                most = max(self._optimizer)
                rests = OptimizerOffload(RESTING[0], most, most / self.cost.hardware.host_bandwidth)
                held = [sum(parts) for parts in zip(self._weights, standing)]
                passes = [sum(parts) for parts in zip(self._optimizer, self._gradients, passing)]
                seen = seconds + rests.seen_seconds(0.0, step)
                yield from self._fitting(seen, held, passes, room, f"M{microbatches}, optimizer on the host")

    def _fitting(
        self, seconds: float, held: list[float], passing: list[float], room: float, note: str
    ) -> Iterator[Option]:
        """Of the fullest ranks: while it trains, and while it does not."""
        most, rests = max(map(sum, zip(held, passing))), max(held)
        if most <= room:
            note += ", recompute" if self.cost.recompute else ""
            yield Option(self.layout, seconds, rests, most - rests, note=note)

    def _activations(self, samples: float, microbatches: int) -> tuple[list[float], list[float]]:
        """Of the places: buffers that stay, and what 1F1B keeps and what passes, of the longest."""
        cost, longest, pp = self.cost, self.work.longest_microbatch(samples), self.layout.pp
        sample = self.work.longest_microbatch(1).tokens
        kept = cost.stage_costs(longest).activation
        inputs = input_bytes(self.work.config, samples) // self.layout.dp if cost.hardware.name != "cpu" else 0
        stays = cost.gathering_bytes(longest.tokens) + cost.rotation_bytes(sample)
        standing, passing = [], []
        for place in self._places:
            standing.append(stays + cost.receiving_bytes(longest.tokens, place))
            under_way = min(microbatches, pp - place) * kept[place]
            passing.append(inputs + under_way + cost.passing_bytes(longest.tokens, place))
        return standing, passing
