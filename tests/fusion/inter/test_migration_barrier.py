"""What instances bring to a barrier and the plan that they make of it; the groups of ranks that act as one."""

import pytest

from rlhfuse.fusion.inter.migration import MigrationBarrier
from rlhfuse.fusion.inter.tensor_parallel_group import DelayedBroadcast, StepDecision, TensorParallelGroup
from rlhfuse.tasks.instance_limits import InstanceLimits, SampleMoveCost
from rlhfuse.tasks.migration import MigrationPlan, SampleMove, UnfinishedSample, plan_at_threshold

MOVES = SampleMoveCost(1, 0.0, 0.0, 1.0, 1.0)
LIMITS = InstanceLimits(8, 100.0, 0.05, 8, 4, 10, 10, 64, move_cost=MOVES)


def test_the_plan_follows_from_what_all_instances_brought():
    one = UnfinishedSample(7, 0, 20, 19, (1, 2))
    barrier = MigrationBarrier((one, UnfinishedSample(8, 1, 20, 19), UnfinishedSample(9, 1, 9, 8)), (10, 9))
    plan = plan_at_threshold(4, barrier.states, barrier.free_blocks, LIMITS)
    assert plan.destinations == (1,) and plan.freed == (0,) and plan.stays == (8, 9)
    assert barrier.bytes_needed(plan, 8, 100) == 300
    assert plan_at_threshold(4, (one,), (10,), LIMITS) is None
    assert plan_at_threshold(4, (), (10, 10), LIMITS) is None


def test_shared_blocks_are_needed_once_by_a_destination():
    states = tuple(UnfinishedSample(i, i // 2, 20, 20, (1, 2)) for i in range(4))
    moves = tuple(SampleMove(i, i // 2, 2, "kv", 20) for i in range(4))
    barrier = MigrationBarrier(states, (9, 9, 9))
    assert barrier.bytes_needed(MigrationPlan((2,), (0, 1), moves, ()), 8, 1) == 2 * (3 + 1)


def test_one_rank_needs_no_group():
    group = TensorParallelGroup((5,), 5, None)
    assert group.is_leader and group.broadcast(1, 2) == (1, 2)
    decision, told = DelayedBroadcast(group, StepDecision()), [StepDecision(), StepDecision(stop=True)]
    assert [decision.pass_on(each) for each in told] == told


@pytest.mark.parametrize("place", [None, 0, 7])
def test_a_decision_comes_back_from_its_numbers(place):
    decision = StepDecision(place == 0, place, 9, 4)
    assert StepDecision.decode(decision.encode()) == decision
    assert all(type(number) is int for number in decision.encode())
