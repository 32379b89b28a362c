"""Receives in their places: whoever stands there waits for nobody in vain, and few buffers are enough."""

from collections import deque
from dataclasses import replace

import pytest
from testkit.program_cases import GROUPS, fused, random_case

from rlhfuse.schedule.ir.action import RECEIVES, Kind
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Program
from rlhfuse.schedule.program.receive_slots import receive_slots
from rlhfuse.schedule.program.verify import verify
from rlhfuse.schedule.rules.builders import greedy


def posted_ahead(program: Program, ahead: int) -> Program:
    """Every receive where its channel's receive `ahead` before it stands, the first ones at the beginning."""
    instructions, places = [], {}
    for instruction in program.instructions:
        if instruction.action.kind in RECEIVES:
            places.setdefault(instruction.peer, deque()).append(instruction)
    waiting = {peer: deque(receives) for peer, receives in places.items()}
    for receives in waiting.values():
        instructions += [receives.popleft() for _ in range(min(ahead, len(receives)))]
    for instruction in program.instructions:
        if instruction.action.kind not in RECEIVES:
            instructions.append(instruction)
        elif waiting[instruction.peer]:
            instructions.append(waiting[instruction.peer].popleft())
    return Program(program.rank, tuple(instructions))


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("reduce", ["early", "joint"])
def test_receives_posted_ahead_may_wait_for_what_their_own_rank_has_not_begun(ahead, reduce):
    """Harmless where a posted receive costs nothing; where it may hold up its rank, the first step hangs."""
    problem, ranks = fused(("d1t1p4", "d2t1p2"), 4, (1, 1))
    schedule = greedy(problem)
    programs = lower(schedule, ranks, reduce=reduce)
    assert verify(programs, schedule, ranks).blocking_receives
    early = replace(programs, by_rank={r: posted_ahead(p, ahead) for r, p in programs.items()})
    assert sorted(map(str, early[0].instructions)) == sorted(map(str, programs[0].instructions))
    assert not verify(early, schedule, ranks).blocking_receives


@pytest.mark.parametrize("seed", range(4 * len(GROUPS)))
def test_every_receive_has_a_buffer_of_its_own_until_its_last_use_and_no_buffer_is_too_many(seed):
    schedule, ranks, tied = random_case(seed, most=6)
    programs = lower(schedule, ranks, tied=tied, reduce=("early", "joint")[seed % 2])
    for program in programs.values():
        slots = receive_slots(program)
        live: dict[int, dict[int, tuple]] = {peer: {} for peer in slots.counts}
        most = dict.fromkeys(live, 0)
        for instruction in program.instructions:
            action, peer = instruction.action, instruction.peer
            if action.kind in RECEIVES:
                assert slots.of[action] not in live[peer], "received into a buffer that is still used"
                split = action.kind is Kind.RB and schedule.problem.pipeline(action.pipeline).split
                live[peer][slots.of[action]] = action._replace(kind=Kind.W if split else Kind.B)
                most[peer] = max(most[peer], len(live[peer]))
            for sender, slot in slots.freed.get(action, ()):
                assert live[sender].pop(slot) == action, "its last use: W needs the gradient alone"
        assert not any(live.values()), "all buffers are free at the end of a step"
        assert most == slots.counts
        assert slots.of.keys() == {i.action for i in program.instructions if i.action.kind in RECEIVES}
