"""From a parallel layout to process groups: first who does what as plain numbers, then the groups.

Data parallelism is having several pipelines. Ranks of a training pair come from the schedule's rank map, whose second
model runs backwards over the first one's ranks; generation and inference use `plain_grid`. Groups are values that
callers pass on; there is no global parallel state.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.values import LONGEST_SECONDS
from rlhfuse.parallel.device import Device
from rlhfuse.schedule.ir.ranks import FusedRanks, plain_cells


@dataclass(frozen=True)
class ModelGrid:
    """A layout on ranks: `cells[pipeline][place]` are those of one tensor-parallel group, in tensor order.

    Stage s is at place s % pp; with v chunks a pipeline has pp * v stages, of which a rank holds v.
    """

    cells: tuple[tuple[tuple[int, ...], ...], ...]
    layout: ParallelLayout

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for pipeline in self.cells for cell in pipeline for rank in cell))

    def position(self, rank: int) -> tuple[int, int, int]:
        """(pipeline, place, tensor rank) of a global rank; its place is its lowest stage."""
        for pipeline, places in enumerate(self.cells):
            for place, cell in enumerate(places):
                if rank in cell:
                    return pipeline, place, cell.index(rank)
        raise KeyError(f"rank {rank} is not in this grid of {len(self.ranks)} ranks")

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a global rank holds, one for each chunk, in order."""
        _, place, _ = self.position(rank)
        return tuple(range(place, self.layout.stages, self.layout.pp))


def plain_grid(layout: ParallelLayout) -> ModelGrid:
    """Megatron's order: tensor ranks are neighbours, then data, then pipeline."""
    return ModelGrid(plain_cells(layout), layout)


def trained_grid(ranks: FusedRanks, model: str) -> ModelGrid:
    """The grid of a model that trains, on the ranks of its pipelines."""
    return ModelGrid(ranks.pipelines(model), ranks.shape.share(model).layout)


def new_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """The group of `ranks` in that order; a collective. Raises InputError where this torch cannot keep the order."""
    if list(ranks) != sorted(ranks):  # new_group sorts ranks unless told not to, and old ones cannot be told
        if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
            raise InputError(
                f"torch {torch.__version__} sorts a process group's ranks, but {list(ranks)} must keep this order; "
                "install torch 2.12 or later"
            )
        options["sort_ranks"] = False
    made = dist.new_group(list(ranks), **options)
    return made  # pyright: ignore[reportReturnType]  # who is no member gets a placeholder


def numbers_only(rank: int, size: int) -> dist.ProcessGroup:
    """A group that knows this rank's place in it and communicates with nobody."""
    return dist.ProcessGroup(rank, size)  # pyright: ignore[reportCallIssue]  # torch's stubs know one with a store


class GroupMaker:
    """Makes process groups in one order on every rank; equal (purpose, ranks) give the same group.

    One group is for all that its ranks do in one order, so that no two operations can wait for each other in it:
    tensor ranks of a cell run the same phases and, as programs are parts of one order of events, the same instructions
    of all models that they share; steps come in one order on all ranks, and with them the norms. Reductions and
    gathers of a model's replicas stay apart from everything: they are left alone while other models' work goes on.

    Their collectives wait for `timeout_seconds`; by default as under a watchdog, see `wait_for_workers`.
    """

    def __init__(self, timeout_seconds: float = LONGEST_SECONDS) -> None:
        self._made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._timeout = datetime.timedelta(seconds=timeout_seconds)

    def group(self, purpose: str, ranks: tuple[int, ...], **options: Any) -> dist.ProcessGroup:
        """The group of `ranks` in that order. Every rank must ask for it, members or not; `options` are new_group's."""
        key = ("single" if len(ranks) == 1 else purpose, ranks)
        options = {} if len(ranks) == 1 else options
        if key not in self._made:
            self._made[key] = new_group(ranks, timeout=self._timeout, group_desc=f"{purpose}:{ranks}", **options)
        return self._made[key]

    def close(self) -> None:
        """Destroy every group made here that this rank belongs to; files are freed once nobody holds them."""
        for (_, ranks), group in self._made.items():
            if dist.get_rank() in ranks:
                dist.destroy_process_group(group)
        self._made.clear()

    def for_model(self, purpose: str, grid: ModelGrid, rank: int) -> ProcessGroupCollection:
        """The collection that Megatron's modules, DDP and optimizer take, for `rank` in `grid`.

        `purpose` keeps what two models that train at the same time must not share apart.
        """
        cells, layout = grid.cells, grid.layout
        tp = self.own("tp", [cell for stages in cells for cell in stages], rank)  # the same for all models
        pipelines = [tuple(sorted(r for cell in stages for r in cell)) for stages in cells]
        name = f"{purpose}.mp"
        mp = self.own(name, pipelines, rank) if len(pipelines) > 1 else self.everyone(name, pipelines[0])
        replicas = [tuple(s[p][t] for s in cells) for p in range(layout.pp) for t in range(layout.tp)]
        dp = self.own(f"{purpose}.dp", replicas, rank)
        ends = [tuple(sorted((s[0][t], s[-1][t]))) for s in cells for t in range(layout.tp)] if layout.pp > 1 else []
        embd = self.own(f"{purpose}.embd", ends, rank)
        everyone = self.everyone(f"{purpose}.all", grid.ranks)
        # of these Megatron asks the rank and the size alone
        pp = tp_dp = alone = None
        if rank in grid.ranks:
            pipeline, place, tp_rank = grid.position(rank)
            pp, alone = numbers_only(place, layout.pp), numbers_only(0, 1)
            tp_dp = numbers_only(pipeline * layout.tp + tp_rank, layout.dp * layout.tp)
        # without context and expert parallelism the groups that these cut are whole
        same = dict.fromkeys(("tp", "tp_cp", "tp_ep", "expt_tp"), tp)
        same |= dict.fromkeys(("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp"), dp)
        same |= dict.fromkeys(("mp", "tp_ep_pp"), mp) | dict.fromkeys(("cp", "ep"), alone)
        return ProcessGroupCollection(pp=pp, embd=embd, pos_embd=None, tp_dp_cp=tp_dp, intra_dist_opt=everyone, **same)

    def own(self, purpose: str, every: Sequence[tuple[int, ...]], rank: int) -> Any:
        """The group of `rank` among `every` one; None if it is in none."""
        groups = {ranks: self.group(purpose, ranks) for ranks in every}
        return next((group for ranks, group in groups.items() if rank in ranks), None)

    def everyone(self, purpose: str, ranks: tuple[int, ...]) -> Any:
        """The group of all `ranks` of a model: the job's own where they are the job's."""
        return dist.group.WORLD if len(ranks) == dist.get_world_size() else self.group(purpose, ranks)

    def channels(
        self, purpose: str, pairs: list[tuple[int, int]], device: Device | None = None
    ) -> dict[tuple[int, int], dist.ProcessGroup]:
        """One two-rank group for each directed (sender, receiver) pair, made in sorted order."""
        made = {}
        for sender, receiver in sorted(set(pairs)):
            ends = (min(sender, receiver), max(sender, receiver))
            options = channel_options(device) if device else {}
            made[sender, receiver] = self.group(f"{purpose}.channel.{sender}to{receiver}", ends, **options)
        return made


def channel_options(device: Device) -> dict[str, Any]:
    """new_group's options for a channel: over NCCL few thread blocks, for a waiting receive keeps them from computing,
    in a stream that goes first; and no gloo beside it, whose sockets nobody would use.
    """
    if device.backend != "nccl":
        return {}
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.min_ctas, options.config.max_ctas = 1, 4
    return {"backend": "nccl", "pg_options": options}


def wait_for_workers(group: dist.ProcessGroup) -> None:
    """Let `group`'s collectives wait as long as another rank works: who hangs is for the watchdog alone to say."""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=LONGEST_SECONDS), group)
