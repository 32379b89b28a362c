"""What instances exchange when they stop to migrate, and the plan that each of them makes of it.

The first meeting is everybody's, by a collective, and finished samples are exchanged too. A later one is among the
instances that still decode; it goes through the store, so that no rank that scores has a part in it. An instance
whose samples are all done leaves word for the next meeting that it has nothing, and is not waited for.

Knows nothing of when to meet, and of how a plan is carried out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfuse.decisions.migration import MigrationPlan, SequenceState, plan_meeting
from rlhfuse.decisions.placement import Placement
from rlhfuse.fusion.inter.request import FusionLimits
from rlhfuse.gen.engine import Engine
from rlhfuse.parallel.collectives import all_gather_bytes
from rlhfuse.ppo.rollout import Rollout, pack_rollouts, unpack_rollouts


@dataclass(frozen=True)
class Meeting:
    """Who met, the unfinished samples of all of them, and the free KV blocks of every instance (0 of the absent)."""

    among: tuple[int, ...]
    states: tuple[SequenceState, ...]
    free_blocks: tuple[int, ...]

    @staticmethod
    def of(notes: Mapping[int, bytes], instances: int) -> Meeting:
        """From the notes of the instances that were asked; those that were done before count as absent."""
        told = {instance: json.loads(note) for instance, note in sorted(notes.items())}
        free = [told[i]["free"] if i in told else 0 for i in range(instances)]
        states = [
            SequenceState(sample, instance, tokens, kv, tuple(shared))
            for instance, one in told.items()
            for sample, tokens, kv, shared in one["states"]
        ]
        among = tuple(instance for instance, one in told.items() if not one["left"])
        return Meeting(among, tuple(states), tuple(free))

    def plan(self, trigger: int, limits: FusionLimits) -> MigrationPlan | None:
        """Whom to free at R_t = `trigger`, if anybody; by `plan_meeting`, which has the rule for meetings in words."""
        return plan_meeting(
            trigger,
            self.states,
            self.among,
            self.free_blocks,
            limits.block_tokens,
            limits.bs_max,
            limits.sample_kv_bytes,
            limits.capacity_kv_bytes,
            limits.move_cost,
        )

    def bytes_needed(self, plan: MigrationPlan, block_tokens: int, block_bytes: int) -> int:
        """Bytes of the KV blocks that the plan moves, a block that samples share once for a pair of instances."""
        of = {state.sample_id: state for state in self.states}
        blocks, sent = 0, set()
        for move in plan.moves:
            if move.mode == "kv":
                shared = {(move.source, move.destination, name) for name in of[move.sample_id].shared_blocks}
                blocks += -(-move.kv_tokens // block_tokens) - len(shared & sent)
                sent |= shared
        return blocks * block_bytes


def note_of(engine: Engine, left: bool = False) -> bytes:
    """What an instance brings; `left`: it is not there, for all of its samples are done."""
    states = [[s.sample_id, s.total_tokens, s.kv_tokens, list(s.shared_blocks)] for s in engine.unfinished()]
    return json.dumps({"states": states, "free": engine.free_blocks, "left": left}).encode()


def meet_all(
    placement: Placement, engine: Engine, done: Sequence[Rollout], leads: bool
) -> tuple[list[Rollout], Meeting]:
    """The first meeting, a collective: all finished samples by id, and what is unfinished; the same on every rank."""
    notes = all_gather_bytes(note_of(engine) if leads else b"")
    bodies = all_gather_bytes(pack_rollouts(done) if leads else b"")
    known = [rollout for data in bodies for rollout in unpack_rollouts(data)]
    leaders = {instance: notes[ranks[0]] for instance, ranks in enumerate(placement.instances)}
    return sorted(known, key=lambda r: r.sample_id), Meeting.of(leaders, len(leaders))
