"""What a move of weights between two layouts asks of every rank, without naming its transfers one by one.

`plan_moves` (weight_moves.py) is replayed on numbers: parts of weights in the same order, and the ranks that hold or
need a part as ascending lists, one for each place of a pipeline and tensor rank. Bytes and seconds are exactly its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numba import njit

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.decisions.shards import Cells, Weight, weights_by_stage
from rlhfuse.decisions.weight_moves import Traffic, move_rates
from rlhfuse.schedule.ir.ranks import plain_cells

STAYS, WITHIN, ACROSS = range(3)
SENT, RECEIVED = range(2)


@dataclass(frozen=True)
class MoveLoad:
    """Bytes of a move: `bytes`[STAYS, WITHIN a node or ACROSS, SENT or RECEIVED, rank].

    `minimum_across`: what no plan can avoid sending between nodes. `fullest`: what a rank wants, at most.
    """

    bytes: np.ndarray
    minimum_across: int
    fullest: int

    @staticmethod
    @lru_cache(maxsize=256)  # tables of layouts have the layout of one model in common
    def of(
        spec: ModelSpec,
        source: ParallelLayout,
        cells: Cells,
        target: ParallelLayout,
        element_bytes: int,
        devices_per_node: int,
        scalar_head: bool = False,
    ) -> MoveLoad:
        """Load of moving a model from `source`, whose ranks are `cells`, to `target` in plain order.

        Raises ValueError naming the weight of which no source has a part that is needed.
        """
        wanted = plain_cells(target)
        world = 1 + max(int(np.max(cells)), int(np.max(wanted)))
        has, wants = (_Lists.of(side, devices_per_node, world) for side in (cells, wanted))
        weights = [weights_by_stage(spec, layout, element_bytes, scalar_head) for layout in (source, target)]
        parts = _parts(weights[0], weights[1], source, target)
        moved = _replay(parts, has.ranks, has.bounds, wants.ranks, wants.bounds, world)
        fullest = max(
            sum(_held_bytes(weight, target.tp) for stage in weights[1][place :: target.pp] for weight in stage)
            for place in range(target.pp)
        )
        return MoveLoad(moved, _minimum_across(parts, has, wants), fullest)

    def seconds(self, hardware: HardwareSpec) -> float:
        """Until the busiest rank is done, as `weight_moves.move_seconds` has it."""
        busy = np.zeros(self.bytes.shape[-1])
        for kind, rate in zip(self.bytes.max(axis=1), move_rates(hardware).values()):
            busy += kind / rate
        return float(busy.max())

    def host_copy_seconds(self, hardware: HardwareSpec) -> float:
        """What was received, on to host memory."""
        return self.fullest / hardware.host_bandwidth

    @property
    def traffic(self) -> Traffic:
        """As `Traffic.of` counts it."""
        stays, within, across = self.bytes[:, RECEIVED].sum(axis=1).tolist()
        sender, receiver = (self.bytes[WITHIN] + self.bytes[ACROSS]).max(axis=1).tolist()
        return Traffic(stays, within, across, self.minimum_across, sender, receiver)


@dataclass(frozen=True)
class _Lists:
    """Ranks of a layout in ascending lists: of each place of a pipeline all, then those of each tensor rank.

    Those of a list on a node are `ranks[bounds[list, node] : bounds[list, node + 1]]`.
    """

    ranks: np.ndarray
    bounds: np.ndarray

    @staticmethod
    def of(cells: Cells, devices_per_node: int, world: int) -> _Lists:
        grid = np.asarray(cells, np.int64).transpose(1, 2, 0)  # [place, tensor rank, pipeline]
        places, tp, pipelines = grid.shape
        rows = (np.sort(grid.reshape(places, 1, -1), axis=2), np.sort(grid, axis=2))
        edges = np.arange(0, world + devices_per_node, devices_per_node)
        before = [np.array([[np.searchsorted(row, edges) for row in place] for place in side]) for side in rows]
        sizes = np.array([tp * pipelines, *[pipelines] * tp] * places)
        bounds = np.concatenate(before, axis=1).reshape(len(sizes), -1) + (np.cumsum(sizes) - sizes)[:, None]
        return _Lists(np.concatenate([side.reshape(places, -1) for side in rows], axis=1).reshape(-1), bounds)

    def on_node(self) -> np.ndarray:
        """Whether a list has ranks on a node: [list, node]."""
        return np.diff(self.bounds) > 0


def _held_bytes(weight: Weight, tp: int) -> int:
    """What one of `tp` ranks holds of it."""
    return sum(stop - start for start, stop in weight.segments(0, tp)) * weight.row_bytes


def _parts(
    has: list[list[Weight]], wants: list[list[Weight]], source: ParallelLayout, target: ParallelLayout
) -> np.ndarray:
    """Every part in the order of `plan_moves`: (first index, bytes, list of its holders, list of its needers)."""
    place_of = {weight.name: stage % source.pp for stage, weights in enumerate(has) for weight in weights}
    needed = [(weight, stage % target.pp) for stage, weights in enumerate(wants) for weight in weights]
    shapes: dict[tuple, tuple[int, np.ndarray]] = {}  # weights of one shape are cut alike
    ordered = []
    for weight, place in needed:
        if weight[1:] not in shapes:
            shapes[weight[1:]] = _held_bytes(weight, target.tp), _cuts(weight, source.tp, target.tp)
        if weight.name not in place_of:
            raise ValueError(f"no rank has {weight.name}")
        held, cuts = shapes[weight[1:]]
        ordered.append((-held, weight.name, place_of[weight.name], place, cuts))
    ordered.sort(key=lambda row: row[:2])
    parts = np.concatenate([cuts for *_, cuts in ordered])
    counts = [len(cuts) for *_, cuts in ordered]
    parts[:, 2] += np.repeat([row[2] * (source.tp + 1) for row in ordered], counts)
    parts[:, 3] += np.repeat([row[3] * (target.tp + 1) for row in ordered], counts)
    return parts


def _cuts(weight: Weight, source_tp: int, target_tp: int) -> np.ndarray:
    """Parts of one weight between all borders, their lists those of place 0."""
    sides = [
        [(start, stop, 1 + t) for t in range(tp) for start, stop in weight.segments(t, tp)] if weight.cut
        else [(*weight.segments(0, 1)[0], 0)]
        for tp in (source_tp, target_tp)
    ]  # fmt: skip
    borders = sorted({border for side in sides for start, stop, _ in side for border in (start, stop)})
    rows = []
    for start, stop in zip(borders, borders[1:]):
        holders, needers = ([t for first, end, t in side if first <= start < end] for side in sides)
        if needers and not holders:
            raise ValueError(f"no rank has {weight.name}[{start}:{stop}]")
        rows += [(start, (stop - start) * weight.row_bytes, holders[0], t) for t in needers]
    return np.array(rows, np.int64)


def _minimum_across(parts: np.ndarray, has: _Lists, wants: _Lists) -> int:
    holding, needing = has.on_node(), wants.on_node()
    pairs, which = np.unique(parts[:, 2] * len(needing) + parts[:, 3], return_inverse=True)
    lacking = (needing[pairs % len(needing)] & ~holding[pairs // len(needing)]).sum(axis=1)
    return int((lacking[which] * parts[:, 1]).sum())


@njit(cache=True)
def _replay(
    parts: np.ndarray,
    holders: np.ndarray,
    held_on: np.ndarray,
    needers: np.ndarray,
    needed_on: np.ndarray,
    world: int,
) -> np.ndarray:
    """`plan_moves` with its choices; see there. `holders` and `held_on`, `needers` and `needed_on` are _Lists."""
    moved = np.zeros((3, 2, world), np.int64)
    sent_within, sent_across, received_across = moved[WITHIN, SENT], moved[ACROSS, SENT], moved[ACROSS, RECEIVED]
    nodes = held_on.shape[1] - 1
    for part in range(len(parts)):
        start, size, source, target = parts[part]
        for node in range(nodes):
            low, high = needed_on[target, node], needed_on[target, node + 1]
            if low == high:
                continue
            near, end = held_on[source, node], held_on[source, node + 1]
            if near == end:
                far = _least(sent_across, holders, held_on[source, 0], int(held_on[source, nodes]), node)
                first = _least(received_across, needers, low, high, start)
                sent_across[far] += size
                received_across[first] += size
                for i in range(low, high):
                    if needers[i] != first:
                        sent_within[first] += size
                        moved[WITHIN, RECEIVED, needers[i]] += size
                continue
            own = near
            for i in range(low, high):
                rank = needers[i]
                while own < end and holders[own] < rank:
                    own += 1
                if own < end and holders[own] == rank:
                    moved[STAYS, SENT, rank] += size
                    moved[STAYS, RECEIVED, rank] += size
                else:
                    sent_within[_least(sent_within, holders, near, end, rank)] += size
                    moved[WITHIN, RECEIVED, rank] += size
    return moved


@njit(cache=True)
def _least(load: np.ndarray, ranks: np.ndarray, low: int, high: int, turn: int) -> int:
    """The least loaded of ranks[low:high]; ties go round with `turn`."""
    around = ranks[high - 1] + 1
    turn %= around
    best, least, after = -1, 0, 0
    for i in range(low, high):
        rank = ranks[i]
        if best < 0 or load[rank] <= least:
            turned = rank - turn if rank >= turn else rank - turn + around
            if best < 0 or load[rank] < least or turned < after:
                best, least, after = rank, load[rank], turned
    return best
