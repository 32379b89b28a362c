"""Measure a run's work on the ranks at hand, all instances at the same time, as they work in a run (paper section 6).

A measured value is the mean of REPEATS runs without the fastest and the slowest. Where the time limit is reached, the
points that are left lie on a straight line through those that were measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from cost_profiles.measured_grid import grid_of
from cost_profiles.points import BYTES, Points, points_of, tensor_degrees
from cost_profiles.work import Builder, GenerationWork, ScoreWork, TrainingWork, load_seconds

from rlhfuse.base.launcher import local_rank
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.fits import Grid
from rlhfuse.costs.profiled import ProfiledCost, TrainingGrids, made_for
from rlhfuse.decisions.layouts import given_tasks
from rlhfuse.gen.compile_kernels import compile_kernels
from rlhfuse.parallel.collectives import from_rank_0, transfer_seconds
from rlhfuse.parallel.connect import GroupUse, connect
from rlhfuse.parallel.device import Device
from rlhfuse.parallel.groups import GroupMaker, plain_grid
from rlhfuse.tasks.role import POLICY, Role

REPEATS = 5
AT_LEAST = 4  # points of every kind, whatever the time limit: the line through the others needs them


def steady_mean(seconds: Sequence[float]) -> float:
    """The mean without the extremes, which belong to the machine and not to the work."""
    ordered = sorted(seconds)
    kept = ordered[1:-1] if len(ordered) > 2 else ordered
    return sum(kept) / len(kept)


class Profiler:
    """Everything of a profile on one rank."""

    def __init__(
        self,
        config: RunConfig,
        specs: Mapping[Role, ModelSpec],
        device: Device,
        limit_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._specs, self._device, self._say = config, specs, device, say
        self._tp = tensor_degrees(config)
        rank, world = dist.get_rank(), dist.get_world_size()
        self._instances = world // self._tp["generation"]
        dtype = getattr(torch, config.trainer.dtype)
        if not device.is_cuda:
            if local_rank() == 0:
                compile_kernels(dtype)
            dist.barrier()
        self._points: Points = points_of(config)
        builder = Builder(rank, world, device, dtype, GroupMaker(config.trainer.hang_seconds))
        say("building models with random weights")
        self._generation = GenerationWork(config, specs[POLICY], self._points, builder, self._tp["generation"])
        self._score = {
            role: ScoreWork(config, role, specs[role], builder, self._tp[f"{role}_inference"])
            for role in config.scorers()
        }
        self._training = {
            role: [
                TrainingWork(config, role, specs[role], layers, builder, self._tp[f"{role}_train"])
                for layers in (1, self._deep(role))
            ]
            for role in config.trained()
        }
        replicas = ParallelLayout(self._instances, self._tp["generation"], 1)
        self._tp_group = builder.groups.for_model("profile", plain_grid(replicas), rank).tp
        connect([GroupUse(self._tp_group, "all_reduce")], device.torch_device)
        self._measures = 2 + len(self._score) + len(self._training)  # that are still to come
        self._deadline = time.monotonic() + limit_seconds  # without building and compiling, which happen once

    def run(self) -> ProfiledCost:
        """The profile, whole on rank 0; a collective."""
        decode = self._measure(
            "decode",
            (self._points.batches, self._points.contexts),
            self._points.decode(),
            lambda batch, context: steady_mean(self._generation.decode(batch, context, REPEATS)),
            self._agreed,
        )
        prefill = self._packs("prefill", self._generation.prefill)
        score = {role: self._packs(f"scoring by {role}", work.score) for role, work in self._score.items()}
        works = list(self._score.values())
        swap_in = steady_mean([load_seconds(works, self._device) for _ in range(REPEATS)]) if works else 0.0
        if self._instances == 1:
            self._say("one instance only: bytes are priced as a copy within its memory")
        tasks = given_tasks(self._config.parallel, self._config.roles(), dist.get_world_size())
        return ProfiledCost(
            made_for=made_for(self._config.trainer, tasks, self._specs),
            decode=decode,
            prefill=prefill,
            score={str(role): grid for role, grid in score.items()},
            swap_in=swap_in,
            training={str(role): self._train(role) for role in self._training},
            all_reduce=self._all_reduce(),
            move=_transfers(self._device, self._tp["generation"]),
        )

    def _packs(self, what: str, work: Callable[[int, int], float]) -> Grid:
        def repeated(tokens: int, sequences: int) -> float:
            work(tokens, sequences)  # warms up
            return steady_mean([work(tokens, sequences) for _ in range(REPEATS)])

        axes = (self._points.tokens, self._points.sequences)
        return self._measure(what, axes, self._points.packs(), repeated, self._agreed)

    def _measure(
        self,
        what: str,
        axes: Sequence[Sequence[float]],
        cells: Sequence[tuple],
        work: Callable[..., float],
        agree: Callable[[bool], bool],
    ) -> Grid:
        """Measure the cells in order, for this measure's share of the time left but at least AT_LEAST of them."""
        dist.barrier()  # all instances measure the same at the same time
        began, measured = time.monotonic(), {}
        end = began + max(0.0, self._deadline - began) / max(1, self._measures)
        self._measures -= 1
        for number, cell in enumerate(cells):
            if number >= AT_LEAST and agree(time.monotonic() > end):
                break
            measured[cell] = work(*cell)
        left = f", {len(cells) - len(measured)} points left out: time limit" if len(measured) < len(cells) else ""
        self._say(f"{what}: {len(measured)} points in {time.monotonic() - began:.1f} s{left}")
        return grid_of(axes, measured)

    def _agreed(self, over: bool) -> bool:
        """What the leader of the instance says, on all of its ranks."""
        told = torch.tensor([int(over and dist.get_rank(self._tp_group) == 0)], device=self._device.torch_device)
        dist.all_reduce(told, group=self._tp_group)
        return bool(told)

    # training, links ------------------------------------------------------------------------------------------

    def _deep(self, role: Role) -> int:
        """Layers of the deeper of the two models whose difference is that of the layers between them."""
        layout = ParallelLayout.parse(getattr(self._config.parallel, f"{role}_train"))
        return 1 + max(1, len(layout.stage_layers(self._specs[role].layers)[0]))

    def _train(self, role: Role) -> TrainingGrids:
        """Measures one layer and the two ends, with a model of one layer and one of several."""
        more, axis, works = self._deep(role) - 1, self._points.training_tokens, self._training[role]
        ways = ("forward", "backward", "backward_input", "weight_gradient")
        layers: dict[str, dict[tuple, float]] = {way: {} for way in ways}
        ends: dict[str, dict[tuple, float]] = {way: {} for way in ways[:2]}

        def measured(tokens: int) -> float:
            thin, deep = (self._steps(work, tokens) for work in works)
            for way, first, second in zip(ways, thin, deep):
                layers[way][(tokens,)] = layer = max(0.0, second - first) / more
                if way in ends:
                    ends[way][(tokens,)] = max(0.0, first - layer)
            return sum(deep)

        self._measure(f"training of {role}", (axis,), [(tokens,) for tokens in axis], measured, from_rank_0)
        grids = {f"layer_{way}": grid_of((axis,), cells) for way, cells in layers.items()}
        grids |= {f"ends_{way}": grid_of((axis,), cells) for way, cells in ends.items()}
        return TrainingGrids(self._tp[f"{role}_train"], **grids)

    def _steps(self, work: TrainingWork, tokens: int) -> tuple[float, ...]:
        """Forward, backward, B and W."""
        seconds = []
        for step in (work.step, work.split_step):
            step(tokens, self._points.longest)  # warms up
            seconds += [*zip(*(step(tokens, self._points.longest) for _ in range(REPEATS)))]
        return tuple(map(steady_mean, seconds))

    def _all_reduce(self) -> Grid | None:
        if self._tp["generation"] == 1:
            return None

        def once(size: int) -> float:
            buffer = torch.zeros(size // 4, device=self._device.torch_device)
            self._device.synchronize()
            start = time.perf_counter()
            dist.all_reduce(buffer, group=self._tp_group)
            self._device.synchronize()
            return time.perf_counter() - start

        return grid_of((BYTES,), {(size,): steady_mean([once(size) for _ in range(REPEATS)]) for size in BYTES})


def _transfers(device: Device, tp: int) -> Grid:
    """Seconds one way between the leaders of the first and the last instance, of each size; a collective.

    With one instance it is a copy within its memory. Only the first leader's values are true.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - tp
    measured = {}
    for size in BYTES:
        trips = transfer_seconds(size, last, REPEATS + 1, device) if rank in (0, last) else [0.0, 0.0]
        measured[(size,)] = steady_mean(trips[1:])
    return grid_of((BYTES,), measured)
