"""Terms of the price of a table of layouts: without one of them another table is predicted to be faster, or fits."""

from dataclasses import replace

import pytest
from testkit import four_ranks
from testkit.four_ranks import full, on_slow_cores, run, with_cores

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs import machine
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.forms.collectives import ring_gather_seconds
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.planning import candidate as drafts
from rlhfuse.planning.candidate import Candidate
from rlhfuse.planning.memory.memory_budget import TRAINED
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.rooflines import optimizer_step_seconds
from rlhfuse.planning.training.training_problem import TICK_SECONDS
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.problem import FusionProblem

LLAMA3_8B = ModelSpec("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192)
SMALL = ModelSpec("llama", 8, 512, 8, 8, 64, 1536, 2048, 2048)  # 30 million parameters
SCORING = ("inference", "reference_inference", "reward_inference", "critic_inference")


def drafted(
    train: str, microbatches: int, tokens: int = 1024, spec=LLAMA3_8B, generation="d8t8p1", **keys
) -> Candidate:
    """Actor and critic of one shape in one layout on 64 H800 (keys say other), 64 samples a mini-batch, prompts and
    responses of so many tokens each."""
    rows = {f"parallel__{row}": generation for row in ("generation", *SCORING)}
    rows |= {f"parallel__{model}_train": train for model in ("actor", "critic")}
    defaults = {
        **rows,
        "trainer__hardware": "h800",
        "trainer__recompute": "full",
        "rollout__prompts_per_iteration": 128,
        "rollout__samples_per_prompt": 4,
        "rollout__max_response_tokens": tokens,
        "data__max_prompt_tokens": tokens,
        "algorithm__minibatches": 8,
        "fusion__actor_microbatches": microbatches,
    }
    made = run(**{**defaults, **keys})
    world = ParallelLayout.parse(generation).size
    return four_ranks.drafted(made, dict.fromkeys(("actor", "critic", "reference", "reward"), spec), world, full(made))


def on_cpu(train: str) -> Candidate:
    keys = {"trainer__hardware": "cpu", "trainer__recompute": "none", "trainer__memory_limit_gb": 20.0}
    return drafted(train, 4, 256, SMALL, "d4t1p1", rollout__prompts_per_iteration=32, **keys)


def schedule_seconds(problem: FusionProblem) -> float:
    return float(latency_bound(problem)) * TICK_SECONDS


def minibatch_seconds(draft: Candidate) -> float:
    return schedule_seconds(draft.training.problem) + optimizer_step_seconds(draft.analytic)


def use_hardware(monkeypatch, **changes) -> None:
    """Every machine with other numbers."""
    monkeypatch.setattr(drafts, "hardware_by_name", lambda *name: replace(hardware_by_name(*name), **changes))


def test_starting_collectives_up(monkeypatch):
    """Few tokens over many tensor ranks: without start-ups wide groups look faster than deep pipelines."""

    def seconds():
        return [minibatch_seconds(drafted(*table, tokens=64)) for table in (("d1t8p8", 64), ("d2t4p8", 32))]

    wide, deep = seconds()
    assert wide > 1.1 * deep
    use_hardware(monkeypatch, collective_seconds=0.0, cross_collective_seconds=0.0)
    wide, deep = seconds()
    assert wide < deep


def test_a_decode_step_starts_its_all_reduces_up_once(monkeypatch):
    """Their floor is measured with it on GPUs; on a CPU it is theirs."""
    steps = {}
    for name, change in (("with", {}), ("without", {"collective_seconds": 0.0})):
        use_hardware(monkeypatch, **change)
        steps[name] = drafted("d2t2p16", 32).costs.decode_step_seconds(8, 800)
    assert steps["with"] == steps["without"]
    cpu = AnalyticCost(SMALL, on_cpu("d4t1p1").analytic["generation"].layout, hardware_by_name("cpu"), 4)
    pair = replace(cpu, layout=replace(cpu.layout, dp=2, tp=2))
    started = pair.decode_step_seconds(8, 800)
    quick = replace(pair, hardware=replace(pair.hardware, collective_seconds=0.0)).decode_step_seconds(8, 800)
    assert started - quick == pytest.approx(8 * 2 * 2 * pair.hardware.collective_seconds)  # layers, sums, up and down


def test_optimizer_steps():
    """Many replicas train fast, and reduce many gradients."""
    replicas, deep = drafted("d16t1p4", 4), drafted("d2t2p16", 32)
    assert minibatch_seconds(replicas) > 1.1 * minibatch_seconds(deep)
    assert schedule_seconds(replicas.training.problem) < 0.9 * schedule_seconds(deep.training.problem)


def test_optimizer_steps_of_a_cpu(monkeypatch):
    with_cores(monkeypatch, 4.0)
    on_slow_cores(monkeypatch)
    replicas, pipelines = on_cpu("d4t1p1"), on_cpu("d2t1p2")
    assert minibatch_seconds(replicas) > 1.01 * minibatch_seconds(pipelines)
    assert schedule_seconds(replicas.training.problem) < schedule_seconds(pipelines.training.problem)


def test_nics_of_replicas_on_one_machine():
    """Replicas of d16t1p4 are 4 ranks apart, two on a machine, with a NIC each; of d8t2p4 one is. One ring for all
    would make the first, which trains faster, slower."""
    near, far = drafted("d16t1p4", 4), drafted("d8t2p4", 8)
    assert minibatch_seconds(near) < 0.95 * minibatch_seconds(far)

    def with_one_ring(draft):
        total = minibatch_seconds(draft)
        for task in TRAINED:
            cost = draft.analytic[task]
            whole, group = cost.memory.gradient_bytes() + cost.memory.weights_bytes(), cost.layout.dp
            machine = cost.hardware
            ring = (
                machine.node_link_bandwidth
                if cost.layout.size <= machine.devices_per_node
                else machine.cross_link_bandwidth
            )
            one = ring_gather_seconds(whole, group, ring)
            nics = cost.hardware.devices_per_node // (cost.layout.tp * cost.layout.pp)
            total += one - one / nics
        return total

    assert with_one_ring(near) > 1.05 * with_one_ring(far)


def test_transfers_between_stages():
    """Sixteen stages are two machines apart; four lie within one."""
    deep, replicas = drafted("d4t1p16", 4), drafted("d16t1p4", 1)
    assert deep.training.problem.transfer > 4 * replicas.training.problem.transfer > 0
    assert minibatch_seconds(deep) > 1.02 * minibatch_seconds(replicas)
    steps = [optimizer_step_seconds(draft.analytic) for draft in (deep, replicas)]
    free = [schedule_seconds(replace(draft.training.problem, transfer=0)) for draft in (deep, replicas)]
    assert free[0] + steps[0] < 0.998 * (free[1] + steps[1])


def test_cores_of_a_machine(monkeypatch):
    """Four ranks: with a core for each a pipeline's bubbles cost something, on two cores they leave room for others."""

    def seconds(cores):
        with_cores(monkeypatch, float(cores))
        found = []
        for table in ("d1t1p4", "d2t1p2"):
            draft = on_cpu(table)
            given = draft.training.problem, draft.ranks.shape, draft.host_seconds
            least = float(draft.inputs.cores.least_time(*given)) * TICK_SECONDS
            found.append(max(schedule_seconds(draft.training.problem), least) + optimizer_step_seconds(draft.analytic))
            assert PlanReport.of(make_plan(draft)).seconds.training_fused >= 8 * found[-1] * (1 - 1e-9)
        return found

    on_slow_cores(monkeypatch)
    deep, replicas = seconds(4)
    assert deep > 1.005 * replicas
    deep, replicas = seconds(2)
    assert deep < 0.995 * replicas


def test_ranks_that_share_cores_generate_slower(monkeypatch):
    drafts_of = {}
    for cores in (4, 2):
        with_cores(monkeypatch, float(cores))
        drafts_of[cores] = on_cpu("d1t1p4")
    alone, shared = (drafts_of[cores].costs.decode_step_seconds(8, 800) for cores in (4, 2))
    assert shared == pytest.approx(2 * alone)
    assert "4 ranks share this machine's 2 cores: " in PlanReport.of(make_plan(drafts_of[2])).render()
    assert " cores: work of all at once" not in PlanReport.of(make_plan(drafts_of[4])).render()


def test_threads_of_a_rank_take_cores_of_others(monkeypatch):
    with_cores(monkeypatch, 8.0)
    core = hardware_by_name("cpu")
    cores = machine.SharedCores(8.0, 4, 4)
    assert cores.waiting == 2 and cores.in_turns(core).flops == 4 * core.flops
    assert cores.together(core).flops == 2 * core.flops
    assert cores.rates(core, "training") == cores.in_turns(core) != cores.together(core)
    assert cores.rates(core, "generation") == cores.rates(core, "moves") == cores.together(core)
    assert cores.together(core).node_link_bandwidth == core.node_link_bandwidth
    assert machine.SharedCores(8.0, 4, 2).waiting == 1


def test_contexts_and_communicators(monkeypatch):
    """Without them a table fits whose models are as large as the memory, and which is refused beside another."""
    keys = {"rollout__kv_blocks_per_instance": 64 * 128, "trainer__memory_limit_gb": 15.7}
    keys |= {"trainer__offload_optimizer": "false"}
    report = PlanReport.of(make_plan(drafted("d2t4p8", 32, **keys))).render()
    assert "communicators 1.55 GiB of the process, assumed" in report
    refused = r"memory: inference needs .* the process 3.41 GiB\), but a rank of this h800"
    with pytest.raises(InputError, match=refused):
        drafted("d2t2p16", 32, **keys)
    use_hardware(monkeypatch, communicator_bytes=0, channel_bytes=0)
    assert drafted("d2t2p16", 32, **keys).memory.process == hardware_by_name("h800").process_bytes


def test_host_memory_of_a_node():
    """Copies of the scorers whole on every rank, or cut over eight."""
    whole = {f"parallel__{row}": "d64t1p1" for row in SCORING}
    node = {"trainer__host_memory_gb": 300.0}
    drafted("d2t2p16", 32, **node)
    told = r"host memory: \w+ needs .* on a node of 8 ranks \(copies .* each\), but a node has 279 GiB \(trainer.host"
    with pytest.raises(InputError, match=told):
        drafted("d2t2p16", 32, **whole, **node)
    drafted("d2t2p16", 32, **whole)  # 2 TB, assumed
