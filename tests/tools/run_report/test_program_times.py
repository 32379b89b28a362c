"""Times of programs: equal to those of the schedule where that says them, and by hand where it does not."""

import pytest
from run_report.program_times import makespan, program_times
from testkit.program_cases import GROUPS, L, fused, random_case

from rlhfuse.base.errors import ScheduleError
from rlhfuse.schedule.ir.action import Kind
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Program
from rlhfuse.schedule.rules.builders import serial_1f1b

WHOLE = [group for group in GROUPS if len({L(layout).tp for layout in group}) == 1]  # without merged stages


def free_weights(problem):
    """Seconds of an action: the problem's, and nothing for TE, RG and ST."""

    def seconds(action):
        pipeline = problem.pipeline(action.pipeline)
        rows = {Kind.F: pipeline.forward, Kind.B: pipeline.backward, Kind.W: pipeline.weight_gradient}
        return rows[action.kind][action.stage] if action.kind in rows else 0.0

    return seconds


@pytest.mark.parametrize("seed", range(40))
def test_programs_take_as_long_as_their_schedule(seed):
    schedule, ranks, tied = random_case(seed, WHOLE)
    programs, seconds = lower(schedule, ranks, tied=tied), free_weights(schedule.problem)
    computing = {
        rank: Program(rank, tuple(i for i in program.instructions if i.action.microbatch is not None))
        for rank, program in programs.items()
    }
    timeline = evaluate(schedule)
    transfer = schedule.problem.transfer
    times = program_times(computing, ranks, seconds, transfer)
    for node, order in enumerate(schedule.orders):
        for rank in (rank for rank in times if ranks.node_of(rank) == node):
            assert [timed.action for timed in times[rank]] == list(order)
            assert [timed.start for timed in times[rank]] == pytest.approx(list(timeline.starts[node]))
            assert [timed.end for timed in times[rank]] == pytest.approx(list(timeline.ends[node]))
    whole = program_times(programs, ranks, seconds, transfer)
    assert makespan(whole) >= makespan(times) * (1 - 1e-9), "meeting at an optimizer step makes nothing faster"


def serial(layouts, microbatches, forward):
    problem, ranks = fused(layouts, microbatches, forward)
    return serial_1f1b(problem), ranks


def test_optimizer_steps_wait_for_all_ranks_of_their_model():
    schedule, ranks = serial(("d1t1p2", "d1t1p2"), 1, (1, 10))
    price = {Kind.RG: 0.5, Kind.ST: 3.0}
    free = free_weights(schedule.problem)
    times = program_times(lower(schedule, ranks), ranks, lambda action: price.get(action.kind) or free(action))
    steps = {(rank, t.action.pipeline): t for rank, rows in times.items() for t in rows if t.action.kind is Kind.ST}
    assert {key: step.end - step.start for key, step in steps.items()} == dict.fromkeys(steps, 3.0)
    for model in ("actor", "critic"):
        assert steps[0, model].start == steps[1, model].start
        for rank in (0, 1):
            reduced = [t.end for t in times[rank] if t.action.pipeline == model and t.action.kind is Kind.RG]
            assert max(reduced) <= steps[rank, model].start
    assert makespan(times) == max(step.end for step in steps.values())


def test_merged_stages_are_taken_apart():
    """The critic's four stages lie two to a node: micro-batch 0 passes them in turn, on ranks of their own."""
    schedule, ranks = serial(("d1t2p2", "d1t1p4"), 2, (1, 1))
    assert schedule.problem.pipeline("critic").forward == (2, 2), "one merged stage is two real ones"
    times = program_times(lower(schedule, ranks), ranks, lambda a: float(a.kind in (Kind.F, Kind.B)))
    passed = {(t.action, rank): t.start for rank, rows in times.items() for t in rows}
    first = {a.stage: (rank, start) for (a, rank), start in passed.items() if a == ("critic", a.stage, Kind.F, 0)}
    assert [first[stage][1] - first[0][1] for stage in range(4)] == [0, 1, 2, 3]
    assert len({rank for rank, _ in first.values()}) == 4
    assert makespan(times) <= evaluate(schedule).makespan


def test_a_program_that_cannot_go_on_is_named():
    schedule, ranks = serial(("d1t1p2", "d1t1p2"), 1, (1, 1))
    programs = lower(schedule, ranks)
    broken = {0: programs[0], 1: Program(1, programs[1].instructions[:1])}
    with pytest.raises(ScheduleError, match=r"rank 0, position \d+: \S+ never begins"):
        program_times(broken, ranks, lambda action: 1.0)
