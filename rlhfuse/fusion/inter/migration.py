"""The barrier at which instances stop to migrate samples, and the migration itself (paper section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhfuse.base.clock import Clock
from rlhfuse.fusion.inter.rank_place import RankPlace
from rlhfuse.fusion.inter.report import PairMigration
from rlhfuse.gen.engine import Engine
from rlhfuse.gen.migration.peer_transfer import HeadPlan
from rlhfuse.ppo.rollout import Rollout
from rlhfuse.tasks.migration import MigrationPlan, UnfinishedSample, transfer_order


@dataclass(frozen=True)
class MigrationBarrier:
    """The unfinished samples of all instances, the free KV blocks of each, and the ids of all that it began."""

    states: tuple[UnfinishedSample, ...]
    free_blocks: tuple[int, ...]
    began: tuple[tuple[int, ...], ...] = ()

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


def gather_states(
    place: RankPlace, engine: Engine, finished: Sequence[Rollout], began: Sequence[int]
) -> tuple[list[Rollout], MigrationBarrier]:
    """The barrier, a collective: all finished samples by id, and what is unfinished; the same on every rank."""
    states = engine.unfinished(place.instance)
    own = (states, engine.free_blocks, finished, tuple(began)) if place.decoders.is_leader else ([], 0, [], ())
    everyone = place.gather(own)
    leaders = [everyone[ranks[0]] for ranks in place.placement.instances]
    samples = sorted((rollout for _, _, part, _ in leaders for rollout in part), key=lambda r: r.sample_id)
    unfinished = tuple(state for part, *_ in leaders for state in part)
    _, free_blocks, _, begun = zip(*leaders)
    return samples, MigrationBarrier(unfinished, free_blocks, begun)


def execute_migration(
    plan: MigrationPlan,
    place: RankPlace,
    engine: Engine,
    bucket_bytes: int,
    clock: Clock = Clock(),
) -> list[PairMigration]:
    """This rank's part of the moves; afterwards every sample is in the engine that the plan names.

    `bucket_bytes`: most memory that moving keys and values takes here beside the caches. Waits for the partner's
    ranks only, in the one order of `transfer_order`. Raises RuntimeError where a destination refuses samples.
    """
    instance, pairs = place.instance, []
    for source, destination in transfer_order(plan):
        if instance not in (source, destination):
            continue
        sources, destinations = (place.placement.instances[end] for end in (source, destination))
        heads = HeadPlan.between(sources, destinations, engine.spec.kv_heads)
        moves = [move for move in plan.moves_from(source) if move.destination == destination]
        kv_bytes, kv_tokens = 0, sum(move.kv_tokens for move in moves if move.mode == "kv")
        with clock.work(price=("migration", kv_tokens)) as moving:
            if instance == destination:
                place.receive(engine, heads, bucket_bytes)
            else:
                ids = [move.sample_id for move in moves]
                with engine.export_sequences(ids, {move.sample_id: move.mode for move in moves}) as transfer:
                    sent = place.send(transfer, heads, bucket_bytes)
                kv_bytes = sent * len(sources)  # each rank of an instance holds an equal share of the heads
        pairs.append(PairMigration(source, destination, kv_bytes, moving.seconds))
    return pairs
