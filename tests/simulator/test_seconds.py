"""Seconds by R_t: compiled costs are those of the tables, and a sweep's seconds those of the time lines."""

import itertools

import numpy as np
import pytest
from cost_profiles.measured_grid import grid_of
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from run_report.timeline import simulate_gen_infer
from testkit.profiles import examples
from testkit.sim_helpers import limits, linear_cost, long_tail, with_turns

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.analytic_table import analytic_table
from rlhfuse.costs.fits import Grid, Line
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.kernels import Kernels
from rlhfuse.costs.measured import MeasuredCost
from rlhfuse.costs.profiled import ProfiledCost
from rlhfuse.costs.speculation import Speculation, StepCosts
from rlhfuse.simulator import cost_numbers
from rlhfuse.simulator.simulation import Simulation
from rlhfuse.simulator.threshold import sweep_threshold


def model(layers: int, tp: int, scalar_head: bool, device: str, kernels: Kernels | None) -> AnalyticCost:
    spec = ModelSpec("llama", layers, 1024, 16, 8, 64, 2816, 32000, 4096)
    return AnalyticCost(spec, ParallelLayout(1, tp, 1), hardware_by_name(device), 2, scalar_head, kernels=kernels)


@st.composite
def job_costs(draw):
    tp = draw(st.sampled_from([1, 2, 8]))
    device = draw(st.sampled_from(["h100", "a100", "h800", "cpu"]))
    kernels = draw(st.sampled_from([None, Kernels(), Kernels(switch_sums=False)]))
    sizes = st.tuples(st.integers(1, 80), st.sampled_from([t for t in (1, 2, 8) if tp % t == 0]), st.booleans())
    scorers = tuple(model(*size, device, kernels) for size in draw(st.lists(sizes, max_size=3)))
    actor = model(draw(st.integers(1, 80)), tp, False, device, kernels)
    return analytic_table(actor, scorers, draw(st.booleans()), draw(st.floats(0.1, 1.0)))


slopes = st.floats(0, 1e-3)
guesses = st.builds(
    Speculation, st.floats(0, 1e-4), st.just((6.0, 3.5, 0.3)), st.sampled_from([(2.5, 1.7, 1.1), (1.0, 1.0, 1.0)])
)


@st.composite
def measured_costs(draw):
    def line(count: int) -> Line:
        return Line(draw(st.floats(0, 0.1)), tuple(draw(slopes) for _ in range(count)))

    speculation = draw(st.none() | guesses)
    costs = MeasuredCost(line(2), line(2), line(2), line(1), 0.5, 0.0, 0.0, speculation=speculation)
    if draw(st.booleans()):
        return costs.table
    return draw(job_costs()).with_steps(StepCosts(line(2), line(2), draw(st.none() | guesses)))


@st.composite
def profiled_costs(draw):
    def grid(*most: int) -> Grid:
        axes = [sorted(draw(st.sets(st.integers(1, count), min_size=1, max_size=4))) for count in most]
        points = list(itertools.product(*axes))
        return grid_of(axes, {point: draw(st.floats(0, 0.1)) for point in points})

    facts = {"generation_tp": 2, "actor_inference_tp": 2, "reward_inference_tp": 1}
    score = {"actor": grid(400, 64), "reward": grid(400, 64)}
    return ProfiledCost(facts, grid(64, 400), grid(400, 64), score, 0.5, grid(10_000), None, {}).table


@njit(error_model="numpy")
def compiled(c, batch, context, tokens):
    """Seconds by the compiled forms, in the order of `CostTable`'s methods below."""
    return (
        cost_numbers.decode_seconds(c, batch, context),
        cost_numbers.prefill_seconds(c, tokens, batch),
        cost_numbers.score_seconds(c, tokens, batch),
        cost_numbers.transfer_seconds(c, 7.0 * tokens),
    )


@examples(400)
@given(job_costs() | measured_costs() | profiled_costs(), st.integers(1, 300), st.integers(0, 300_000))
def test_a_kernel_prices_what_the_table_does(costs, batch, tokens):
    found = compiled(cost_numbers.cost_numbers(costs, 300), batch, tokens / 2, tokens)
    assert found == (
        costs.decode_step_seconds(batch, tokens / 2),
        costs.prefill_seconds(tokens, batch),
        costs.score_seconds(tokens, batch),
        costs.migration_seconds(7.0 * tokens),
    )


def test_a_sweep_is_the_mean_of_its_batches_time_lines():
    """R_t in one pass, with tight caches, finds what each time line says, whatever the kind of costs."""
    actor, critic = (model(8, tp, False, "h100", Kernels()) for tp in (2, 1))
    grid, flat = Grid(((1.0, 64.0), (1.0, 400.0)), (0.01, 0.02, 0.03, 0.05)), Grid(((1.0,),), (0.001,))
    facts = {"actor_inference_tp": 1, "generation_tp": 1}
    profiled = ProfiledCost(facts, grid, grid, {"actor": grid}, 0.5, flat, None, {}).table
    plain = [long_tail(64, seed) for seed in range(3)]
    pausing, lim = list(map(with_turns, plain, range(3))), limits(kv_capacity_bytes=1e5, early_models=1)
    priced = (linear_cost(reward=0.02), analytic_table(actor, (actor, critic)), profiled)
    for costs, batches in (*((costs, plain) for costs in priced), (priced[0], pausing)):
        found = sweep_threshold(batches, 4, costs, lim)
        assert len(found.sweep) == 20
        for point in found.sweep:
            lines = [simulate_gen_infer(batch, 4, costs, lim, point.threshold) for batch in batches]
            rows = [(line.total_seconds, line.generation_seconds, line.migration_seconds) for line in lines]
            means = point.fused_seconds, point.generation_seconds, point.migration_seconds
            assert means == tuple(float(np.mean(column)) for column in zip(*rows))


@pytest.mark.parametrize(
    "instances, threshold, changes, message",
    [
        (0, 0, {}, "0 generation instances"),
        (2, 65, {}, "R_t = 65: .* to the 64 samples"),
        (2, -1, {}, "R_t = -1"),
        (2, 0, {"max_output_tokens": 20}, "clip them first"),
    ],
)
def test_refusals(instances, threshold, changes, message):
    with pytest.raises(InputError, match=message):
        Simulation((long_tail(64),), instances, linear_cost(), limits(**changes)).seconds((threshold,))
