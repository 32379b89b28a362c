"""The barrier at which instances stop to migrate samples, and the migration itself (paper section 4.2).

The first barrier is a collective of all ranks and exchanges finished samples too. A later one is among the instances
that still decode and goes through the store, so that no rank that scores has a part in it; an instance that has ended
its last sample says so there beforehand and is not waited for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfuse.decisions.migration import MigrationPlan, MoveCost, MoveMode, SequenceState, plan_meeting, transfer_order
from rlhfuse.decisions.placement import Placement
from rlhfuse.fusion.inter.report import PairMigration
from rlhfuse.gen.engine import Engine
from rlhfuse.gen.migration.peer_transfer import HeadPlan, receive_sequences, send_sequences
from rlhfuse.parallel.collectives import all_gather_bytes
from rlhfuse.ppo.rollout import Rollout, pack_rollouts, unpack_rollouts


@dataclass(frozen=True)
class FusionLimits:
    """What decides m and how samples move (BS_max, M, C of paper section 4.2), and the size of a scoring pack."""

    bs_max: int
    sample_kv_bytes: float  # M
    capacity_kv_bytes: float  # C
    block_tokens: int
    move_cost: MoveCost
    score_tokens: int  # token budget of one scoring pack


@dataclass(frozen=True)
class MigrationBarrier:
    """The instances that met, their unfinished samples, and the free KV blocks of every instance (0 of the absent)."""

    decoding: tuple[int, ...]
    states: tuple[SequenceState, ...]
    free_blocks: tuple[int, ...]

    @staticmethod
    def of(states: Mapping[int, bytes], instances: int) -> MigrationBarrier:
        """From what each instance that was asked encoded; those that had left count as absent."""
        decoded = {instance: json.loads(state) for instance, state in sorted(states.items())}
        return MigrationBarrier(
            decoding=tuple(instance for instance, state in decoded.items() if not state["left"]),
            states=tuple(
                SequenceState(sample, instance, tokens, kv, tuple(shared))
                for instance, state in decoded.items()
                for sample, tokens, kv, shared in state["sequences"]
            ),
            free_blocks=tuple(decoded[i]["free_blocks"] if i in decoded else 0 for i in range(instances)),
        )

    def plan(self, trigger: int, limits: FusionLimits) -> MigrationPlan | None:
        """Whom to free at R_t = `trigger`, if anybody; the same on every rank."""
        return plan_meeting(
            trigger,
            self.states,
            self.decoding,
            self.free_blocks,
            limits.block_tokens,
            limits.bs_max,
            limits.sample_kv_bytes,
            limits.capacity_kv_bytes,
            limits.move_cost,
        )

    def bytes_needed(self, plan: MigrationPlan, block_tokens: int, block_bytes: int) -> int:
        """Bytes of the KV blocks that the plan moves, a block that samples share once for a pair of instances."""
        states = {state.sample_id: state for state in self.states}
        blocks, sent = 0, set()
        for move in plan.moves:
            if move.mode == "kv":
                shared = {(move.source, move.destination, block) for block in states[move.sample_id].shared_blocks}
                blocks += -(-move.kv_tokens // block_tokens) - len(shared & sent)
                sent |= shared
        return blocks * block_bytes


def encode_state(engine: Engine, left: bool = False) -> bytes:
    """What an instance brings to a barrier; `left`: it is not there, for all of its samples are done."""
    sequences = [[s.sample_id, s.total_tokens, s.kv_tokens, list(s.shared_blocks)] for s in engine.unfinished()]
    return json.dumps({"sequences": sequences, "free_blocks": engine.free_blocks, "left": left}).encode()


def gather_states(
    placement: Placement, engine: Engine, finished: Sequence[Rollout], is_leader: bool
) -> tuple[list[Rollout], MigrationBarrier]:
    """The first barrier, a collective: all finished samples by id, and what is unfinished; the same on every rank."""
    states = all_gather_bytes(encode_state(engine) if is_leader else b"")
    samples = all_gather_bytes(pack_rollouts(finished) if is_leader else b"")
    everywhere = sorted((r for data in samples for r in unpack_rollouts(data)), key=lambda r: r.sample_id)
    by_instance = {instance: states[ranks[0]] for instance, ranks in enumerate(placement.instances)}
    return everywhere, MigrationBarrier.of(by_instance, len(by_instance))


def execute_migration(
    number: int, plan: MigrationPlan, placement: Placement, rank: int, engine: Engine, bucket_bytes: int
) -> list[PairMigration]:
    """This rank's part of the moves of barrier `number`; afterwards every sample is in the engine that the plan names.

    `bucket_bytes`: most memory that moving keys and values takes here beside the caches. Waits for the partner's
    ranks only: each instance goes through its pairs in the one order of `transfer_order`. Raises RuntimeError where a
    destination refuses samples.
    """
    instance = placement.instance_of(rank)
    pairs = []
    for source, destination in transfer_order(plan):
        if instance in (source, destination):
            start = time.perf_counter()
            kv_bytes = _migrate_pair(plan, source, destination, placement, rank, engine, bucket_bytes)
            pairs.append(PairMigration(number, source, destination, kv_bytes, time.perf_counter() - start))
    return pairs


def _migrate_pair(
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
        receive_sequences(engine, heads, rank, bucket_bytes=bucket_bytes)
        return 0
    modes: dict[int, MoveMode] = {
        move.sample_id: move.mode for move in plan.moves_from(source) if move.destination == destination
    }
    with engine.export_sequences(modes, modes) as transfer:
        mine = send_sequences(transfer, heads, rank, bucket_bytes=bucket_bytes)
    return mine * len(sides[0])  # each rank of an instance holds an equal share of the heads
