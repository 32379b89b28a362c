"""Which ranks hold which pipeline stage when actor and critic train on the same ranks.

A *node* is a group of max(tp) ranks, so that a stage of either model fills one: the model with the
smaller tp gets every s = tp1/tp2 consecutive stages merged into one. N = lcm(P1, P2) nodes make a
*fused group* with K1 = N/P1 actor pipelines and K2 = N/P2 critic pipelines (K1 and K2 are coprime);
dp = K x replicas, and the same schedule runs on every replica. Each pipeline is a contiguous block
of ranks (order: tensor, pipeline, data) and the critic's blocks are listed backwards:

    ranks          0          1          2          3        actor d1t1p4, critic d2t1p2
    actor        stage 0    stage 1    stage 2    stage 3
    critic     .0 stage 1 .0 stage 0 .1 stage 1 .1 stage 0   gradients meet over {1,3} and {0,2}

Knows nothing of times, micro-batches or process groups. Paper: section 5.2, problem transformation
(where it says tp2/s stages it means pp2/s).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Mapping

from rlhfuse.errors import InputError
from rlhfuse.spec import ParallelLayout

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
    def merged_stages(self) -> int:
        return self.layout.pp // self.merge

    @property
    def names(self) -> tuple[str, ...]:
        """Pipeline names: the model's own when it has one pipeline, else model.0, model.1, ..."""
        if self.pipelines == 1:
            return (self.model,)
        return tuple(f"{self.model}.{k}" for k in range(self.pipelines))

    def placement(self, k: int) -> tuple[int, ...]:
        """Node of each merged stage of pipeline `k`."""
        block = range(k * self.merged_stages, (k + 1) * self.merged_stages)
        return tuple(reversed(block)) if self.reverse else tuple(block)

    def substages(self, node_first_rank: int) -> tuple[tuple[int, ...], ...]:
        """Ranks of the `merge` sub-stages on the node that begins at `node_first_rank`."""
        starts = range(node_first_rank, node_first_rank + self.merge * self.layout.tp, self.layout.tp)
        ordered = reversed(starts) if self.reverse else starts
        return tuple(tuple(range(start, start + self.layout.tp)) for start in ordered)


@dataclass(frozen=True)
class FusedShape:
    """The arithmetic of a fused pair: nodes of one group, ranks of one node, replicas, both shares."""

    nodes: int
    node_ranks: int
    replicas: int
    shares: tuple[ModelShare, ModelShare]


def fused_shape(actor: ParallelLayout, critic: ParallelLayout) -> FusedShape:
    """Group two training layouts over the same ranks. Raises InputError with the division that fails."""
    for task, layout in (("actor_train", actor), ("critic_train", critic)):
        if layout.ranks and layout.ranks[0] != 0:
            raise InputError(f"{task}={layout}: a fused pair starts at rank 0; drop the @{layout.ranks[0]}-...")
    if actor.size != critic.size:
        raise InputError(
            f"actor_train={actor} uses {actor.size} ranks but critic_train={critic} uses {critic.size}; "
            "make dp*tp*pp equal"
        )
    node_ranks = max(actor.tp, critic.tp)
    merges = []
    for task, layout in (("actor_train", actor), ("critic_train", critic)):
        merge, rest = divmod(node_ranks, layout.tp)
        if rest:
            raise InputError(f"tp of {actor} and {critic}: {node_ranks} % {layout.tp} = {rest}, must be 0")
        if layout.pp % merge:
            raise InputError(
                f"{task}={layout}: pp({layout.pp}) % s({merge}) = {layout.pp % merge}, must be 0, where "
                f"s = {node_ranks}/{layout.tp} stages are merged to match the other model's tp"
            )
        merges.append(merge)
    depths = (actor.pp // merges[0], critic.pp // merges[1])
    nodes = math.lcm(*depths)
    shares = (
        ModelShare("actor", actor, merges[0], nodes // depths[0], reverse=False),
        ModelShare("critic", critic, merges[1], nodes // depths[1], reverse=True),
    )
    return FusedShape(nodes, node_ranks, actor.size // (nodes * node_ranks), shares)


@dataclass(frozen=True)
class FusedRanks:
    """`replicas[r][pipeline][merged stage][sub-stage]` is the tuple of global ranks (tensor order).

    A pipeline's real stages are its merged stages' sub-stages in order: `stages` flattens them.
    """

    shape: FusedShape
    replicas: tuple[Mapping[str, Stages], ...]

    def merge(self, pipeline: str) -> int:
        """Sub-stages per merged stage of `pipeline`."""
        return len(self.replicas[0][pipeline][0])

    def stages(self, replica: int, pipeline: str) -> tuple[tuple[int, ...], ...]:
        """Ranks (tensor order) of each real pipeline stage of one pipeline."""
        return tuple(ranks for merged in self.replicas[replica][pipeline] for ranks in merged)

    def pipelines(self, model: str) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """All pipelines of `model` ("actor" or "critic") in data-parallel order: [dp rank][stage][tp rank]."""
        names = self._share(model).names
        return tuple(self.stages(r, name) for r in range(len(self.replicas)) for name in names)

    def dp_groups(self, model: str) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Ranks that hold the same weights of `model`, in data-parallel order: [stage][tp rank][dp rank]."""
        pipelines = self.pipelines(model)
        layout = self._share(model).layout
        return tuple(
            tuple(tuple(pipe[stage][t] for pipe in pipelines) for t in range(layout.tp)) for stage in range(layout.pp)
        )

    def locate(self, model: str, rank: int) -> tuple[int, int, int]:
        """(dp rank, stage, tp rank) of a global rank in `model`. Raises InputError outside the layout."""
        for dp_rank, pipe in enumerate(self.pipelines(model)):
            for stage, ranks in enumerate(pipe):
                if rank in ranks:
                    return dp_rank, stage, ranks.index(rank)
        raise InputError(f"rank {rank} is not in {model}'s layout {self._share(model).layout}")

    def replica_of(self, rank: int) -> int:
        """The replica (fused group) that a global rank belongs to."""
        return rank // (self.shape.nodes * self.shape.node_ranks)

    def pipeline_of(self, model: str, rank: int) -> str:
        """Name of the pipeline of `model` that a global rank belongs to, as schedules spell it."""
        names = self._share(model).names
        return names[self.locate(model, rank)[0] % len(names)]

    def _share(self, model: str) -> ModelShare:
        for share in self.shape.shares:
            if share.model == model:
                return share
        raise InputError(f"model {model!r} is not in this fused pair; use actor or critic")


def rank_map(actor: ParallelLayout, critic: ParallelLayout) -> FusedRanks:
    """Ranks of every stage of every pipeline, from 0 on. Raises InputError as `fused_shape` does."""
    shape = fused_shape(actor, critic)
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
