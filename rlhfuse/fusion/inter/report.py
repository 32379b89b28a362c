"""What happened in one iteration of generation and inference: events of each rank, and the report made of all of them.

At the end the ranks exchange their `RankEvents`, and every rank makes the same report of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from rlhfuse.ppo.rollout import Rollout
from rlhfuse.tasks.migration import MigrationPlan

CALLS = "reward"  # the kind of work that reward functions do, in observations and spans
OBSERVED = ("step", "score", "load", "migration", "meeting", "release", CALLS, "capture", "pause")


@dataclass
class GenInferReport:
    """All samples, scored and sorted, and what happened; equal on every rank but for `total_seconds`."""

    rollouts: list[Rollout] = field(default_factory=list)
    begun: int = 0  # samples, and of them those that were dropped as their groups were not needed
    aborted: int = 0
    plan: MigrationPlan | None = None  # None: serial
    migrated_samples: int = 0
    migrated_bytes: int = 0
    bytes_needed: int = 0  # of the blocks that had to move, each once for a pair of instances
    recomputed_samples: int = 0  # of the migrated ones, those that moved as tokens
    scored_before_generation_end: int = 0
    agreement_seconds: float = 0.0  # of generation, spent to agree with the others; the most of any rank
    generation_seconds: float = 0.0
    capture_seconds: float = 0.0  # of them, spent to record CUDA graphs; the most of any rank
    reward_seconds: float = 0.0  # from the last score on, waiting for the reward function
    total_seconds: float = 0.0
    function_scores: dict[int, float] = field(default_factory=dict)  # sample id -> the Rewarder's score
    turns: dict[int, list[list]] = field(default_factory=dict)  # sample id -> see `turns_of`; {} without tools
    ended: dict[int, float] = field(default_factory=dict)  # sample id -> seconds of generation until its end; likewise
    observations: dict[str, list[list]] = field(default_factory=dict)


def joined(rounds: Sequence[GenInferReport]) -> GenInferReport:
    """One report of several rounds, one after the other; the plan is that of the first that has one."""
    first, *others = rounds
    if not others:
        return first
    made = GenInferReport(plan=next((report.plan for report in rounds if report.plan), None))
    for name in (each.name for each in fields(made) if each.name not in ("plan", "observations")):
        values = [getattr(report, name) for report in rounds]
        if isinstance(values[0], dict):
            joint = dict(pair for value in values for pair in value.items())
        else:
            joint = sum(values, []) if isinstance(values[0], list) else sum(values)
        setattr(made, name, joint)
    made.rollouts.sort(key=lambda rollout: rollout.sample_id)
    kinds = first.observations
    made.observations = {kind: [row for report in rounds for row in report.observations[kind]] for kind in kinds}
    return made


@dataclass(frozen=True)
class PairMigration:
    """One instance's side of what moved from one instance to another."""

    source: int
    destination: int
    kv_bytes: int  # of all ranks of the pair; 0 at the destination, which does not count them
    seconds: float


@dataclass
class RankEvents:
    """What happened on this rank. Only the leader of an instance has what would count twice.

    Observations are rows of numbers, which the rank's clock gathers:

    step        sequences, tokens of context, tokens of prompts, seconds, guesses, and how many of them were drawn
    score       tokens, samples, seconds               a pack, by all models that there are
    load        seconds                                all models, one after the other
    migration   bytes of keys and values, seconds      from one instance to another
    meeting     seconds                                barrier: from the last to come until all go on, no moves
    release     seconds                                to give back the cache and the actor's weights
    reward      samples, at once on a worker, seconds  of the reward function, a sample's as long as its call
    capture     shapes, seconds                        of decode steps recorded as CUDA graphs, if any
    pause       seconds, tokens                        from a turn's end to its answer; observed tokens of it
    """

    observed: dict[str, list[list]] = field(default_factory=dict)  # the leader's
    migrations: list[PairMigration] = field(default_factory=list)
    barrier_seconds: float | None = None  # without what was moved; the leader's
    bytes_needed: int = 0
    scored_early: int = 0
    agreement_seconds: float = 0.0
    generation_seconds: float = 0.0  # until this instance had nothing left to decode
    capture_seconds: float = 0.0
    scored_seconds: float = 0.0  # until this rank had nothing left to score
    rewarded_seconds: float = 0.0  # and until its reward function was done
    plan: MigrationPlan | None = None
    function_scores: dict[int, float] = field(default_factory=dict)  # sample id -> the Rewarder's score
    pauses: dict[tuple[int, int], float] = field(default_factory=dict)  # (sample id, turn) -> seconds behind it
    ended: dict[int, float] = field(default_factory=dict)  # sample id -> see GenInferReport


def summarize(ranks: Sequence[RankEvents]) -> GenInferReport:
    """The report of all ranks' events, without samples, spans and the times of the whole."""
    plan = ranks[0].plan  # the same on all
    observations = {kind: [row for rank in ranks for row in rank.observed.get(kind, ())] for kind in OBSERVED}
    migrations = merge_sides([side for rank in ranks for side in rank.migrations])
    observations["migration"] = [[pair.kv_bytes, pair.seconds] for pair in migrations]
    # who came last did not wait for the others
    observations["meeting"] = [[min(rank.barrier_seconds for rank in ranks if rank.barrier_seconds is not None)]]
    moves = plan.moves if plan else ()
    return GenInferReport(
        plan=plan,
        migrated_samples=len(moves),
        migrated_bytes=sum(pair.kv_bytes for pair in migrations),
        bytes_needed=max(rank.bytes_needed for rank in ranks),
        recomputed_samples=sum(move.mode == "tokens" for move in moves),
        scored_before_generation_end=sum(rank.scored_early for rank in ranks),
        agreement_seconds=max(rank.agreement_seconds for rank in ranks),
        generation_seconds=max(rank.generation_seconds for rank in ranks),
        capture_seconds=max(rank.capture_seconds for rank in ranks),
        reward_seconds=max(rank.rewarded_seconds for rank in ranks) - max(rank.scored_seconds for rank in ranks),
        function_scores={sample: score for rank in ranks for sample, score in rank.function_scores.items()},
        observations=observations,
    )


def turns_of(rollouts: Sequence[Rollout], ranks: Sequence[RankEvents]) -> dict[int, list[list]]:
    """Sample id -> [drawn tokens, seconds of the pause behind, observed tokens] of each turn; the last has 0.0, 0."""
    pauses = {place: seconds for rank in ranks for place, seconds in rank.pauses.items()}
    return {
        rollout.sample_id: [
            [end - start, pauses[rollout.sample_id, number], gap_end - end]
            for number, ((start, end), (_, gap_end)) in enumerate(zip(rollout.turns, rollout.observed))
        ]
        + [[rollout.turns[-1][1] - rollout.turns[-1][0], 0.0, 0]]
        for rollout in rollouts
    }


def merge_sides(sides: Sequence[PairMigration]) -> list[PairMigration]:
    """One for each pair, of its two sides: the shorter time, for the other side waited for its partner as well."""
    merged: dict[tuple[int, int], PairMigration] = {}
    for side in sides:
        key = side.source, side.destination
        other = merged.get(key, side)
        merged[key] = PairMigration(*key, max(side.kv_bytes, other.kv_bytes), min(side.seconds, other.seconds))
    return [merged[key] for key in sorted(merged)]
