"""Terms of the price of a table of layouts: without one of them another table is predicted to be faster, or fits."""

import pytest
from testkit import four_ranks
from testkit.four_ranks import full, on_slow_cores, run, with_cores

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.planning.candidate import Candidate
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


def test_host_memory_of_a_node():
    """Copies of the scorers whole on every rank, or cut over eight."""
    whole = {f"parallel__{row}": "d64t1p1" for row in SCORING}
    node = {"trainer__host_memory_gb": 300.0}
    drafted("d2t2p16", 32, **node)
    told = r"host memory: \w+ needs .* on a node of 8 ranks \(copies .* each\), but a node has 279 GiB \(trainer.host"
    with pytest.raises(InputError, match=told):
        drafted("d2t2p16", 32, **whole, **node)
    drafted("d2t2p16", 32, **whole)  # 2 TB, assumed
