"""Generation's weights and KV cache stay on a GPU where every phase of every rank has room for them."""

from dataclasses import replace

import pytest
from testkit.four_ranks import SPECS, drafted, run, shared_plan

from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.planning.memory.memory_budget import KEEPING_PART, GenerationMemory, MemoryBudget, PhaseMemory, RankMemory
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.report.reasons import of_keeping
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.schedule.ir.evaluate import evaluate

GB = 10**9
GPU = dict(trainer__hardware="h100")


def phase(name: str, **parts: int) -> PhaseMemory:
    none = dict.fromkeys(("weights", "optimizer", "gradients", "activations", "kv", "buckets", "host"), 0)
    return PhaseMemory(name, **none | {key: value * GB for key, value in parts.items()})


def budget(limit: float, hardware: str = "h100", inference: int = 9, graphs: int = 1) -> MemoryBudget:
    """Two kinds of ranks: 4 and 2 GB of weights that train; 3 of the copy for generation, 5 of its cache."""
    kinds = tuple(
        RankMemory(
            (place, 0),
            place,
            (
                phase("start", weights=trained, gradients=trained),
                phase("moves", weights=trained + 3 + 2, buckets=1),
                phase("generation", weights=trained + 3, kv=5, activations=1),
                phase("inference", weights=trained + inference, activations=2),
                phase("training", weights=trained, gradients=4, activations=1),
            ),
        )
        for place, trained in enumerate((4, 2))
    )
    generation = GenerationMemory(3 * GB, 5 * GB, graphs * GB, 0)
    machine = replace(hardware_by_name(hardware), process_bytes=0)
    return MemoryBudget(kinds, machine, limit, "of a test", 100.0, generation)


def test_what_stays_is_in_every_phase_once():
    kept = budget(80 * GB).with_generation_kept().phases([6 * GB, 0])
    assert [p.phase for p in kept] == ["start", "moves", "generation", "inference", "training"]
    assert [p.device / GB for p in kept] == [8, 10 + 5, 13, 15 + 3 + 5, 4 + 4 + 7 + 3 + 5]
    assert [p.kv / GB for p in kept] == [0, 5, 5, 5, 5] and [p.weights / GB for p in kept] == [4, 9, 7, 16, 7]


@pytest.mark.parametrize("activations, needed", [((0, 0), 24), ((6, 0), 24), ((10, 0), 28), ((0, 13), 29)])
def test_it_stays_where_the_fullest_phase_of_any_rank_leaves_a_margin(activations, needed):
    held, enough = [count * GB for count in activations], needed * GB / KEEPING_PART
    assert budget(80 * GB).keeping_bytes(held) == needed * GB
    assert budget(enough * 1.0001).keeps_generation(held)
    assert not budget(enough * 0.9999).keeps_generation(held)
    assert not budget(80 * GB, "cpu").keeps_generation(held)


def test_the_reason_says_which_and_what_it_takes():
    (yes,), (no,), (other,) = (
        of_keeping(made, [10 * GB, 0]) for made in (budget(80 * GB), budget(29 * GB), budget(29 * GB, inference=20))
    )
    assert yes == (
        "kept: the weights and cache of generation stay on the device between iterations (8.38 GiB), graphs are "
        "recorded once"
    )
    assert no == (
        "released after generation: with its weights and cache (8.38 GiB) training would need 26.1 GiB of 24.3 GiB, "
        "90% of the limit, graphs are recorded in each iteration; a cache of 2.89 GiB (rollout.kv_blocks_per_instance) "
        "would let them stay"
    )
    assert "inference would need 32.6 GiB" in other and "would let" not in other
    for cache, stays in ((2.88, True), (2.9, False)):
        less = replace(budget(29 * GB), generation=GenerationMemory(3 * GB, int(cache * 2**30), GB, 0))
        assert less.keeps_generation([10 * GB, 0]) == stays
    assert "graphs" not in of_keeping(budget(80 * GB, graphs=0), [0, 0])[0]
    assert of_keeping(budget(80 * GB, "cpu"), [0, 0]) == ()


def test_it_goes_where_the_optimizer_has_to():
    roomy = budget(80 * GB)
    leaving = roomy.with_optimizer_offloaded()
    assert roomy.keeps_generation([0, 0]) and not leaving.keeps_generation([0, 0])
    (why,) = of_keeping(leaving, [0, 0])
    assert why.startswith("released after generation, for the optimizer too leaves the device, graphs are recorded in")


def test_a_plan_keeps_a_small_model_on_gpus_and_none_on_cpus():
    cpu, gpu = PlanReport.of(shared_plan()), PlanReport.of(shared_plan(**GPU))
    assert not cpu.memory.keeps_generation and cpu.memory.phases[-1].kv == 0
    assert gpu.memory.keeps_generation and [p.kv for p in gpu.memory.phases] == [0] + 4 * [gpu.memory.phases[2].kv]
    assert "kept: the weights and cache of generation" in gpu.render()
    graphless = PlanReport.of(shared_plan(**GPU, rollout__cuda_graphs=False))
    assert graphless.memory.keeps_generation and "graphs are recorded" not in graphless.render()


def test_where_there_is_no_room_nothing_else_changes():
    """A limit between what the phases need with generation kept and without: schedule, cap and cache are the same."""
    roomy, plan = drafted(run(**GPU), SPECS, 4), shared_plan(**GPU)
    peaks = evaluate(plan.likeliest).node_peak_memory
    without, kept = roomy.memory.needed(roomy.memory.fullest(peaks)), roomy.memory.keeping_bytes(peaks)
    assert without < kept
    limit = (without + kept / KEEPING_PART) / 2 / 1e9
    tight = run(**GPU, parallel__headroom=0.0, trainer__memory_limit_gb=limit)
    draft = drafted(tight, SPECS, 4)
    report = PlanReport.of(make_plan(draft))
    assert not report.memory.keeps_generation and "released after generation: with its weights" in report.render()
    assert draft.config.rollout.kv_blocks_per_instance == roomy.config.rollout.kv_blocks_per_instance == 0
    assert draft.training.problem.static_memory == roomy.training.problem.static_memory  # keeping is no part of it
    assert replace(draft.training.problem, memory_cap=None) == replace(roomy.training.problem, memory_cap=None)
