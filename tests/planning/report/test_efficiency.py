"""The example runs on GPUs fit the machines they name; what the plan says of MFU and HBM follows from its inputs."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from testkit.four_ranks import drafted, full, shared_plan
from testkit.llama3 import SIZES, llama3
from testkit.paths import ROOT

from rlhfuse.base.errors import InputError
from rlhfuse.config.load import load_config, read_specs
from rlhfuse.decisions.layouts import planned_world_size
from rlhfuse.planning.candidate import Candidate
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.price import minibatch_seconds
from rlhfuse.planning.report.efficiency import Efficiency, efficiency
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.rooflines import optimizer_step_seconds
from rlhfuse.planning.training.stage_cuts import stage_balances
from rlhfuse.planning.training.training_problem import TICK_SECONDS
from rlhfuse.schedule.bounds.bounds import latency_bound


@pytest.fixture(scope="module")
def sizes(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("llama3")
    return {size: llama3(base, size) for size in SIZES}


def example(name: str, sizes: dict[str, Path], *overrides: str) -> Candidate:
    """The draft of examples/NAME, its models found by the size that their names say."""
    given = load_config(ROOT / "examples" / name)
    paths = {role: getattr(given, role).path for role in given.roles()}
    found = {f"{role}.path={sizes[re.search(r'(70B|8B)', path).group()]}" for role, path in paths.items()}
    config = load_config(ROOT / "examples" / name, [*found, *overrides])
    return drafted(config, read_specs(config), planned_world_size(config, None), full(config))


def at_the_bound(draft: Candidate) -> Efficiency:
    """Where the schedule is 1% longer than its lower bound."""
    makespan = 1.01 * float(latency_bound(replace(draft.training.problem, memory_cap=None))) * TICK_SECONDS
    seconds = minibatch_seconds(draft, lambda rung: makespan) + optimizer_step_seconds(draft.analytic)
    return efficiency(draft, draft.batch.optimizer_steps * seconds)


def test_the_run_that_the_readme_names_fits_eight_h100(sizes):
    text = (ROOT / "README.md").read_text()
    (name,) = re.findall(r"rlhfuse-train --ranks 8 --config examples/(\S+)", text)
    assert f"`examples/{name}`" in text and "are for eight and 64 H100" in text
    draft = example(name, sizes, "fusion.search_seconds=2")
    plan = PlanReport.of(make_plan(draft))
    assert (plan.ranks.count, plan.ranks.hardware, plan.memory.limit) == (8, "h100", 80e9)
    assert all(plan.memory.needed_bytes(phase) <= plan.memory.limit for phase in plan.memory.phases)
    use = plan.efficiency
    assert use.mfu >= 0.4 and use.hbm_share >= 0.7 and use.training_seconds == plan.seconds.training_fused
    lines = plan.render()
    assert f"training {use.mfu:.1%} MFU" in lines
    assert "above the mean" in lines


def test_70b_on_64_h100_fits_and_tells_what_stands_in_the_way(sizes):
    draft = example("llama3_70b_64gpus.yaml", sizes)  # raises where it does not fit
    assert draft.run.world_size == 64 and {str(task.layout)[:6] for task in draft.tasks if task.training} == {"d2t4p8"}
    balances = stage_balances(draft.tasks, draft.analytic, draft.costs, draft.longest_microbatch)
    assert max(balance.slowest_seconds / balance.mean_seconds - 1 for balance in balances) < 0.10
    use = at_the_bound(draft)
    assert use.mfu == pytest.approx(0.43, abs=0.02)
    assert 0.6 < use.hbm_share < 0.7
    by_nccl = at_the_bound(example("llama3_70b_64gpus.yaml", sizes, "rollout.all_reduce=nccl"))
    assert by_nccl.decode_seconds > use.decode_seconds + 0.5e-3 and by_nccl.hbm_share < use.hbm_share


def test_a_run_that_does_not_fit_is_refused(sizes):
    """Unless the optimizer may leave."""
    whole = "parallel.generation=d8t1p1", "parallel.inference=d8t1p1", "trainer.memory_limit_gb=78"
    with pytest.raises(InputError, match=r"memory: .* of this h100 has 72.6 GiB; set trainer.offload_optimizer=auto"):
        example("llama3_8b_8gpus.yaml", sizes, *whole, "trainer.offload_optimizer=false")
    assert example("llama3_8b_8gpus.yaml", sizes, *whole).memory.offload


def test_a_cpu_has_no_data_sheet():
    assert PlanReport.of(shared_plan()).efficiency is None
