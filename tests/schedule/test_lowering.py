"""Lowered programs: text, rank maps, and a verifier that must refuse every kind of damage."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from rlhfuse.errors import InputError, ScheduleError
from rlhfuse.schedule.builders import capped_greedy, gpipe, greedy, serial_1f1b
from rlhfuse.schedule.lowering import Instruction, Program, lower
from rlhfuse.schedule.problem import StageCosts, fused_problem
from rlhfuse.schedule.ranks import rank_map
from rlhfuse.schedule.verify import verify
from rlhfuse.spec import ParallelLayout

L = ParallelLayout.parse

# actor, critic, M1, transfers per replica that a correct program set makes
LAYOUTS = [
    ("d1t1p4", "d2t1p2", 4),  # K 1:2
    ("d1t1p2", "d1t1p2", 3),  # K 1:1
    ("d2t1p6", "d3t1p4", 3),  # K 2:3
    ("d1t2p2", "d1t1p4", 2),  # critic stages merged by 2
    ("d1t1p4", "d1t2p2", 2),  # actor stages merged by 2
    ("d2t2p2", "d2t1p4", 2),  # two replicas, merged
    ("d1t4p2", "d2t1p4", 2),  # merged by 4: the critic's pipeline lives on one node
    ("d2t1p1", "d1t1p2", 1),  # actor without a pipeline
    ("d2t1p1", "d2t1p1", 2),  # neither has one
]


def both(actor, critic):
    return {"actor": L(actor), "critic": L(critic)}


def costs(layout, f, a=1.0):
    return StageCosts((f,) * layout.stages, (2 * f,) * layout.stages, (a,) * layout.stages)


def pair(actor, critic, m1):
    layouts = both(actor, critic)
    prices = {"actor": costs(layouts["actor"], 5, 1.95), "critic": costs(layouts["critic"], 4, 2)}
    return fused_problem(layouts, m1, prices), rank_map(layouts)


def test_four_ranks_match_the_design():
    ranks = rank_map(both("d1t1p4", "d2t1p2"))
    assert ranks.pipelines("actor") == (((0,), (1,), (2,), (3,)),)
    assert ranks.pipelines("critic") == (((1,), (0,)), ((3,), (2,)))
    assert ranks.dp_groups("critic") == (((1, 3),), ((0, 2),))
    assert ranks.dp_groups("actor") == (((0,),), ((1,),), ((2,),), ((3,),))
    assert [ranks.locate("critic", r) for r in range(4)] == [(0, 1, 0), (0, 0, 0), (1, 1, 0), (1, 0, 0)]
    assert [ranks.pipeline_of("critic", r) for r in range(4)] == ["critic.0", "critic.0", "critic.1", "critic.1"]


def test_merged_stages_sit_on_the_nodes_ranks():
    ranks = rank_map(both("d2t2p2", "d2t1p4"))
    assert ranks.pipelines("actor") == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert ranks.pipelines("critic") == (((3,), (2,), (1,), (0,)), ((7,), (6,), (5,), (4,)))
    assert ranks.replicas[0]["critic"] == (((3,), (2,)), ((1,), (0,)))
    assert ranks.replica_of(3) == 0 and ranks.replica_of(4) == 1
    problem, _ = pair("d2t2p2", "d2t1p4", 2)
    assert problem.pipeline("critic").forward == (8, 8) and problem.pipeline("critic").activation == (2, 2)


@pytest.mark.parametrize("actor, critic, _", LAYOUTS)
def test_every_rank_has_one_place_in_each_model(actor, critic, _):
    ranks = rank_map(both(actor, critic))
    for model, layout in (("actor", L(actor)), ("critic", L(critic))):
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
    with pytest.raises(InputError, match=r"K1\*M1 = 1\*3"):
        pair("d1t1p4", "d2t1p2", 3)


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


@pytest.mark.parametrize("text", ["actor:0F3", "actor:0SF3>1", "actor:1RF3<0", "critic.1:2SB0>7", "a:0W1"])
def test_instruction_text_parses_back(text):
    assert str(Instruction.parse(text)) == text


@pytest.mark.parametrize("text", ["actor:0F3>1", "actor:0SF3", "actor:0SF3<1", "actor:1RF3>0", "actor:0X1", "0F1", ""])
def test_other_instruction_text_is_refused(text):
    with pytest.raises(InputError, match="instruction|action"):
        Instruction.parse(text)


@pytest.mark.parametrize("build", [serial_1f1b, gpipe, greedy, capped_greedy])
@pytest.mark.parametrize("actor, critic, m1", LAYOUTS)
def test_lowered_schedules_verify(actor, critic, m1, build):
    problem, ranks = pair(actor, critic, m1)
    schedule = build(problem)
    transfers = verify(lower(schedule, ranks), schedule, ranks).transfers
    expected = 0
    for layout, share in zip((L(actor), L(critic)), ranks.shape.shares):
        microbatches = problem.pipeline(share.names[0]).microbatches
        expected += 2 * (layout.pp - 1) * layout.tp * layout.dp * microbatches
    assert transfers == expected


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.data())
def test_random_costs_verify(data):
    actor, critic, m1 = data.draw(st.sampled_from(LAYOUTS[:7]))
    ranks = rank_map(both(actor, critic))

    def draw(layout):
        times = st.lists(st.integers(1, 9), min_size=layout.pp, max_size=layout.pp).map(tuple)
        return StageCosts(data.draw(times), data.draw(times), (1,) * layout.pp)

    layouts = both(actor, critic)
    problem = fused_problem(layouts, m1, {model: draw(layout) for model, layout in layouts.items()})
    problem = replace(problem, transfer=data.draw(st.integers(0, 3)))
    schedule = data.draw(st.sampled_from([serial_1f1b, greedy, capped_greedy]))(problem)
    assert verify(lower(schedule, ranks), schedule, ranks).channels


def damaged(programs):
    """(name, programs) for every instruction dropped, repeated, swapped on its channel, re-aimed."""
    for rank, program in programs.items():
        seq = program.instructions
        for i, instruction in enumerate(seq):
            yield f"{rank}.{i} dropped", {**programs, rank: Program(rank, seq[:i] + seq[i + 1 :])}
            yield f"{rank}.{i} repeated", {**programs, rank: Program(rank, seq[: i + 1] + seq[i:])}
            if instruction.peer is not None:
                wrong = replace(instruction, peer=(instruction.peer + 1) % len(programs))
                yield f"{rank}.{i} re-aimed", {**programs, rank: Program(rank, seq[:i] + (wrong,) + seq[i + 1 :])}
            for j in range(i + 1, len(seq)):
                computing = instruction.peer is None and seq[j].peer is None
                channel = (instruction.peer, instruction.action.kind in "SFSB") == (
                    seq[j].peer,
                    seq[j].action.kind in "SFSB",
                )
                if computing or (instruction.peer is not None and channel):
                    swapped = seq[:i] + (seq[j],) + seq[i + 1 : j] + (instruction,) + seq[j + 1 :]
                    yield f"{rank}.{i} swapped with {j}", {**programs, rank: Program(rank, swapped)}
                    break


@pytest.mark.parametrize("actor, critic, m1", [("d1t1p4", "d2t1p2", 2), ("d1t2p2", "d1t1p4", 2)])
def test_damaged_programs_are_refused(actor, critic, m1):
    problem, ranks = pair(actor, critic, m1)
    schedule = greedy(problem)
    programs = lower(schedule, ranks)
    count = 0
    for name, broken in damaged(programs):
        with pytest.raises(ScheduleError) as caught:
            verify(broken, schedule, ranks)
            pytest.fail(f"{name} passed")
        assert "rank" in str(caught.value) and "rank 0:" in caught.value.grid
        count += 1
    assert count > 100


def test_crossed_sends_deadlock_under_rendezvous():
    """Both ranks send first: fine with buffering, a hang with rendezvous."""
    problem, ranks = pair("d1t1p2", "d1t1p2", 1)
    schedule = serial_1f1b(problem)
    programs = lower(greedy(problem), ranks)
    text = {
        0: "rank 0: actor:0F0 actor:0SF0>1 critic:1RF0<1 critic:1F0 critic:1B0 critic:1SB0>1 actor:0RB0<1 actor:0B0",
        1: "rank 1: critic:0F0 critic:0SF0>0 actor:1RF0<0 actor:1F0 actor:1B0 actor:1SB0>0 critic:0RB0<0 critic:0B0",
    }
    crossed = {rank: Program.parse(line) for rank, line in text.items()}
    with pytest.raises(ScheduleError, match="deadlock.*rank 0 at 1 waits in actor:0SF0>1"):
        verify(crossed, greedy(problem), ranks)
    assert verify(programs, greedy(problem), ranks) == 4
    with pytest.raises(ScheduleError, match="stands where the schedule has"):
        verify(programs, schedule, ranks)


def test_schedule_for_another_layout_is_refused():
    problem, _ = pair("d1t1p4", "d2t1p2", 2)
    with pytest.raises(ScheduleError, match="search a schedule"):
        lower(greedy(problem), rank_map(both("d1t1p4", "d1t1p4")))
