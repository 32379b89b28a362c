"""The example runs on GPUs fit the machines they name; what the plan says of MFU and HBM follows from its inputs."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from testkit.four_ranks import drafted, full, shared_plan
from testkit.llama3 import SIZES, llama3
from testkit.paths import ROOT

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.load import load_config, read_specs
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.flops import TRAINING_FORWARDS, forward_flops
from rlhfuse.costs.forms.training import MicrobatchTokens
from rlhfuse.costs.hardware import data_sheets, hardware_by_name
from rlhfuse.costs.kernels import Kernels
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


def test_the_figures_are_what_a_reader_works_out(sizes):
    draft = example("llama3_8b_8gpus.yaml", sizes, "trainer.hardware=h800")
    use, sheet = at_the_bound(draft), data_sheets()["h800"]
    spec = draft.run.specs["actor"]
    samples = [2048] * 768
    flops = TRAINING_FORWARDS * sum(forward_flops(spec, samples, sum(samples) // 2, head) for head in (False, True))
    assert use.training_flops == pytest.approx(flops)
    assert use.mfu == pytest.approx(flops / (8 * sheet.flops * use.training_seconds))
    weights = 32 * spec.layer_parameters + spec.embedding_parameters
    read = (weights * 2 + 192 * (1024 + 512) * spec.kv_bytes_per_token(2)) / 2  # of two tensor ranks
    assert use.decode_bytes == pytest.approx(read)
    sums = max(5e-6, 1.5 * 192 * 4096 * 2 / 120e9)  # of two ranks by the switch
    layer, rate = spec.layer_parameters / 2, 0.8 * sheet.memory_bandwidth
    products = 32 * (max(2 * layer * 192 / (0.5 * sheet.flops), 2 * layer / rate) - 2 * layer / rate)  # beside reading
    step = read / rate + products + 32 * (9 * 1.5e-6 + 2 * sums) + 192 * 128256 / 2 * 8 / 2.68e12
    assert use.decode_seconds == pytest.approx(step, rel=1e-3)
    assert use.hbm_share == pytest.approx(read / (sheet.memory_bandwidth * step), rel=1e-3)


def test_seconds_of_training_are_products_bytes_and_all_reduces():
    """Llama-3-8B on one rank, 4096 tokens, 1024 of them of responses: every term by hand."""
    spec = ModelSpec("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192)
    machine, tokens, outputs = hardware_by_name("h200"), 4096, 1024
    made = AnalyticCost(spec, ParallelLayout.parse("d2t1p4"), machine, 2, kernels=Kernels())
    flops = 2 * spec.layer_parameters * tokens + 4 * 4096 * tokens * (tokens + 1) / 2
    products, rate = flops / machine.flops, machine.memory_bandwidth
    micro = MicrobatchTokens(tokens, 1, outputs)
    seconds = made.stage_seconds(micro)
    forward = tokens * 2 * (10 * 4096 + 4 * 4096 + 4 * 1024 + 3 * 14336) / rate
    backward = tokens * 2 * (12 * 4096 + 6 * 4096 + 6 * 1024 + 5 * 14336) / rate
    assert seconds.layer[0] == pytest.approx(products + forward)
    assert seconds.layer[1] == pytest.approx(2 * products + backward)
    few = made.stage_seconds(MicrobatchTokens(512, 1, 512))  # the float32 sums take longer than the product then
    product, weights = 2 * spec.layer_parameters * 512 / machine.flops, 8 * spec.layer_parameters / rate
    flops = 2 * spec.layer_parameters * 512 + 4 * 4096 * 512 * 513 / 2
    assert weights > product
    expected = 2 * flops / machine.flops + backward / 8 + weights - product
    assert few.layer[1] == pytest.approx(expected)
    head = 2 * 4096 * 128256 * outputs / machine.flops
    ahead = 3 * head + 18 * outputs * 128256 / rate + 8 * 4096 * 128256 / rate
    assert seconds.ends[-1] == (pytest.approx(ahead), 0)
    table = 128256 * 4096 * (2 + 2 + 8) + 3 * 2 * tokens * 4096  # zeroed and read in bfloat16, its sum in float32; rows
    assert seconds.ends[0] == pytest.approx((0, table / rate)) and seconds.ends[1:3] == ((0, 0), (0, 0))
    recomputed = replace(made, recompute="full").stage_seconds(micro)
    assert recomputed.layer[1] - seconds.layer[1] == pytest.approx(seconds.layer[0])
    some = replace(made, recompute="selective").stage_seconds(micro)  # norms 2 in and out each, SwiGLU 2 in and 1 out
    assert some.layer[0] == seconds.layer[0] and some.ends == seconds.ends
    assert some.layer[1] - seconds.layer[1] == pytest.approx(tokens * 2 * (4 * 4096 + 3 * 14336) / rate)
    own = made.memory.parameters()
    exchanged = (4 + 2) * own / 2 / machine.node_link_bandwidth + 2 * machine.collective_seconds
    assert made.optimizer_step_seconds() == pytest.approx(own * (4 + 34 / 2) / rate + exchanged)


def test_what_was_measured_of_few_tokens_and_of_launches_backwards_counts():
    """A layer on one rank, and its launches; where those backwards were not measured they are two forwards'."""
    spec = ModelSpec("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192)
    machine = replace(hardware_by_name("h200"), launch_seconds=1e-3)

    def cost(**changes) -> AnalyticCost:
        hardware = replace(machine, **{key: value for key, value in changes.items() if key != "recompute"})
        again = changes.get("recompute", "none")
        return AnalyticCost(spec, ParallelLayout.parse("d1t1p4"), hardware, 2, kernels=Kernels(), recompute=again)

    def layer(tokens: int, **measured: float) -> tuple[float, float]:
        return cost(**measured).stage_seconds(MicrobatchTokens(tokens, 1, 0)).layer

    assert layer(16) == layer(16, launch_seconds=0.0) and sum(layer(16)) < 3e-3  # the device alone
    assert cost().host_seconds == pytest.approx((8 * 3e-3,) * 4)
    assert cost(backward_launch_seconds=1.5e-3).host_seconds == pytest.approx((8 * 2.5e-3,) * 4)
    assert cost(recompute="full").host_seconds == pytest.approx((8 * 4e-3,) * 4)
    assert replace(cost(), hardware=hardware_by_name("cpu")).host_seconds == (0,) * 4  # its layers take turns
    (forward, backward), slower = layer(4096), layer(4096, half_rate_tokens=300)
    more = 2 * spec.layer_parameters * 300 / machine.flops  # a product of 4096 tokens takes as long as one of 4396
    assert slower == pytest.approx((forward + more, backward + 2 * more))
    made = [AnalyticCost(spec, ParallelLayout(1, 1, 1), replace(machine, half_rate_tokens=n), 2) for n in (0, 300)]
    assert made[0].decode_step_seconds(8, 800) == made[1].decode_step_seconds(8, 800)  # which memory bounds


def test_a_cpu_has_no_data_sheet():
    assert PlanReport.of(shared_plan()).efficiency is None
