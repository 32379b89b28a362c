"""Two and three instances: the same bits for every R_t, with what moves as cache or as tokens."""

from __future__ import annotations

import pytest
from testkit.inter_stage_case import Case, clean_up, iterate, write_models
from testkit.workers import Workers

LENGTHS = (20, 15, 25, 10, 30, 17, 22, 12, 50, 5, 60, 6)
CASES = [(1, "kv"), (6, "kv"), (6, "tokens"), (12, "kv"), (12, "tokens")]


@pytest.mark.slow
@pytest.mark.parametrize("instances", [2, 3])
def test_any_number_of_instances_gives_the_same_bits(tmp_path, instances):
    folders = write_models(tmp_path)
    layout = f"d{instances}t1p1"
    pool = Workers(instances)
    try:
        digests = set()
        for number, (threshold, by) in enumerate([(0, "kv"), *CASES]):
            for slow in ((), (0.005, 0.0), (0.0, 0.005)):  # who finishes first
                case = Case(LENGTHS, threshold, by=by, layout=layout, inference=layout, step_seconds=slow, bs_max=4)
                results = pool.run(iterate, folders, case, 10 * number + len(slow) + bool(slow and slow[0]))
                digests |= {one["digest"] for one in results}
        assert len(digests) == 1
        pool.run(clean_up)
    finally:
        pool.close()
