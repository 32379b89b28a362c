"""Machines that differ: the least of each is planned for and it is said; drafts that differ all the same are named."""

from dataclasses import replace

import pytest
from testkit.four_ranks import drafted, run
from testkit.tiny import change_json, write_run

from rlhfuse.base.errors import JointError
from rlhfuse.config.load import load_config
from rlhfuse.costs.machine import Host
from rlhfuse.planning.draft_facts import difference, draft_facts


@pytest.mark.parametrize(
    "gpus, listed",
    [(["h100"] * 4, "h100"), (["a100", "a100", "h100", "h100"], "a100:2,h100:2"), (["h100", "", "h100", ""], "")],
)
def test_the_least_of_all_machines(gpus, listed):
    hosts = [Host(8.0 - rank, 100 + rank, gpu) for rank, gpu in enumerate(gpus)]
    assert Host.least(hosts) == Host(5.0, 100, listed)


def test_gpus_of_two_kinds_are_planned_as_the_slower(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    mixed = drafted(run(trainer__device="cuda"), host=Host(8.0, 10**12, "a100:2,h200:2"))
    slow = drafted(run(trainer__device="cuda"), host=Host(8.0, 10**12, "a100"))
    assert mixed.inputs.hardware.flops == slow.inputs.hardware.flops
    assert mixed.training.problem == slow.training.problem
    assert mixed.config.trainer.hardware == "a100:2,h200:2"


def test_drafts_are_told_apart_by_what_differs():
    here = drafted(run())
    assert difference([draft_facts(here)] * 3) == ""
    hardware = replace(here.inputs.hardware, devices_per_node=3)
    other = replace(here, inputs=replace(here.inputs, hardware=hardware))
    told = difference([draft_facts(one) for one in (here, here, other)])
    assert told.startswith("ranks plan otherwise than rank 0: rank 2: ranks of a machine 3, not 64, costs ")
    changed = drafted(run(trainer__seed=7))
    assert "rank 1: trainer.seed 7, not" in difference([draft_facts(one) for one in (here, changed)])


def on_its_machine(rank: int, config, settings: list[str], cores: list[float]):
    """What `on_every_machine` leaves of a start on a machine with so many cores: cores, seconds; or what it raises."""
    from rlhfuse.run.launch import on_every_machine
    from rlhfuse.run.preflight import check_inputs

    made = load_config(config, [word.replace("{rank}", str(rank)) for word in settings])
    inputs = check_inputs(made, len(cores), host=Host(cores[rank], 10**11))
    try:
        inputs = on_every_machine(made, inputs, rank)
    except JointError as error:
        return str(error)
    return inputs.draft.inputs.cores.count, inputs.draft.training.problem.to_dict()


def test_ranks_on_machines_that_differ_draft_alike_or_are_named(workers, tmp_path):
    layouts = ["parallel.actor_train=d1t1p4", "parallel.critic_train=d2t1p2", "parallel.generation=d4t1p1"]
    config = write_run(tmp_path, fusion__threshold=16)
    drafts = workers.run(on_its_machine, config, layouts, [4.0, 2.0, 8.0, 8.0])
    assert drafts[0][0] == 2.0 and all(draft == drafts[0] for draft in drafts)
    told = workers.run(on_its_machine, config, [*layouts, "trainer.seed={rank}"], [4.0] * 4)
    assert len({*told}) == 1 and all(f"rank {rank}: trainer.seed {rank}, not 0" in told[0] for rank in (1, 2, 3))


def on_its_day(rank: int, config, days: list[str]):
    """Day and first token of what `on_every_machine` leaves of a start on that day."""
    from rlhfuse.run.launch import on_every_machine
    from rlhfuse.run.preflight import check_inputs

    inputs = on_every_machine(config, check_inputs(config, len(days), day=days[rank]), rank)
    return inputs.day, inputs.prompts[0].tokens[0]


def test_ranks_that_start_around_midnight_write_the_day_of_rank_0(workers, tmp_path):
    file, days = write_run(tmp_path, data__apply_chat_template=True), [f"2026-11-{day}" for day in (28, 29, 28, 27)]
    change_json(tmp_path / "actor/tokenizer_config.json", chat_template="w{{ strftime_now('%d')|int }} w9")
    layouts = ["parallel.actor_train=d1t1p4", "parallel.critic_train=d2t1p2", "parallel.generation=d4t1p1"]
    found = workers.run(on_its_day, load_config(file, layouts), days)
    assert set(found) == {("2026-11-28", 28 + 3)}
