"""What happened in one iteration of generation and inference: a rank's notes, and the report made of all of them.

Every rank keeps a `Diary`. At the end the diaries are exchanged and every rank makes the same report of them, but for
the spans, which are its own. Observations are rows of numbers, with what the other instances did meanwhile
("idle", "decoding" or "scoring") as the last field:

    decode      sequences, tokens of context, seconds          a step
    prefill     tokens, sequences, seconds                     a step that runs prompts
    score       tokens, samples, seconds                       a pack, by all models that there are
    load        seconds                                        all models, one after the other
    migration   bytes of keys and values, seconds              from one instance to another
    meeting     seconds                                        from the last to come until all go on, moves apart
    release     seconds                                        to give back the cache and the actor's weights
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
    function_scores: dict[int, float] = field(default_factory=dict)  # sample id -> what a Rewarder said
    observations: dict[str, list[list]] = field(default_factory=dict)
    spans: list[PhaseSpan] = field(default_factory=list)


@dataclass(frozen=True)
class HandOver:
    """One instance's side of what moved from one instance to another at a meeting."""

    meeting: int
    source: int
    destination: int
    kv_bytes: int  # of all ranks of the pair; 0 at the destination, which does not count them
    seconds: float


@dataclass(frozen=True)
class Stop:
    """An instance stood still for a meeting: from its last step until it could take the next one, or was freed."""

    meeting: int
    instance: int
    stopped_seconds: float  # wall clock
    resumed_seconds: float


@dataclass
class Diary:
    """This rank's notes of the iteration. Only the leader of an instance keeps what would count twice."""

    leads: bool
    spans: list[PhaseSpan] = field(default_factory=list)
    observed: dict[str, list[list]] = field(default_factory=lambda: {kind: [] for kind in OBSERVED})
    hand_overs: list[HandOver] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    meetings: list[tuple[int, float]] = field(default_factory=list)  # which, seconds without what was moved
    bytes_needed: int = 0
    scored_early: int = 0
    agreement_seconds: float = 0.0
    generation_seconds: float = 0.0  # until this instance had nothing left to decode
    plans: list[MigrationPlan] = field(default_factory=list)  # of the meetings that it was at

    def span(self, kind: str, start: float, end: float) -> None:
        if end > start:
            self.spans.append(PhaseSpan(kind, start, end))

    def observe(self, kind: str, *row: float | str) -> None:
        if self.leads:
            self.observed[kind].append(list(row))

    def met(self, meeting: int, seconds: float) -> None:
        """This instance was at a meeting for so long, what it moved there included."""
        if self.leads:
            moving = sum(one.seconds for one in self.hand_overs if one.meeting == meeting)
            self.meetings.append((meeting, max(0.0, seconds - moving)))

    def to_json(self, scores: dict[int, float]) -> bytes:
        """What the others need to know, with the scores that a reward function gave."""
        told = {
            "observed": self.observed,
            "hand_overs": [vars(one) for one in self.hand_overs],
            "stops": [vars(one) for one in self.stops],
            "meetings": self.meetings,
            "bytes_needed": self.bytes_needed,
            "scored_early": self.scored_early,
            "agreement_seconds": self.agreement_seconds,
            "generation_seconds": self.generation_seconds,
            "scores": list(scores.items()),
            "plans": [plan.to_dict() for plan in self.plans],
        }
        return json.dumps(told).encode()


def summarize(told: Sequence[dict[str, Any]]) -> GenInferReport:
    """The report of all ranks' diaries (`Diary.to_json`, read back), without samples, spans and the whole's times."""
    # who was freed early knows the first plans only
    plans = tuple(MigrationPlan.from_dict(raw) for raw in max((one["plans"] for one in told), key=len))
    observations: dict[str, list[list]] = {kind: [] for kind in OBSERVED}
    for one in told:
        for kind, rows in one["observed"].items():
            observations[kind] += rows
    hand_overs = merge_hand_overs([HandOver(**raw) for one in told for raw in one["hand_overs"]])
    for one in hand_overs:
        plan = plans[one.meeting]
        alone = len(plan.destinations) + len(plan.freed) == 2
        observations["migration"].append([one.kv_bytes, one.seconds, "idle" if alone else "decoding"])
    met = [meeting for one in told for meeting in one["meetings"]]
    for number in sorted({number for number, _ in met}):  # who came last did not wait for the others
        observations["meeting"].append([min(seconds for at, seconds in met if at == number)])
    moves = [move for plan in plans for move in plan.moves]
    return GenInferReport(
        plans=plans,
        migrated_samples=len(moves),
        migrated_bytes=sum(one.kv_bytes for one in hand_overs),
        bytes_needed=max(one["bytes_needed"] for one in told),
        recomputed_samples=sum(move.mode == "tokens" for move in moves),
        scored_before_generation_end=sum(one["scored_early"] for one in told),
        pause_seconds=longest_pause([Stop(**raw) for one in told for raw in one["stops"]], plans),
        agreement_seconds=max(one["agreement_seconds"] for one in told),
        generation_seconds=max(one["generation_seconds"] for one in told),
        observations=observations,
    )


def merge_hand_overs(sides: Sequence[HandOver]) -> list[HandOver]:
    """One for each pair, of its two sides: the shorter time, for the other side waited for its partner as well."""
    merged: dict[tuple[int, int, int], HandOver] = {}
    for side in sides:
        key = side.meeting, side.source, side.destination
        other = merged.get(key, side)
        merged[key] = HandOver(*key, max(side.kv_bytes, other.kv_bytes), min(side.seconds, other.seconds))
    return [merged[key] for key in sorted(merged)]


def longest_pause(stops: Sequence[Stop], plans: Sequence[MigrationPlan]) -> float:
    """Seconds from a sample's last step where it was to the first step where it went; clocks must agree."""
    at = {(stop.meeting, stop.instance): stop for stop in stops}
    return max(
        (
            at[meeting, move.destination].resumed_seconds - at[meeting, move.source].stopped_seconds
            for meeting, plan in enumerate(plans)
            for move in plan.moves
        ),
        default=0.0,
    )
