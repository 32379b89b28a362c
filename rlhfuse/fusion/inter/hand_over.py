"""Carrying out a migration plan: each pair of instances hands its samples over in turn, in one order for all.

Knows nothing of how the plan was made, nor of what freed instances do next.
"""

from __future__ import annotations

import time

from rlhfuse.decisions.migration import MigrationPlan, transfer_order
from rlhfuse.decisions.placement import Placement
from rlhfuse.fusion.inter.report import HandOver
from rlhfuse.gen.engine import Engine
from rlhfuse.gen.migration.transfer import HeadPlan, receive_shipment, send_shipment


def hand_over(
    meeting: int, plan: MigrationPlan, placement: Placement, rank: int, engine: Engine, bucket_bytes: int
) -> list[HandOver]:
    """This rank's part of the moves; afterwards every sample is in the engine that the plan names.

    `bucket_bytes`: most memory that moving keys and values takes here beside the caches. Waits for the partner's
    ranks only. Raises RuntimeError where a destination refuses samples.
    """
    instance = placement.instance_of(rank)
    done = []
    for source, destination in transfer_order(plan):
        if instance in (source, destination):
            start = time.perf_counter()
            sent = _move_pair(plan, source, destination, placement, rank, engine, bucket_bytes)
            done.append(HandOver(meeting, source, destination, sent, time.perf_counter() - start))
    return done


def _move_pair(
    plan: MigrationPlan,
    source: int,
    destination: int,
    placement: Placement,
    rank: int,
    engine: Engine,
    bucket_bytes: int,
) -> int:
    """Returns bytes of keys and values that all ranks of the source sent; 0 at the destination."""
    sides = placement.instances[source], placement.instances[destination]
    heads = HeadPlan.between(*sides, engine.spec.kv_heads)
    if rank in sides[1]:
        receive_shipment(engine, heads, rank, bucket_bytes=bucket_bytes)
        return 0
    modes = {move.sample_id: move.mode for move in plan.moves_from(source) if move.destination == destination}
    with engine.export_sequences(modes, modes) as shipment:
        mine = send_shipment(shipment, heads, rank, bucket_bytes=bucket_bytes)
    return mine * len(sides[0])  # each rank of an instance holds an equal share of the heads
