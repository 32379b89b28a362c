"""What happened in one iteration of generation and inference: events of each rank, and the report made of all of them.

At the end the ranks exchange their `RankEvents`, and every rank makes the same report of them, but for the spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhfuse.decisions.migration import MigrationPlan
from rlhfuse.ppo.rollout import Rollout

OBSERVED = ("decode", "prefill", "score", "load", "migration", "meeting", "release")


@dataclass(frozen=True)
class PhaseSpan:
    """What this rank did, in `time.time()` seconds."""

    kind: str  # generate, meet, migrate, load, score, wait
    start_seconds: float
    end_seconds: float


@dataclass
class GenInferReport:
    """All samples of the iteration, scored and sorted, and what happened.

    Equal on every rank but for `spans` and `begin_seconds` and `total_seconds`, which are its own.
    """

    rollouts: list[Rollout] = field(default_factory=list)
    plans: tuple[MigrationPlan, ...] = ()  # one for each trigger at which somebody was freed
    migrated_samples: int = 0
    migrated_bytes: int = 0
    bytes_needed: int = 0  # of the blocks that had to move, each once for a pair of instances
    recomputed_samples: int = 0  # of the migrated ones, those that moved as tokens
    scored_before_generation_end: int = 0
    pause_seconds: float = 0.0  # longest that a migrated sample stood still
    agreement_seconds: float = 0.0  # of generation, spent to agree with the others; the most of any rank
    generation_seconds: float = 0.0
    total_seconds: float = 0.0
    begin_seconds: float = 0.0  # wall clock
    function_scores: dict[int, float] = field(default_factory=dict)  # sample id -> the Rewarder's score
    observations: dict[str, list[list]] = field(default_factory=dict)
    spans: list[PhaseSpan] = field(default_factory=list)


@dataclass(frozen=True)
class PairMigration:
    """One instance's side of what moved from one instance to another at a barrier."""

    barrier: int
    source: int
    destination: int
    kv_bytes: int  # of all ranks of the pair; 0 at the destination, which does not count them
    seconds: float


@dataclass(frozen=True)
class DecodePause:
    """An instance stood still for a barrier: from its last step until it could take the next one, or was freed."""

    barrier: int
    instance: int
    stopped_seconds: float  # wall clock
    resumed_seconds: float


@dataclass
class RankEvents:
    """What happened on this rank. Only the leader of an instance keeps what would count twice.

    Observations are rows of numbers; what the other instances did meanwhile ("idle", "decoding" or "scoring") is the
    last field where it matters:

    decode      sequences, tokens of context, seconds, others  a step
    prefill     tokens, sequences, seconds, others             a step that runs prompts
    score       tokens, samples, seconds, others               a pack, by all models that there are
    load        seconds, others                                all models, one after the other
    migration   bytes of keys and values, seconds, others      from one instance to another
    meeting     seconds                                        barrier: from the last to come until all go on, no moves
    release     seconds                                        to give back the cache and the actor's weights
    """

    is_leader: bool
    spans: list[PhaseSpan] = field(default_factory=list)
    observed: dict[str, list[list]] = field(default_factory=lambda: {kind: [] for kind in OBSERVED})
    migrations: list[PairMigration] = field(default_factory=list)
    pauses: list[DecodePause] = field(default_factory=list)
    barriers: list[tuple[int, float]] = field(default_factory=list)  # which, seconds without what was moved
    bytes_needed: int = 0
    scored_early: int = 0
    agreement_seconds: float = 0.0
    generation_seconds: float = 0.0  # until this instance had nothing left to decode
    plans: list[MigrationPlan] = field(default_factory=list)  # of the barriers that it was at
    function_scores: dict[int, float] = field(default_factory=dict)  # sample id -> the Rewarder's score

    def span(self, kind: str, start: float, end: float) -> None:
        if end > start:
            self.spans.append(PhaseSpan(kind, start, end))

    def observe(self, kind: str, *row: float | str) -> None:
        if self.is_leader:
            self.observed[kind].append(list(row))

    def add_barrier(self, barrier: int, seconds: float) -> None:
        """This instance was at a barrier for so long, what it moved there included."""
        if self.is_leader:
            moving = sum(pair.seconds for pair in self.migrations if pair.barrier == barrier)
            self.barriers.append((barrier, max(0.0, seconds - moving)))


def summarize(ranks: Sequence[RankEvents]) -> GenInferReport:
    """The report of all ranks' events, without samples, spans and the times of the whole."""
    plans = tuple(max((rank.plans for rank in ranks), key=len))  # who was freed early knows the first plans only
    observations = {kind: [row for rank in ranks for row in rank.observed[kind]] for kind in OBSERVED}
    migrations = merge_sides([side for rank in ranks for side in rank.migrations])
    for pair in migrations:
        plan = plans[pair.barrier]
        alone = len(plan.destinations) + len(plan.freed) == 2
        observations["migration"].append([pair.kv_bytes, pair.seconds, "idle" if alone else "decoding"])
    barriers = [barrier for rank in ranks for barrier in rank.barriers]
    for number in sorted({number for number, _ in barriers}):  # who came last did not wait for the others
        observations["meeting"].append([min(seconds for at, seconds in barriers if at == number)])
    moves = [move for plan in plans for move in plan.moves]
    return GenInferReport(
        plans=plans,
        migrated_samples=len(moves),
        migrated_bytes=sum(pair.kv_bytes for pair in migrations),
        bytes_needed=max(rank.bytes_needed for rank in ranks),
        recomputed_samples=sum(move.mode == "tokens" for move in moves),
        scored_before_generation_end=sum(rank.scored_early for rank in ranks),
        pause_seconds=longest_pause([pause for rank in ranks for pause in rank.pauses], plans),
        agreement_seconds=max(rank.agreement_seconds for rank in ranks),
        generation_seconds=max(rank.generation_seconds for rank in ranks),
        function_scores={sample: score for rank in ranks for sample, score in rank.function_scores.items()},
        observations=observations,
    )


def merge_sides(sides: Sequence[PairMigration]) -> list[PairMigration]:
    """One for each pair, of its two sides: the shorter time, for the other side waited for its partner as well."""
    merged: dict[tuple[int, int, int], PairMigration] = {}
    for side in sides:
        key = side.barrier, side.source, side.destination
        other = merged.get(key, side)
        merged[key] = PairMigration(*key, max(side.kv_bytes, other.kv_bytes), min(side.seconds, other.seconds))
    return [merged[key] for key in sorted(merged)]


def longest_pause(pauses: Sequence[DecodePause], plans: Sequence[MigrationPlan]) -> float:
    """Seconds from a sample's last step where it was to the first step where it went; clocks must agree."""
    at = {(pause.barrier, pause.instance): pause for pause in pauses}
    return max(
        (
            at[barrier, move.destination].resumed_seconds - at[barrier, move.source].stopped_seconds
            for barrier, plan in enumerate(plans)
            for move in plan.moves
        ),
        default=0.0,
    )
