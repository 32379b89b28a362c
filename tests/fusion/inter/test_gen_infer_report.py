"""What the events of all ranks add up to."""

from rlhfuse.fusion.inter.report import PairMigration, RankEvents, merge_sides, summarize
from rlhfuse.tasks.migration import MigrationPlan, SampleMove

PLAN = MigrationPlan((1,), (0, 2), (SampleMove(7, 0, 1, "kv", 20), SampleMove(8, 2, 1, "tokens", 0)), (9,))


def test_of_the_two_sides_of_a_pair_the_one_that_did_not_wait_counts():
    sides = [PairMigration(0, 1, 640, 0.5), PairMigration(0, 1, 0, 0.2), PairMigration(2, 1, 0, 0.1)]
    assert merge_sides(sides) == [PairMigration(0, 1, 640, 0.2), PairMigration(2, 1, 0, 0.1)]


def test_the_report_adds_up_what_ranks_saw():
    freed, stays = (RankEvents(plan=PLAN) for _ in range(2))
    freed.observed = {"score": [[10, 2, 0.5]], "reward": [[8, 1, 0.4]], "capture": [[4, 0.5]]}
    freed.migrations.append(PairMigration(0, 1, 640, 0.5))
    freed.scored_early, stays.scored_early = 2, 1
    freed.agreement_seconds, stays.generation_seconds, stays.bytes_needed = 0.01, 4.0, 700
    freed.scored_seconds, freed.rewarded_seconds = 5.0, 5.25  # done while the other still scored
    stays.scored_seconds, stays.rewarded_seconds = 5.5, 6.25
    freed.capture_seconds = 0.5
    freed.barrier_seconds, stays.barrier_seconds = 0.25, 0.3125
    report = summarize([freed, stays])
    assert report.plan == PLAN and report.migrated_samples == 2 and report.recomputed_samples == 1
    assert report.migrated_bytes == 640 and report.bytes_needed == 700 and report.scored_before_generation_end == 3
    assert report.agreement_seconds == 0.01 and report.generation_seconds == 4.0
    assert report.observations["capture"] == [[4, 0.5]] and report.capture_seconds == 0.5
    assert report.observations["score"] == [[10, 2, 0.5]]
    assert report.observations["reward"] == [[8, 1, 0.4]] and report.reward_seconds == 0.75
    assert report.observations["migration"] == [[640, 0.5]]
    assert report.observations["meeting"] == [[0.25]], "who waited least"
