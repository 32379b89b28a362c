"""Which ranks hold which pipeline stage when several models train on them (docs/explanation/decisions.md shows it).

A *node* is a group of max(tp) ranks; a model with a smaller tp has s = max(tp)/tp consecutive stages merged on one. The
lcm of all depths (P = pp/s) nodes make a *fused group* with K = nodes/P pipelines of each model, in blocks of ranks
(order: tensor, pipeline, data); every second model's blocks are listed backwards. dp = K x replicas, and the same
schedule runs on every replica. Paper: section 5.2, problem transformation (where it says tp2/s stages it means pp2/s).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.base.remembered import remembered

Stages = tuple[tuple[tuple[int, ...], ...], ...]  # [merged stage][sub-stage][tp rank] -> global rank


@dataclass(frozen=True)
class ModelShare:
    """One model's part in a fused group."""

    model: str
    layout: ParallelLayout
    merge: int  # sub-stages per merged stage (s)
    pipelines: int  # in one fused group (K)
    reverse: bool

    @property
    def depth(self) -> int:
        """Nodes that one pipeline covers."""
        return self.layout.pp // self.merge

    @property
    def names(self) -> tuple[str, ...]:
        """Pipeline names: the model's own when it has one pipeline, else model.0, model.1, ..."""
        if self.pipelines == 1:
            return (self.model,)
        return tuple(f"{self.model}.{k}" for k in range(self.pipelines))

    def placement(self, k: int) -> tuple[int, ...]:
        """Node of each merged stage of pipeline `k`."""
        block = tuple(range(k * self.depth, (k + 1) * self.depth))
        return (block[::-1] if self.reverse else block) * self.layout.chunks

    def substages(self, node_first_rank: int) -> tuple[tuple[int, ...], ...]:
        """Ranks of the `merge` sub-stages on the node that begins at `node_first_rank`."""
        starts = range(node_first_rank, node_first_rank + self.merge * self.layout.tp, self.layout.tp)
        ordered = reversed(starts) if self.reverse else starts
        return tuple(tuple(range(start, start + self.layout.tp)) for start in ordered)


@dataclass(frozen=True)
class FusedShape:
    """The arithmetic of a fused group: nodes of one group, ranks of one node, replicas, every model's share."""

    nodes: int
    node_ranks: int
    replicas: int
    shares: tuple[ModelShare, ...]

    @property
    def layouts(self) -> dict[str, ParallelLayout]:
        """Layout of every model, in order."""
        return {share.model: share.layout for share in self.shares}

    def share(self, model: str) -> ModelShare:
        """The share of `model`. Raises InputError listing the known models."""
        for share in self.shares:
            if share.model == model:
                return share
        raise InputError(f"model {model!r} is not in this fused group; it has {', '.join(self.layouts)}")

    def __str__(self) -> str:
        return " with ".join(f"{model} {layout}" for model, layout in self.layouts.items())


def fused_shape(layouts: Mapping[str, ParallelLayout], alternate: bool = True) -> FusedShape:
    """Group the training layouts of any number of models (name -> layout, in order) over the same ranks.

    `alternate` False lets all pipelines run in one direction, as time-sharing wants it. Raises InputError with the
    division that fails.
    """
    if not layouts:
        raise InputError("no model is given; a fused group needs at least one layout")
    for model, layout in layouts.items():
        if layout.ranks and layout.ranks[0] != 0:
            raise InputError(f"{model}_train={layout}: a fused group starts at rank 0; drop the @{layout.ranks[0]}-...")
    first, leader = next(iter(layouts.items()))
    for model, layout in layouts.items():
        if layout.size != leader.size:
            raise InputError(
                f"{first}_train={leader} uses {leader.size} ranks but {model}_train={layout} uses {layout.size}; "
                "make dp*tp*pp equal"
            )
    node_ranks = max(layout.tp for layout in layouts.values())
    merges = {model: _merge(model, layouts, node_ranks) for model in layouts}
    nodes = math.lcm(*(layout.pp // merges[model] for model, layout in layouts.items()))
    shares = tuple(
        ModelShare(
            model, layout, merges[model], nodes * merges[model] // layout.pp, reverse=alternate and number % 2 == 1
        )
        for number, (model, layout) in enumerate(layouts.items())
    )
    return FusedShape(nodes, node_ranks, leader.size // (nodes * node_ranks), shares)


def _merge(model: str, layouts: Mapping[str, ParallelLayout], node_ranks: int) -> int:
    """Stages of `model` that share a node."""
    layout = layouts[model]
    merge, rest = divmod(node_ranks, layout.tp)
    if rest:
        every = " and ".join(map(str, layouts.values()))
        raise InputError(f"tp of {every}: {node_ranks} % {layout.tp} = {rest}, must be 0")
    if layout.pp % merge:
        raise InputError(
            f"{model}_train={layout}: pp({layout.pp}) % s({merge}) = {layout.pp % merge}, must be 0, where "
            f"s = {node_ranks}/{layout.tp} stages are merged to match the other model's tp"
        )
    return merge


@dataclass(frozen=True)
class FusedRanks:
    """`replicas[r][pipeline][merged stage][sub-stage]` is the tuple of global ranks (tensor order).

    A pipeline's real stages are its merged stages' sub-stages in order: `stages` flattens them.
    """

    shape: FusedShape
    replicas: tuple[Mapping[str, Stages], ...]

    @property
    def size(self) -> int:
        return self.shape.nodes * self.shape.node_ranks * self.shape.replicas

    def merge(self, pipeline: str) -> int:
        """Sub-stages per merged stage of `pipeline`."""
        return len(self.replicas[0][pipeline][0])

    @remembered
    def stages(self, replica: int, pipeline: str) -> tuple[tuple[int, ...], ...]:
        """Ranks (tensor order) of each real pipeline stage of one pipeline; interleaved ones name a rank v times."""
        return tuple(ranks for merged in self.replicas[replica][pipeline] for ranks in merged)

    def pipelines(self, model: str) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """All pipelines of `model` in data-parallel order: [dp rank][position][tp rank]; stage s is at s % pp."""
        share = self.shape.share(model)
        return tuple(self.stages(r, name)[: share.layout.pp] for r in range(len(self.replicas)) for name in share.names)

    def dp_groups(self, model: str) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Ranks that hold the same weights of `model`, in data-parallel order: [position][tp rank][dp rank]."""
        pipelines = self.pipelines(model)
        layout = self.shape.share(model).layout
        return tuple(
            tuple(tuple(pipe[position][t] for pipe in pipelines) for t in range(layout.tp))
            for position in range(layout.pp)
        )

    def locate(self, model: str, rank: int) -> tuple[int, int, int]:
        """(dp rank, position, tp rank) of a global rank in `model`. Raises InputError outside the layout."""
        if rank not in (places := self._places(model)):
            raise InputError(f"rank {rank} is not in {model}'s layout {self.shape.share(model).layout}")
        return places[rank]

    def stages_of(self, model: str, rank: int) -> tuple[int, ...]:
        """Real stage numbers of `model` that a global rank holds, lowest first: one, or one per chunk."""
        layout = self.shape.share(model).layout
        return tuple(range(self.locate(model, rank)[1], layout.stages, layout.pp))

    def replica_of(self, rank: int) -> int:
        """The replica (fused group) that a global rank belongs to."""
        return rank // (self.shape.nodes * self.shape.node_ranks)

    def node_of(self, rank: int) -> int:
        """The node of the schedule that a global rank belongs to."""
        return rank // self.shape.node_ranks % self.shape.nodes

    def pipeline_of(self, model: str, rank: int) -> str:
        """Name of the pipeline of `model` that a global rank belongs to, as schedules spell it."""
        names = self.shape.share(model).names
        return names[self.locate(model, rank)[0] % len(names)]

    @remembered
    def _places(self, model: str) -> dict[int, tuple[int, int, int]]:
        return {
            rank: (dp_rank, position, t)
            for dp_rank, pipe in enumerate(self.pipelines(model))
            for position, ranks in enumerate(pipe)
            for t, rank in enumerate(ranks)
        }


def plain_cells(layout: ParallelLayout) -> Stages:
    """[pipeline][position][tp rank] -> global rank, in Megatron's order: tensor, then data, then pipeline."""
    first = layout.ranks[0] if layout.ranks else 0
    return tuple(
        tuple(tuple(first + t + layout.tp * (d + layout.dp * p) for t in range(layout.tp)) for p in range(layout.pp))
        for d in range(layout.dp)
    )


def neighbour_pairs(cells: Stages, layout: ParallelLayout) -> list[tuple[int, int]]:
    """(sender, receiver) of every transfer between neighbouring stages of pipelines, which are on `cells`, both
    directions."""
    pairs = []
    for places in cells:
        for stage in range(layout.stages - 1):
            for a, b in zip(places[stage % layout.pp], places[(stage + 1) % layout.pp]):
                pairs += [(a, b), (b, a)]
    return pairs


def rank_map(layouts: Mapping[str, ParallelLayout], alternate: bool = True) -> FusedRanks:
    """Ranks of every stage of every pipeline, from 0 on. Raises InputError as `fused_shape` does."""
    shape = fused_shape(layouts, alternate)
    replicas = []
    for replica in range(shape.replicas):
        first = replica * shape.nodes * shape.node_ranks
        replicas.append(
            {
                name: tuple(share.substages(first + node * shape.node_ranks) for node in share.placement(k))
                for share in shape.shares
                for k, name in enumerate(share.names)
            }
        )
    return FusedRanks(shape, tuple(replicas))
