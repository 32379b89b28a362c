"""Lowered programs: text, rank maps, where everything stands, and what is refused before a step."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.program_cases import GROUPS, MODELS, fused, random_case
from testkit.schedule_cases import with_facts

from rlhfuse.base.errors import InputError, ScheduleError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.problem import StageCosts, fused_problem
from rlhfuse.schedule.ir.ranks import rank_map
from rlhfuse.schedule.program.lowering import TotalOrder, lower
from rlhfuse.schedule.program.program import Instruction, Program
from rlhfuse.schedule.program.verify import Verified, verify
from rlhfuse.schedule.rules.builders import greedy, serial_1f1b

L = ParallelLayout.parse


def both(actor, critic):
    return {"actor": L(actor), "critic": L(critic)}


def pair(actor, critic, m1, **more):
    return fused((actor, critic), m1, (5, 4), **more)


def with_program(programs, text):
    """The programs, that of one rank replaced."""
    program = Program.parse(text)
    return replace(programs, by_rank={**programs.by_rank, program.rank: program})


def test_four_ranks_match_the_design():
    ranks = rank_map(both("d1t1p4", "d2t1p2"))
    assert ranks.pipelines("actor") == (((0,), (1,), (2,), (3,)),)
    assert ranks.pipelines("critic") == (((1,), (0,)), ((3,), (2,)))
    assert ranks.dp_groups("critic") == (((1, 3),), ((0, 2),))
    assert ranks.dp_groups("actor") == (((0,),), ((1,),), ((2,),), ((3,),))
    assert [ranks.locate("critic", r) for r in range(4)] == [(0, 1, 0), (0, 0, 0), (1, 1, 0), (1, 0, 0)]
    assert [ranks.pipeline_of("critic", r) for r in range(4)] == ["critic.0", "critic.0", "critic.1", "critic.1"]


def test_merged_stages_hold_what_their_fullest_part_holds():
    layouts = both("d1t2p2", "d1t1p4")
    actor = StageCosts((1, 1), (2, 2), (1, 1))
    critic = StageCosts((1, 2, 3, 4), (1,) * 4, (4, 3, 2, 1), (1, 2, 1, 2), (0, 5, 1, 1))
    _, merged = fused_problem(layouts, 2, {"actor": actor, "critic": critic}).pipelines
    assert merged.activation == (4, 2) and merged.weight_gradient == (3, 3) and merged.weight_activation == (5, 1)


@pytest.mark.parametrize("layouts", GROUPS)
def test_every_rank_has_one_place_in_each_model(layouts):
    ranks = rank_map(dict(zip(MODELS, map(L, layouts))))
    for model, layout in ranks.shape.layouts.items():
        pipelines = ranks.pipelines(model)
        assert sorted(r for pipe in pipelines for stage in pipe for r in stage) == list(range(layout.size))
        assert (len(pipelines), len(pipelines[0]), len(pipelines[0][0])) == (layout.dp, layout.pp, layout.tp)
        groups = ranks.dp_groups(model)
        assert all(len(group) == layout.dp for stage in groups for group in stage)


def test_unequal_layouts_are_refused_with_their_arithmetic():
    for actor, critic, part in [
        ("d1t1p4", "d1t1p2", "uses 4 ranks"),
        ("d1t2p3", "d2t1p3", r"pp\(3\) % s\(2\)"),
        ("d1t3p2", "d1t2p3", "% 2 = 1"),
        ("d1t1p2@2-3", "d1t1p2", "rank 0"),
    ]:
        with pytest.raises(InputError, match=part):
            rank_map(both(actor, critic))


def test_two_rank_program_is_the_one_on_the_whiteboard():
    problem, ranks = pair("d1t1p2", "d1t1p2", 1)
    programs = lower(greedy(problem), ranks)
    # A forward takes 5 for the actor and 4 for the critic: the critic's transfer is the first of all.
    assert programs[0].text() == (
        "rank 0: critic:1RF0<1 actor:0F0 actor:0SF0>1 critic:1F0 critic:1B0 critic:1SB0>1 critic:1RG "
        "actor:0RB0<1 actor:0B0 actor:0RG critic:1ST actor:0ST"
    )
    assert programs[1].text() == (
        "rank 1: critic:0F0 critic:0SF0>0 actor:1RF0<0 actor:1F0 critic:0RB0<0 actor:1B0 "
        "actor:1SB0>0 actor:1RG critic:0B0 critic:0RG critic:0ST actor:1ST"
    )
    for program in programs.values():
        assert Program.parse(program.text()) == program


@pytest.mark.parametrize(
    "text",
    ["actor:0F3>1", "actor:0SF3", "actor:0SF3<1", "actor:1RF3>0", "actor:0X1", "0F1", "", "a:0RG1", "a:0ST>1", "a:0F"],
)
def test_other_instruction_text_is_refused(text):
    with pytest.raises(InputError, match="instruction|action"):
        Instruction.parse(text)


def test_three_models_and_chunks_have_their_ranks():
    ranks = rank_map(dict(zip("abc", map(L, ("d1t1p4", "d2t1p2", "d2t1p2v2")))))
    assert ranks.pipelines("c") == (((0,), (1,)), ((2,), (3,)))  # forwards again, one position per rank
    assert ranks.stages(0, "c.1") == ((2,), (3,), (2,), (3,))
    assert [ranks.stages_of("c", r) for r in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [ranks.stages_of("b", r) for r in range(4)] == [(1,), (0,), (1,), (0,)]
    assert ranks.dp_groups("c") == (((0, 2),), ((1, 3),))
    assert [ranks.node_of(r) for r in range(4)] == [0, 1, 2, 3]
    with pytest.raises(InputError, match="'d' is not in this fused group; it has a, b, c"):
        ranks.locate("d", 0)
    with pytest.raises(InputError, match="rank 4 is not in a's layout d1t1p4"):
        ranks.locate("a", 4)


@examples(60)
@given(st.integers(0, 10**6))
def test_steps_do_not_lengthen_the_schedule(seed):
    """Run the programs with the schedule's times, ST and TE as barriers of no duration: the makespan is the same.

    One model's step only: two barriers near each other may share the slack of one action.
    """
    schedule, ranks, _ = random_case(seed)
    model = schedule.problem.models[seed % len(schedule.problem.models)]
    total_order = TotalOrder(schedule)
    ends = list(total_order.actions())
    ready = max(end for end, action in ends if schedule.problem.pipeline(action.pipeline).model == model)
    moment = total_order.free_time(ready, range(schedule.problem.nodes))
    makespan = evaluate(schedule).makespan
    assert ready <= moment <= makespan * (1 + 1e-9)
    assert stopped_at(schedule, ends, moment) == pytest.approx(makespan, rel=1e-6)


def stopped_at(schedule, ends, moment):
    """Makespan when all nodes wait for each other between the actions that end by `moment` and the later ones."""
    graph = build_graph(schedule.problem)
    clock, done, stopped = [0.0] * schedule.problem.nodes, {}, False
    for end, action in ends:
        if end > moment * (1 + 1e-9) and not stopped:
            clock, stopped = [max(clock)] * len(clock), True
        o = graph.number[action]
        node, source = graph.node[o], graph.upstream[o]
        begin = max(clock[node], done[source] + graph.lag[o] if source >= 0 else 0.0)
        done[o] = clock[node] = begin + graph.duration[o]
    return max(clock)


def test_crossed_sends_need_a_queue_for_each_communicator():
    """Both ranks send first: fine when sends are issued, a hang when every rank has one queue."""
    problem, ranks = pair("d1t1p2", "d1t1p2", 1)
    programs = lower(greedy(problem), ranks)
    other = (
        "rank 0: actor:0F0 actor:0SF0>1 critic:1RF0<1 critic:1F0 critic:1B0 critic:1SB0>1 critic:1RG "
        "actor:0RB0<1 actor:0B0 actor:0RG critic:1ST actor:0ST"
    )
    found = verify(with_program(programs, other), greedy(problem), ranks)
    assert not found.one_queue
    assert found.hang.startswith("never happens: rank 0 at 1 waits in actor:0SF0>1; rank 1 at 1 waits in critic:0SF0>0")
    assert verify(programs, greedy(problem), ranks) == Verified(4, 6, True)


def test_programs_for_anything_else_are_refused():
    problem, ranks = pair("d1t1p4", "d2t1p2", 2)
    schedule = greedy(problem)
    programs = lower(schedule, ranks)
    assert "model actor layout d1t1p4\n" in programs.text()
    with pytest.raises(ScheduleError):
        verify(programs, serial_1f1b(problem), ranks)
    with pytest.raises(ScheduleError, match="search a schedule"):
        lower(schedule, rank_map(both("d1t1p4", "d1t1p4")))
    with pytest.raises(ScheduleError, match=r"for ranks \[0, 1, 2\], the layout has ranks 0-3"):
        fewer = {rank: programs[rank] for rank in range(3)}
        verify(replace(programs, by_rank=fewer), schedule, ranks)
    other, _ = pair("d1t1p4", "d2t1p2", 4)
    with pytest.raises(ScheduleError):
        verify(programs, greedy(other), ranks)
    # Times may differ: the order stays the same program.
    priced = with_facts(problem, lambda values: [7] * len(values), ["activation"])
    verify(programs, replace(schedule, problem=priced), ranks)
    with pytest.raises(InputError, match="'reward' is not in this fused group"):
        lower(schedule, ranks, tied=frozenset({"reward"}))
    with pytest.raises(InputError, match="reduce='late' is unknown; use early or joint"):
        lower(schedule, ranks, reduce="late")


def test_the_memory_cap_is_held_against_the_program_itself():
    """Where backwards are split, weight gradients keep less than the forward, as much or more."""
    blamed = Counter()
    for seed in range(3 * len(GROUPS)):
        schedule, ranks, _ = random_case(seed)
        kept = random.Random(seed).choice((0.25, None, 3))
        pipelines = [
            replace(p, weight_activation=tuple(kept * held for held in p.activation)) if p.split and kept else p
            for p in schedule.problem.pipelines
        ]
        problem = replace(schedule.problem, pipelines=tuple(pipelines))
        peak = evaluate(replace(schedule, problem=problem)).peak_memory
        exact = replace(schedule, problem=replace(problem, memory_cap=peak + 1, static_memory=1))
        verify(lower(exact, ranks), exact, ranks)
        tight = replace(schedule, problem=replace(problem, memory_cap=peak * 0.99))
        with pytest.raises(ScheduleError) as error:
            verify(lower(tight, ranks), tight, ranks)
        found = re.match(r"rank \d+, position \d+: \S+([FB])\d+ brings the activations to", str(error.value))
        assert found, error.value
        blamed[found[1]] += 1
    assert min(blamed["F"], blamed["B"]) > 3, blamed
