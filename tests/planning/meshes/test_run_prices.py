"""Terms that placements share with a plan's price: links between stages, cores, communicators, what is left free."""

from dataclasses import replace
from statistics import median

import pytest
from testkit.four_ranks import full, run

from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.decisions.move_seconds import MoveLoad
from rlhfuse.planning import machine
from rlhfuse.planning.draft import draft_plan
from rlhfuse.planning.efficiency import optimizer_step_seconds
from rlhfuse.planning.meshes.forward_options import generation_options
from rlhfuse.planning.meshes.run_problem import RunProblem
from rlhfuse.planning.meshes.run_work import RunWork
from rlhfuse.planning.meshes.training_options import training_options
from rlhfuse.planning.price import minibatch_seconds, schedule_seconds
from rlhfuse.schedule.ir.ranks import plain_cells

SMALL = ModelSpec("llama", 16, 2048, 16, 8, 128, 5632, 32000, 2048)
SPECS = {role: SMALL for role in ("actor", "reference", "reward")}
H100 = hardware_by_name("h100")


def drafted(ranks=4, **keys):
    """A run without a critic: its actor trains alone, as in a placement."""
    layouts = {f"parallel__{row}": f"d{ranks}t1p1" for row in ("generation", "inference", "reference_inference")}
    layouts |= {"parallel__reward_inference": f"d{ranks}t1p1", "parallel__actor_train": f"d1t1p{ranks}"}
    defaults = {"trainer__hardware": "h100", "trainer__dtype": "bfloat16", "fusion__actor_microbatches": 8}
    defaults |= {
        "fusion__split_backward": "false",
        "algorithm__name": "grpo",
        "rollout__prompts_per_iteration": 64,
        **layouts,
    }
    made = run(**{**defaults, **keys})
    return draft_plan(made, SPECS, ranks, full(made))


def trainings(work, hardware: HardwareSpec = H100, ranks=4):
    return {(str(one.layout), one.note): one for one in training_options(work, "actor_train", ranks, hardware, 1e15)}


def price_of(draft):
    """Seconds of training in an iteration, as the plan has them."""
    minibatch = minibatch_seconds(draft, schedule_seconds(draft))
    return draft.batch.optimizer_steps * (minibatch + optimizer_step_seconds(draft.analytic))


def test_stages_on_two_machines_wait_for_the_network():
    draft = drafted(16, parallel__actor_train="d1t1p16")
    assert draft.problem.transfer > 0
    found = trainings(RunWork.of(draft), ranks=16)["d1t1p16", "M8"].seconds
    free = price_of(replace(draft, problem=replace(draft.problem, transfer=0)))
    assert found == pytest.approx(price_of(draft), rel=1e-3) and found > 1.01 * free


@pytest.mark.parametrize("cores", [4, 2, 1])
def test_ranks_that_share_cores(monkeypatch, cores):
    """On fewer cores than ranks a pipeline takes the work of all, and generation waits for cores."""
    monkeypatch.setattr(machine, "machine_cores", lambda: float(cores))
    keys = {"trainer__hardware": "cpu", "trainer__dtype": "float32", "trainer__memory_limit_gb": 200.0}
    draft = drafted(**keys)
    work = RunWork.of(draft)
    assert draft.cores.waiting == 4 / cores
    found = trainings(work, draft.hardware)["d1t1p4", "M8"].seconds
    assert found == pytest.approx(price_of(draft), rel=1e-3)
    alone = price_of(replace(draft, cores=machine.SharedCores(4.0, 4, 1)))
    assert found > 1.2 * alone if cores < 4 else found == pytest.approx(alone, rel=1e-3)
    generated = min(one.seconds for one in generation_options(work, 4, draft.hardware, 4, 1e15))
    cores_each = replace(work, cores=machine.SharedCores(4.0, 4, 1))
    fastest = min(one.seconds for one in generation_options(cores_each, 4, draft.hardware, 4, 1e15))
    assert generated == pytest.approx(fastest * 4 / cores, rel=1e-6)


def test_communicators_are_those_of_the_plan():
    """Of generation and inference without tensor ranks the plan has none but that in which weights move."""
    for layout in ("d1t1p4", "d2t1p2", "d2t2p1"):
        draft = drafted(parallel__actor_train=layout)
        made = RunProblem.of_draft(draft)
        own = trainings(RunWork.of(draft))
        held = [one for one in made.problem.calls["actor_train"].options[made.whole] if str(one.layout) == layout]
        assert held
        for one in held:
            mine = one.held_bytes - own[layout, one.note].held_bytes
            assert mine + H100.communicator_bytes == draft.memory.communicators
    shared = drafted(trainer__share_gpu=True, trainer__memory_limit_gb=70.0, rollout__cuda_graphs=False)
    made = RunProblem.of_draft(shared)
    assert made.problem.memory_bytes == (70e9 - H100.process_bytes,) * 4
    one = made.problem.calls["actor_train"].options[made.whole][0]
    assert one.held_bytes == trainings(RunWork.of(shared))[str(one.layout), one.note].held_bytes


def test_headroom_is_left_by_all_but_generation():
    whole, some = (RunProblem.of_draft(drafted(parallel__headroom=share)) for share in (0.0, 0.25))
    assert whole.problem.memory_bytes == some.problem.memory_bytes
    for task, call in whole.problem.calls.items():
        free = 0.0 if task == "generation" else 0.25 * H100.memory_bytes
        found = {(str(one.layout), one.note): one for one in some.problem.calls[task].options[whole.whole]}
        kept = 0
        for one in call.options[whole.whole]:
            if other := found.get((str(one.layout), one.note)):
                kept += 1
                assert other.passing_bytes == pytest.approx(one.passing_bytes + free)
                assert (other.seconds, other.held_bytes) == (one.seconds, one.held_bytes)
            else:  # no longer room for it
                assert one.held_bytes + one.passing_bytes + free > whole.problem.memory_bytes[0]
        assert kept


def test_sequence_parallelism_that_is_open_is_tried_both_ways():
    draft = drafted()
    both = RunWork.of(replace(draft, asked=draft.asked.with_(parallel={"sequence_parallel": "auto"})))
    given = trainings(RunWork.of(draft))
    found = {(layout, *split_note(note)): one for (layout, note), one in trainings(both).items()}
    assert {key[:2] for key in found if key[2]} == {(layout, note) for layout, note in given if "t1" not in layout}
    assert {key[:2]: one for key, one in found.items() if not key[2]} == given
    for (*key, cut), one in found.items():
        if cut and "recompute" not in key[1]:  # which keeps little that could be cut
            whole = given[tuple(key)]
            assert one.held_bytes + one.passing_bytes < whole.held_bytes + whole.passing_bytes


def split_note(note):
    return note.replace(", sequence parallel", ""), "sequence parallel" in note


LLAMA3_8B = ModelSpec("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192)


@pytest.mark.parametrize("ranks", [8, 32])
def test_weights_are_fetched_in_about_what_their_moves_take(ranks):
    """Moves from every layout of training on the same ranks, against the one number of an option: the middle one of
    them takes 0.7 to 1.1 of it, none more than 2.5 times as long."""
    draft = drafted()
    work = replace(RunWork.of(draft), specs={role: LLAMA3_8B for role in SPECS})
    sources = [one for one in work.layouts("actor_train", ranks, 8) if one.dp <= 64]
    for layout in work.layouts("generation", ranks, 8):
        some = generation_options(work, ranks, H100, ranks, 1e15)
        fetch = next(one.fetch_seconds for one in some if one.layout == layout)
        shares = []
        for source in sources:
            load = MoveLoad.of(LLAMA3_8B, source, plain_cells(source), layout, 2, H100.devices_per_node)
            shares.append(load.seconds(H100) / fetch)
        assert 0.7 < median(shares) < 1.1 and max(shares) < 2.5
