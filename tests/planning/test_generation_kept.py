"""Generation's weights and KV cache stay on a GPU where every phase of every rank has room for them."""

from dataclasses import replace

from testkit.four_ranks import SPECS, drafted, run, shared_plan

from rlhfuse.planning.memory.memory_budget import KEEPING_PART
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.schedule.ir.evaluate import evaluate

GPU = dict(trainer__hardware="h100")


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
