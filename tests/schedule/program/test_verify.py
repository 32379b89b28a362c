"""Verification in both models: random schedules pass, damaged programs are refused, and brute force agrees."""

from collections import Counter

import pytest
from testkit.program_cases import (
    GROUPS,
    Judge,
    doubled,
    dropped,
    early_reductions,
    opposite_steps,
    random_case,
    readdressed,
    renumbered,
    swapped,
    swapped_on_channel,
)

from rlhfuse.base.errors import ScheduleError
from rlhfuse.config.spec import ParallelLayout
from rlhfuse.schedule.ir.problem import StageCosts, fused_problem
from rlhfuse.schedule.ir.ranks import rank_map
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Programs
from rlhfuse.schedule.program.verify import verify
from rlhfuse.schedule.rules.builders import greedy

TINY = [
    ("d1t1p2", "d1t1p2"),
    ("d2t1p1", "d1t1p2"),
    ("d1t1p2v2", "d1t1p2"),
    ("d1t2p1", "d1t1p2"),
    ("d1t1p2", "d2t1p1", "d1t1p2"),
    ("d1t1p3", "d1t1p3"),
    ("d2t1p1", "d2t1p1"),
]


def judged(programs, schedule, ranks, tied):
    """(Verified, "") or (None, why not); every refusal names rank, position and instruction and shows the grid."""
    try:
        return verify(programs, schedule, ranks, tied=tied), ""
    except ScheduleError as error:
        assert "rank" in str(error) and "position" in str(error), error
        assert error.grid.startswith("rank 0:") and error.grid.count("<-- ERROR HERE") == 1, error.grid
        return None, str(error)


def check_random(seeds):
    queues = Counter()
    for seed in seeds:
        schedule, ranks, tied = random_case(seed)
        early = lower(schedule, ranks, tied=tied)
        joint = lower(schedule, ranks, tied=tied, reduce="joint")
        assert Programs.parse(early.text()) == early
        one, two = verify(early, schedule, ranks, tied=tied), verify(joint, schedule, ranks, tied=tied)
        assert two.one_queue and one.blocking_receives and two.blocking_receives
        assert verify(joint, schedule, ranks, tied=tied, one_queue=True) == two
        assert (one.transfers, one.collectives) == (two.transfers, two.collectives)
        assert bool(one.hang) is not one.one_queue
        queues[one.one_queue] += 1
        if not one.one_queue:
            with pytest.raises(ScheduleError, match="deadlock: rank .* never happens"):
                verify(early, schedule, ranks, tied=tied, one_queue=True)
    assert queues[True] and queues[False]  # early programs satisfy the stricter model by luck only


def test_random_schedules_pass():
    check_random(range(10 * len(GROUPS)))


@pytest.mark.slow
def test_thousands_of_random_schedules_pass():
    check_random(range(10_000, 10_000 + 3000))


@pytest.mark.parametrize("seed", range(len(GROUPS)))
def test_every_damage_is_refused(seed):
    """One micro-batch: every damage of every instruction; no judge is needed."""
    schedule, ranks, tied = random_case(seed, most=1)
    programs = lower(schedule, ranks, tied=tied)
    if sum(len(program.instructions) for program in programs.values()) > 160:
        programs_of = [dropped, early_reductions, opposite_steps, swapped_on_channel]
    else:
        programs_of = [dropped, doubled, readdressed, renumbered, early_reductions, opposite_steps, swapped_on_channel]
    count = Counter()
    for damage in programs_of:
        for name, broken in damage(programs):
            assert judged(broken, schedule, ranks, tied)[0] is None, name
            count[damage.__name__] += 1
    assert count["dropped"] == sum(len(program.instructions) for program in programs.values())
    assert count["opposite_steps"] == (len(ranks.shape.shares) - 1) * len(programs)


def exchanges(programs, distances):
    for distance in distances:
        yield from swapped(programs, distance)


def check_brute_force(seeds, distances):
    """Programs with two instructions exchanged: refused, or harmless in every interleaving. Counts both."""
    count = Counter()
    for seed in seeds:
        schedule, ranks, tied = random_case(seed, TINY, most=2)
        for reduce in ("early", "joint"):
            programs = lower(schedule, ranks, tied=tied, reduce=reduce)
            for name, broken in [("whole", programs), *exchanges(programs, distances)]:
                found, why = judged(broken, schedule, ranks, tied)
                judge = Judge(broken, ranks, schedule.problem, tied)
                if found:
                    assert judge.harmless(), (seed, name)
                    assert found.one_queue == judge.finishes(one_queue=True), (seed, name)
                    count["passed", found.one_queue] += 1
                else:
                    harmless = judge.harmless()  # refused though it would run: only for the schedule's order
                    assert not harmless or "stands where the schedule has" in why, (seed, name, why)
                    count["refused", harmless] += 1
    return count


def test_brute_force_over_all_interleavings_agrees():
    count = check_brute_force(range(len(TINY)), (1,))
    assert min(count["passed", True], count["passed", False], count["refused", False]) > 10


@pytest.mark.slow
def test_brute_force_over_more_exchanges_agrees():
    count = check_brute_force(range(100, 100 + 4 * len(TINY)), (1, 2, 3))
    assert min(count["passed", True], count["passed", False], count["refused", False]) > 100


@pytest.mark.parametrize("texts, microbatches", [(("d1t8p32", "d4t8p8"), 64), (("d8t4p8", "d8t8p4"), 64)])
def test_256_ranks_are_verified(texts, microbatches):
    layouts = dict(zip(("actor", "critic"), map(ParallelLayout.parse, texts)))
    costs = {
        model: StageCosts((2,) * layout.stages, (4,) * layout.stages, (1,) * layout.stages)
        for model, layout in layouts.items()
    }
    schedule, ranks = greedy(fused_problem(layouts, microbatches, costs)), rank_map(layouts)
    assert ranks.size == 256
    programs = lower(schedule, ranks)
    assert verify(programs, schedule, ranks)
