"""Two and three instances: the same bits for every R_t, with what moves as cache or as tokens."""

from __future__ import annotations

from itertools import count

import pytest
from testkit.inter_stage_case import Case, clean_up, iterate, write_models

LENGTHS = (20, 15, 25, 10, 30, 17, 22, 12, 50, 5, 60, 6)
CASES = [(1, "kv"), (6, "kv"), (6, "tokens"), (12, "kv"), (12, "tokens")]


@pytest.mark.slow
@pytest.mark.parametrize("instances", [2, 3])
def test_any_number_of_instances_gives_the_same_bits(pools, tmp_path, instances):
    pool, folders, layout = pools.of(instances), write_models(tmp_path), f"d{instances}t1p1"
    digests, number = set(), count()
    for threshold, by in [(0, "kv"), *CASES]:
        for slow in ((), (0.005, 0.0), (0.0, 0.005)):  # who finishes first
            case = Case(LENGTHS, threshold, by=by, layout=layout, inference=layout, pauses=slow, bs_max=4)
            digests |= {one["digest"] for one in pool.run(iterate, folders, case, next(number))}
    assert len(digests) == 1
    pool.run(clean_up)
