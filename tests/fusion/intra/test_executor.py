"""The executor's manners: no model waits for another, refusals, reports; what it does with chunks and SGD."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from testkit.training_pair import LR, build_pair, make_batch, make_schedule, weights

from rlhfuse.base.errors import InputError, ScheduleError
from rlhfuse.config.settings import AlgorithmConfig
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.program import Programs

CHUNKED = ("d2t1p2v2", "d2t1p2v2")


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
    pair = build_pair(rank, folders, "d2t1p2", "d2t1p2", edit=first_step_late)
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


def stopped_backward(rank: int, folders: dict) -> bool:
    """The last backward of the model that steps last begins, on rank 3, when all ranks have stepped the other model."""
    pair = build_pair(rank, folders, "d2t1p2", "d2t1p2")
    order = [i.action for i in pair.programs[rank].instructions if i.action.kind is Kind.ST]
    first, last = (pair.models[model_of(pair, action)] for action in order)
    stage, store = last.stages[order[1].stage], dist.distributed_c10d._get_default_store()
    step, backward, held = first.optimizer.step, stage.backward, []

    def stepped(lr):
        result = step(lr)
        store.set(f"stopped/{rank}", "stepped")
        return result

    def late(microbatch, gradient):
        if rank == 3 and microbatch == 3:
            store.wait([f"stopped/{other}" for other in range(4)], timedelta(seconds=540))
            held.append(microbatch)
        return backward(microbatch, gradient)

    first.optimizer.step, stage.backward = stepped, late
    pair.train(0)
    pair.close()
    return bool(held)


def test_one_model_steps_on_all_ranks_while_a_backward_of_the_other_stands_still(workers, folders):
    assert workers.run(stopped_backward, folders) == [False, False, False, True]


def under_way(rank: int, folders: dict) -> bool | None:
    """Rank 3 joins a reduction only when rank 1, which began it, is at work again; on rank 1: whether it was begun.

    gloo does not say when a reduction is done before it is waited for, so this shows that it began and held up nobody.
    """
    pair = build_pair(rank, folders, "d2t1p2", "d2t1p2")
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


def watched(rank: int, folders: dict) -> dict:
    texts: list[str] = []
    pair = build_pair(rank, folders, "d1t1p4", "d2t1p2", progress=texts.append)
    reports = [pair.train(seed).report for seed in range(2)]
    program = pair.programs[rank]
    pair.close()
    return {
        "texts": texts[: len(texts) // 2],
        "program": [str(i) for i in program.instructions],
        "spans": [str(span.action) for span in reports[0].spans],
        "counts": {str(kind): times.count for kind, times in reports[0].times.items()},
        "negative": [t for r in reports for t in r.times.values() if t.overhead_seconds < 0],
    }


def test_progress_names_instruction_peer_and_microbatch_and_the_report_adds_up(workers, folders):
    runs = workers.run(watched, folders)
    for run in runs:
        program = run["program"]
        begun = [text for text in run["texts"] if "waits" not in text]
        distinct = [text for n, text in enumerate(begun) if n == 0 or begun[n - 1] != text]
        assert distinct == [f"training instruction {n}: {text}" for n, text in enumerate(program)]
        received = [text for text in program if "RF" in text or "RB" in text]
        waited = [text.partition(" waits for ")[2] for text in run["texts"] if "waits for" in text]
        assert set(received) <= set(waited)
        place = next(n for n, text in enumerate(program) if "RB" in text)
        compute = program[place].split("<")[0].replace("RB", "B")
        assert f"training instruction {program.index(compute)}: {compute} waits for {program[place]}" in run["texts"]
        computing = [text for text in program if "<" not in text and ">" not in text]
        assert run["spans"] == computing
        assert sum(run["counts"].values()) == len(program)
        assert not run["negative"]


# refusals ---------------------------------------------------------------------------------------------------------


def refusals(rank: int, folders: dict) -> dict:
    from rlhfuse.fusion.intra.training_step import TrainingStep

    pair = build_pair(rank, folders, "d1t1p4", "d2t1p2")
    sent: list[int] = []
    channels = pair.roles.channels
    channels.send = lambda tensor, to: sent.append(to)
    channels.post_receive = lambda shape, dtype, source: sent.append(source)
    layouts = pair.ranks.shape.layouts
    good = lower(pair.schedule, pair.ranks)
    said = []

    def attempt(programs, models=pair.models) -> None:
        try:
            step = TrainingStep(
                rank,
                pair.ranks,
                pair.schedule,
                programs,
                models,
                channels,
                1.0,
                lambda _: None,
            )
            step.run(make_batch(0), pair.counts, LR, AlgorithmConfig())
            said.append("nothing")
        except (InputError, ScheduleError) as error:
            said.append(str(error).splitlines()[0])

    attempt(lower(make_schedule(layouts, "serial"), pair.ranks))
    attempt(replace(good, layouts={"actor": "d2t1p2", "critic": "d1t1p4"}))
    attempt(good, {"actor": pair.models["actor"]})
    attempt(replace(good, by_rank={r: replace(good[(r + 1) % 4], rank=r) for r in range(4)}))
    del channels.send, channels.post_receive
    pair.close()
    return {"said": said, "sent": len(sent)}


def test_what_cannot_work_is_refused_before_anything_is_sent(workers, folders):
    for run in workers.run(refusals, folders):
        assert run["sent"] == 0
        schedule, layout, model, program = run["said"]
        assert "another schedule" in schedule and "actor d2t1p2" in layout
        assert "critic is not built" in model
        assert "but this rank holds" in program


# chunks and sgd ---------------------------------------------------------------------------------------------------


def losses_and_weights(rank: int, folders: dict, layouts: tuple[str, str], kind: str, optimizer: str = "adam") -> dict:
    pair = build_pair(rank, folders, *layouts, kind, optimizer=optimizer)
    results = [pair.train(seed) for seed in range(2)]
    out = {
        "losses": [loss for result in results for _, loss in sorted(result.report.losses.items())],
        "norms": [step.grad_norm for result in results for step in result.steps.values()],
        "weights": weights(pair),
        "instructions": sum(times.count for times in results[0].report.times.values()),
    }
    pair.close()
    return out


def test_chunks_give_the_same_bits_in_any_schedule_and_the_losses_of_one_stage_each(workers, folders):
    kinds = ("fused", "serial", "interleaved")
    runs = {kind: workers.run(losses_and_weights, folders, CHUNKED, kind) for kind in kinds}
    plain = workers.run(losses_and_weights, folders, ("d2t1p2", "d2t1p2"), "serial")
    for rank in range(4):
        assert runs["fused"][rank] == runs["serial"][rank] == runs["interleaved"][rank]
        assert runs["fused"][rank]["instructions"] > plain[rank]["instructions"]
        assert runs["fused"][rank]["norms"] == pytest.approx(plain[rank]["norms"], rel=1e-5)
    total = [sum(sum(run["losses"]) for run in some) for some in (runs["fused"], plain)]
    assert total[0] == pytest.approx(total[1], rel=1e-5)


def plain_sgd(rank: int, folders: dict) -> float:
    """Largest difference between the weights after a step and weights - lr * clipped gradient."""
    pair = build_pair(rank, folders, "d2t1p2", "d1t1p4", optimizer="sgd")
    before = {p: p.detach().clone() for m in pair.models.values() for p in m.optimizer.module.parameters()}
    pair.train(0)
    worst = 0.0
    for role, model in pair.models.items():
        for parameter in model.optimizer.module.parameters():
            # main_grad holds the summed gradient, clipped in place
            wanted = before[parameter] - LR[role] * parameter.main_grad
            worst = max(worst, float((parameter - wanted).detach().abs().max()))
    pair.close()
    return worst


def test_sgd_subtracts_the_clipped_gradient(workers, folders):
    assert max(workers.run(plain_sgd, folders)) < 3e-8  # a rounding or two of weights below 0.25
