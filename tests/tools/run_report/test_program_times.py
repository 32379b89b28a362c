"""Times of programs: equal to those of the schedule where that says them, and by hand where it does not."""

import pytest
from run_report.program_times import makespan, program_times
from testkit.program_cases import GROUPS, L, random_case

from rlhfuse.schedule.ir.action import Kind
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Program

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
