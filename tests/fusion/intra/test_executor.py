"""The executor's manners: no model waits for another, what it says, what is refused before anything is sent, a dry run
that changes no bit, and groups that have all been used before."""

from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist
from testkit.training_pair import Plan, build_pair, write_pair

from rlhfuse.base.errors import InputError, ScheduleError
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.program.program import Programs

REPLICAS = Plan("d2t1p2", "d2t1p2")


def model_of(pair, action: Action) -> str:
    return pair.schedule.problem.pipeline(action.pipeline).model


# no model waits for another ---------------------------------------------------------------------------------------


def first_step_late(programs: Programs) -> Programs:
    """Every rank steps its first model right before the last one, when the last one's reduction is under way."""

    def moved(program):
        steps = [i for i in program.instructions if i.action.kind is Kind.ST]
        rest = [i for i in program.instructions if i.action.kind is not Kind.ST]
        return replace(program, instructions=(*rest, *steps))

    return replace(programs, by_rank={rank: moved(program) for rank, program in programs.by_rank.items()})


def held_back(rank: int, folders: dict) -> dict:
    """Rank 3 begins its reduction of the model that steps last only when all ranks have stepped the other model."""
    pair = build_pair(rank, folders, REPLICAS, edit=first_step_late)
    order = [i.action for i in pair.programs[rank].instructions if i.action.kind is Kind.ST]
    first, last = (pair.models[model_of(pair, action)].optimizer for action in order)
    (stage,) = last.modules
    start, finish, step = last.start_reduction, last.finish_reduction, first.step
    seen, store = {}, dist.distributed_c10d._get_default_store()

    def stepped(lr):
        seen["begun"] = last.modules[stage].bucket_groups[0].grad_reduce_handle is not None
        result = step(lr)
        store.set(f"held back/{rank}", "stepped")
        return result

    def finish_late(stage):
        store.wait([f"held back/{other}" for other in range(4)], timedelta(seconds=540))
        start(stage)
        finish(stage)

    first.step = stepped
    if rank == 3:
        last.start_reduction, last.finish_reduction = lambda stage, finite: None, finish_late
    pair.train(0)
    seen["meets rank 3"] = 3 in dist.get_process_group_ranks(last._groups.dp)
    pair.close()
    return seen


def test_one_model_steps_while_the_reduction_of_the_other_stands_still(workers, folders):
    runs = workers.run(held_back, folders)
    (met,) = [run for rank, run in enumerate(runs) if rank != 3 and run["meets rank 3"]]
    assert met["begun"]  # and rank 3 has seen that all ranks stepped the other model since


def under_way(rank: int, folders: dict) -> bool | None:
    """Rank 3 joins a reduction only when rank 1, which began it, is at work again; on rank 1: whether it was begun.

    gloo does not say when a reduction is done before it is waited for, so this shows that it began and held up nobody.
    """
    pair = build_pair(rank, folders, REPLICAS)
    actions = [i.action for i in pair.programs[rank].instructions]
    actor, critic = pair.models["actor"], pair.models["critic"]
    store, begun = dist.distributed_c10d._get_default_store(), []
    if rank in (1, 3):
        place = actions.index(reduction := Action("actor", 1, Kind.RG))
        work = actions[place + 1]  # before the actor's step, inside its bubble
        assert work.kind is Kind.B and work.pipeline == "critic" and actions[place + 2].kind is Kind.ST
    if rank == 1:
        stage = critic.stages[work.stage]
        backward = stage.backward

        def at_work(microbatch, gradient):
            if microbatch == work.microbatch:
                (group,) = actor.optimizer.modules[reduction.stage].bucket_groups
                begun.append(group.grad_reduce_handle is not None)
                store.set("under way", "rank 1 works")
            return backward(microbatch, gradient)

        stage.backward = at_work
    if rank == 3:
        start = actor.optimizer.start_reduction

        def join(stage, finite):
            store.wait(["under way"], timedelta(seconds=540))
            start(stage, finite)

        actor.optimizer.start_reduction = join
    pair.train(0)
    pair.close()
    return begun[0] if begun else None


def test_a_reduction_begins_inside_the_bubble_and_holds_up_nobody(workers, folders):
    assert workers.run(under_way, folders) == [None, True, None, None]


# what is said -----------------------------------------------------------------------------------------------------


def watched(rank: int, folders: dict) -> tuple[list[str], list[str], int, float]:
    """What a rank says in a step, and its report: actions, the number of instructions, and overhead."""
    said: list[str] = []
    pair = build_pair(rank, folders, progress=said.append)
    report = pair.train(0).report
    pair.close()
    spans = [span.name for span in report.spans]
    return said, spans, report.instructions, report.overhead_seconds


def computed_from(instructions) -> list[str]:
    """The receives of a program in the order in which their tensors are used."""
    receives = {
        (i.action.pipeline, i.action.stage, i.action.kind.value[1], i.action.microbatch): str(i)
        for i in instructions
        if "<" in str(i)
    }
    used = [(i.action.pipeline, i.action.stage, i.action.kind.value, i.action.microbatch) for i in instructions]
    return [receives[key] for key in used if key in receives]


def test_a_rank_names_every_instruction_and_what_it_waits_for_and_the_report_adds_up(workers, folders):
    programs = Plan().programs
    for rank, (said, spans, count, overhead) in enumerate(workers.run(watched, folders)):
        instructions = programs[rank].instructions
        texts = [f"training instruction {n}: {i}" for n, i in enumerate(instructions)]
        assert list(dict.fromkeys(text.partition(" waits")[0] for text in said)) == texts
        waits = [text for text in said if " waits for " in text and "<" in text]
        assert [text.rpartition(" waits for ")[2] for text in waits] == computed_from(instructions)
        for text in waits:  # where it computes with what it received
            here, _, received = text.partition(" waits for ")
            assert here.rpartition(" ")[2] == received.partition("<")[0].replace("R", "", 1)
        sends = [text for text, i in zip(texts, instructions) if ">" in str(i)]
        assert [text.partition(" waits until")[0] for text in said if " waits until" in text] == sends
        assert spans == [str(i) for i in instructions if "<" not in str(i) and ">" not in str(i)]
        assert count == len(instructions) and overhead >= 0


# refusals ---------------------------------------------------------------------------------------------------------

OURS = Plan().programs
REFUSED = {
    "programs of other ranks": (
        replace(OURS, by_rank={rank: replace(OURS[(rank + 1) % 4], rank=rank) for rank in range(4)}),
        ["but this rank holds"],
    ),
    "a model that is not there": (OURS, ["critic is not built"]),
}


def refuse(rank: int, folders: dict) -> dict[str, str]:
    """What every attempt says; asserts that nothing was posted and no bit changed."""
    pair, said, posted = build_pair(rank, folders), {}, []
    channels, before = pair.roles.channels, pair.digest()
    channels.send = channels.post_receive = lambda *given: posted.append(given)
    for name, (programs, _) in REFUSED.items():
        models = {"actor": pair.models["actor"]} if name == "a model that is not there" else None
        try:
            pair.set_step(programs=programs, models=models)
            pair.train(0)
        except (InputError, ScheduleError) as error:
            said[name] = str(error)
    del channels.send, channels.post_receive
    assert not posted and pair.digest() == before
    pair.close()
    return said


def test_what_cannot_work_is_refused_before_anything_is_sent(workers, folders):
    runs = workers.run(refuse, folders)
    for name, (_, words) in REFUSED.items():
        for said in runs:
            line = said[name].splitlines()[0]
            assert all(part in line for part in words), line
        if name != "programs of other ranks":  # which says what each rank holds
            assert len({said[name] for said in runs}) == 1 and "\n" not in runs[0][name]


# a dry run --------------------------------------------------------------------------------------------------------


def stepped(rank: int, folders: dict, plan: Plan, options: dict) -> dict:
    """Digests of a pair that trains, and of one that is dry-run first and again between its steps."""
    plain = build_pair(rank, folders, plan, **options)
    expected = [(plain.train(seed), plain.digest())[1] for seed in range(2)]
    losses = plain.train(2)
    plain.close()
    pair = build_pair(rank, folders, plan, **options)
    before, seen = pair.digest(), []
    for model in pair.models.values():
        model.optimizer.dry_step = mock.Mock(wraps=model.optimizer.dry_step)
    executor_run = pair.step._executors[pair.plan.microbatches].run

    def run(work):
        seen.append(pair.digest())
        for model in pair.models.values():
            for buffer in model.optimizer._buffers():
                assert not buffer.grad_data.any(), "gradients of the dry run are gone"
        return executor_run(work)

    pair.step._executors[pair.plan.microbatches].run = run
    after = []
    for seed in range(2):
        pair.step.dry_run_first = True
        pair.train(seed)
        after.append(pair.digest())
    again = pair.train(2)
    pair.close()
    return {
        "dry": seen[:2] == [before, after[0]],
        "steps": after == expected,
        "stats": again.stats == losses.stats,
        "calls": [model.optimizer.dry_step.call_count for model in pair.models.values()],
    }


@pytest.mark.parametrize(
    "plan, options",
    [
        (Plan(), {}),
        (Plan("d2t1p2v2", "d2t1p2v2"), {"dtype": "bfloat16"}),
        (Plan("d1t2p2", "d2t2p1"), {"sequence_parallel": True, "recompute": "full"}),
        (Plan("d2t1p2", "d4t1p1"), {"optim": {"name": "sgd"}}),
        (Plan("d1t2p2", "d1t1p4", split=("actor", "critic")), {"sequence_parallel": True}),
    ],
)
def test_a_dry_run_changes_no_bit(workers, folders, plan, options):
    for seen in workers.run(stepped, folders, plan, options):
        assert seen == {"dry": True, "steps": True, "stats": True, "calls": [2, 2]}


# connected groups -------------------------------------------------------------------------------------------------


KINDS = {
    "allreduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "all_gather": "all_gather",
}
POINTS = {"send": "send", "recv": "receive"}


@pytest.fixture(scope="module")
def tied_folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("tied"), actor={"tie_word_embeddings": True})


@contextmanager
def noting(used: set):
    """Note (group, kind of operation) of whatever is asked of a process group meanwhile."""

    def noted(name: str):
        kind = next((kind for word, kind in (KINDS | POINTS).items() if word in name), name)
        original = getattr(dist.ProcessGroup, name)

        def call(group, *arguments, **options):
            used.add((group.group_name, kind))
            return original(group, *arguments, **options)

        return call

    names = [name for name in dir(dist.ProcessGroup) if any(word in name for word in (*KINDS, *POINTS))]
    with mock.patch.multiple(dist.ProcessGroup, **{name: noted(name) for name in names}):
        yield


def uses(rank: int, folders: dict, plan: Plan, options: dict) -> dict:
    """What was used at start, and what in a training step only."""
    start, step = set(), set()
    with noting(start):
        pair = build_pair(rank, folders, plan, **options)
    with noting(step):
        pair.train(0)
    everyone = dist.group.WORLD.group_name
    pair.close()
    return {"start": start, "late": {use for use in step - start if use[0] != everyone}, "step": step}


@pytest.mark.parametrize(
    "plan, options, kinds",
    [
        (Plan(), {}, {"all_reduce", "reduce_scatter", "all_gather", "send", "receive"}),
        (Plan("d1t2p2", "d2t2p1"), {"sequence_parallel": True}, set(KINDS.values())),
        (Plan("d2t1p2", "d2t1p2"), {"optim": {"name": "sgd"}}, {"all_reduce"}),
    ],
)
def test_nothing_is_first_used_inside_a_step(workers, tied_folders, plan, options, kinds):
    for seen in workers.run(uses, tied_folders, plan, options):
        assert kinds <= {kind for _, kind in seen["step"]}, "the step is watched"
        assert seen["late"] == set()
