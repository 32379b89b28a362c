"""The start of a job: rank 0 plans for the smallest machine; ranks that found other inputs, or fail, are named."""

from dataclasses import replace
from datetime import date
from types import SimpleNamespace

import pytest
from testkit.four_ranks import drafted, run
from testkit.tiny import change_json, write_run

from rlhfuse.base.errors import InputError
from rlhfuse.config.load import load_config
from rlhfuse.costs.machine import Host
from rlhfuse.planning.plan import Plan


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


def jobs(rank: int, config, settings: list[str], host: Host, lack: int | None = None):
    """What a start leaves on a rank whose machine is `host`: day, first token, cores; or its error and the text."""
    import torch.distributed as dist

    from rlhfuse.run import handshake, preflight
    from rlhfuse.run.launch import joint_inputs

    made = load_config(config, [word.replace("{rank}", str(rank)) for word in settings])
    store = dist.PrefixStore(f"{settings}{lack}", dist.distributed_c10d._get_default_store())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "this_host", lambda trainer: replace(host, cores=host.cores + rank))
        patch.setattr(handshake, "date", SimpleNamespace(today=lambda: date(2026, 11, 28 - rank)))
        if rank == lack:
            patch.setattr(preflight, "check_output", refuse)
        try:
            inputs = joint_inputs(made, store, rank, dist.get_world_size())
        except InputError as error:
            return type(error).__name__, str(error)
    return inputs.day, inputs.prompts[0].tokens[0], inputs.plan.cores, inputs.plan.to_text()


def refuse(config):
    raise InputError("no folder")


HOST = Host(2.0, 10**11)
LAYOUTS = ["parallel.actor_train=d1t1p4", "parallel.critic_train=d2t1p2", "parallel.generation=d4t1p1"]


def test_rank_0_plans_for_the_smallest_machine_and_its_day(workers, tmp_path):
    file = write_run(tmp_path, data__apply_chat_template=True, fusion__search_seconds=0.1)
    change_json(tmp_path / "actor/tokenizer_config.json", chat_template="w{{ strftime_now('%d')|int }} w9")
    found = workers.run(jobs, file, LAYOUTS, HOST)
    assert len({text for *_, text in found}) == 1 and "fusion" in Plan.parse(found[1][3]).config.model_dump()
    assert {row[:3] for row in found} == {("2026-11-28", 28 + 3, 2.0)}


def test_ranks_with_other_inputs_end_the_job_by_name(workers, tmp_path):
    file = write_run(tmp_path)
    found = workers.run(jobs, file, [*LAYOUTS, "trainer.seed={rank}"], HOST)
    assert [kind for kind, _ in found] == ["InputError", *["JointError"] * 3] and len({text for _, text in found}) == 1
    assert all(f"rank {rank}: trainer.seed {rank}, not 0" in found[0][1] for rank in (1, 2, 3))


@pytest.mark.parametrize("lack, kinds", [(2, ["JointError"] * 4), (0, ["InputError", *["JointError"] * 3])])
def test_a_rank_that_lacks_a_file_ends_all_with_its_line(workers, tmp_path, lack, kinds):
    found = workers.run(jobs, write_run(tmp_path), LAYOUTS, HOST, lack)
    assert [kind for kind, _ in found] == kinds
    assert {text for _, text in found} == {"rank 2: no folder" if lack else "no folder"}
