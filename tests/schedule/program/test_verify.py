"""Verification in both models: random schedules pass, damaged programs are refused, and brute force agrees."""

from collections import Counter
from itertools import chain

import pytest
from testkit.profiles import share
from testkit.program_cases import (
    GROUPS,
    Judge,
    doubled,
    dropped,
    early_reductions,
    fused,
    opposite_steps,
    random_case,
    readdressed,
    renumbered,
    swapped,
    swapped_on_channel,
)

from rlhfuse.base.errors import ScheduleError
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Program
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


def counted(schedule, ranks, tied):
    """Transfers, and collectives: sums of tied weights between first and last stages, reductions, optimizer steps."""
    layouts = ranks.shape.layouts
    microbatches = {p.model: p.microbatches for p in schedule.problem.pipelines}
    replicas = {model: layout.dp * layout.tp for model, layout in layouts.items()}
    hops = {model: layout.stages - 1 if layout.pp > 1 else 0 for model, layout in layouts.items()}
    transfers = sum(2 * microbatches[model] * replicas[model] * hops[model] for model in layouts)
    sums = sum(replicas[model] for model in tied if layouts[model].pp > 1)
    return transfers, sums + sum(layout.stages * layout.tp for layout in layouts.values()) + len(layouts)


@pytest.mark.parametrize("first, count", [(0, 160), pytest.param(10_000, 3000, marks=pytest.mark.slow)])
def test_random_schedules_pass(first, count):
    queues = Counter()
    for seed in range(first, first + share(count)):
        schedule, ranks, tied = random_case(seed)
        early = lower(schedule, ranks, tied=tied)
        joint = lower(schedule, ranks, tied=tied, reduce="joint")
        assert all(Program.parse(program.text()) == program for program in early.values())
        one, two = verify(early, schedule, ranks, tied=tied), verify(joint, schedule, ranks, tied=tied)
        assert two.one_queue and one.blocking_receives and two.blocking_receives
        assert verify(joint, schedule, ranks, tied=tied, one_queue=True) == two
        assert (one.transfers, one.collectives) == (two.transfers, two.collectives) == counted(schedule, ranks, tied)
        assert bool(one.hang) is not one.one_queue
        queues[one.one_queue] += 1
        if not one.one_queue:
            with pytest.raises(ScheduleError, match="deadlock: rank .* never happens"):
                verify(early, schedule, ranks, tied=tied, one_queue=True)
    assert queues[True] and queues[False]  # early programs satisfy the stricter model by luck only


@pytest.mark.parametrize("seed", range(len(GROUPS)))
def test_every_damage_is_refused(seed):
    """One micro-batch: every damage of every instruction; no judge is needed."""
    schedule, ranks, tied = random_case(seed, most=1)
    programs = lower(schedule, ranks, tied=tied)
    damages, count = [dropped, early_reductions, opposite_steps, swapped_on_channel], Counter()
    if sum(len(program.instructions) for program in programs.values()) <= 160:
        damages += [doubled, readdressed, renumbered]
    for damage in damages:
        for name, broken in damage(programs):
            assert judged(broken, schedule, ranks, tied)[0] is None, name
            count[damage.__name__] += 1
    assert count["dropped"] == sum(len(program.instructions) for program in programs.values())
    assert count["opposite_steps"] == (len(ranks.shape.shares) - 1) * len(programs)


@pytest.mark.parametrize(
    "first, rounds, distances, least", [(0, 1, [1], 10), pytest.param(100, 4, [1, 2, 3], 100, marks=pytest.mark.slow)]
)
def test_brute_force_over_all_interleavings_agrees(first, rounds, distances, least):
    """Programs with two instructions exchanged: refused, or harmless in every interleaving."""
    count = Counter()
    for seed in range(first, first + rounds * len(TINY)):
        schedule, ranks, tied = random_case(seed, TINY, most=2)
        for reduce in ("early", "joint"):
            programs = lower(schedule, ranks, tied=tied, reduce=reduce)
            exchanged = chain.from_iterable(swapped(programs, distance) for distance in distances)
            for name, broken in [("whole", programs), *exchanged]:
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
    assert min(count["passed", True], count["passed", False], count["refused", False]) > least


@pytest.mark.parametrize("texts", [("d1t8p32", "d4t8p8"), ("d8t4p8", "d8t8p4")])
def test_256_ranks_are_verified(texts):
    problem, ranks = fused(texts, 16, (2, 2))
    schedule = greedy(problem)
    assert ranks.size == 256 and verify(lower(schedule, ranks), schedule, ranks)
