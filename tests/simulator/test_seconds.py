"""The kernel that prices generation and inference against the time lines that it stands for: equal to the last bit."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples, share
from testkit.sim_helpers import lengths_strategy, limits, linear_cost, long_tail, tight

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.cost_model import RewardCost
from rlhfuse.costs.fits import Grid, Line
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.job_cost import JobCost
from rlhfuse.costs.kernels import Kernels
from rlhfuse.costs.measured import MeasuredCost, TrialCost
from rlhfuse.costs.profiled import ProfiledCost
from rlhfuse.costs.speculation import Speculation
from rlhfuse.simulator import instance_kernel, seconds
from rlhfuse.simulator.cost_numbers import numbers_of
from rlhfuse.simulator.iteration import BatchSimulation
from rlhfuse.simulator.seconds import gen_infer_seconds, is_kernel_ready
from rlhfuse.simulator.threshold import sweep_threshold


@pytest.fixture(scope="module", autouse=True)
def kernel():
    seconds._compile_kernel()  # in this process, or from numba's cache
    assert is_kernel_ready()


@dataclass(frozen=True)
class RewardedJobCost(JobCost):
    """Loads with an overhead, meets, releases and calls a reward function: scalars are asked of any subclass."""

    once: tuple[float, float, float] = (0.0, 0.0, 0.0)
    reward: RewardCost | None = None

    def swap_in_seconds(self) -> float:
        return super().swap_in_seconds() + self.once[0]

    def barrier_seconds(self) -> float:
        return self.once[1]

    def release_seconds(self) -> float:
        return self.once[2]

    def reward_call(self) -> RewardCost | None:
        return self.reward


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
    return RewardedJobCost(
        model(draw(st.integers(1, 80)), tp, False, device, kernels),
        scorers,
        draw(st.booleans()),
        draw(st.floats(0.1, 1.0)),
        once=draw(st.tuples(*[st.sampled_from([0.0, 0.003, 0.7])] * 3)),
        reward=draw(rewards),
    )


rewards = st.none() | st.builds(RewardCost, st.sampled_from([0.0, 0.01, 0.3]), st.integers(1, 3))
slopes = st.floats(0, 1e-3)
guesses = st.builds(
    Speculation, st.floats(0, 1e-4), st.just((6.0, 3.5, 0.3)), st.sampled_from([(2.5, 1.7, 1.1), (1.0, 1.0, 1.0)])
)


@st.composite
def measured_costs(draw):
    def line(count: int) -> Line:
        return Line(draw(st.floats(0, 0.1)), tuple(draw(slopes) for _ in range(count)))

    once = draw(st.tuples(*[st.sampled_from([0.0, 0.003, 0.7])] * 3))
    costs = MeasuredCost(
        line(2), line(2), line(2), line(1), *once, draw(rewards), speculation=draw(st.none() | guesses)
    )
    if draw(st.booleans()):
        return costs
    return TrialCost(line(2), line(2), draw(st.none() | guesses), draw(job_costs()))


@st.composite
def all_limits(draw):
    return tight(
        draw(st.integers(140, 900)),
        max_sequences=draw(st.sampled_from([1, 3, 6, 64])),
        block_tokens=draw(st.sampled_from([1, 16])),
        bs_max=draw(st.integers(1, 8)),
        score_tokens=draw(st.sampled_from([16, 100, 256, 5000])),
        padded_score_tokens=draw(st.sampled_from([0, 0, 140])),
        scoring_models=draw(st.integers(1, 3)),
        early_models=draw(st.integers(0, 1)),
        reward_workers=draw(st.integers(0, 2)),
    )


@examples(400)
@given(
    lengths_strategy(24),
    st.integers(1, 6),
    job_costs() | measured_costs(),
    all_limits(),
    st.sets(st.integers(0, 24), min_size=1, max_size=6),
)
def test_the_kernel_equals_the_time_lines(lengths, instances, costs, lim, thresholds):
    assert numbers_of(costs, 64) is not None
    same_seconds(lengths, instances, costs, lim, {min(threshold, len(lengths)) for threshold in thresholds})


def same_seconds(lengths, instances, costs, lim, thresholds):
    """The time lines by R_t: the kernel's seconds are theirs."""
    simulation, lines = BatchSimulation(lengths, instances, costs, lim), []
    for threshold, found in gen_infer_seconds((lengths,), instances, costs, lim, tuple(thresholds)).items():
        line = simulation.timeline(threshold)
        expected = line.total_seconds, line.generation_seconds, line.migration_seconds
        assert (found.total, found.generation, found.migration) == expected
        lines.append(line)
    return lines


def test_the_kernel_equals_the_time_lines_on_larger_cases():
    """Drawn evenly, with tight caches: samples are preempted, and several instances hand over to several."""
    draw = np.random.default_rng(0)
    preempted = moved = 0
    for _ in range(share(36)):
        samples, instances = int(draw.integers(100, 200)), int(draw.integers(2, 12))
        lengths = long_tail(samples, int(draw.integers(1 << 30)))
        lim = limits(
            kv_capacity_bytes=int(draw.integers(300, 3000)) * 100.0,
            bs_max=int(draw.integers(2, 40)),
            early_models=int(draw.integers(2)),
            scoring_models=3,
        )
        kernels = Kernels() if draw.integers(2) else None
        actor, scorer = model(32, 2, False, "h100", kernels), model(16, 1, True, "h100", kernels)
        costs = RewardedJobCost(actor, (actor, scorer), reward=RewardCost(0.002))
        simulation = BatchSimulation(lengths, instances, costs, lim)
        waiting = [one for run in simulation._runs_at(simulation.moment(samples // 2)) for one in run.waiting]
        preempted += any(one.done for one in waiting)
        lines = same_seconds(lengths, instances, costs, lim, draw.integers(0, samples + 1, 5).tolist())
        moved += sum(line.plan is not None and len(line.plan.destinations) > 1 for line in lines)
    assert preempted >= share(5) and moved >= share(50)


@examples(200)
@given(job_costs() | measured_costs(), st.integers(1, 300), st.integers(0, 300_000), st.integers(1, 400))
def test_numbers_cost_what_the_model_does(costs, batch, tokens, steps):
    numbers, one = numbers_of(costs, 300), np.zeros(1, instance_kernel.INSTANCE)
    one["running"], one["context"] = batch, tokens
    middle = tokens + batch * (steps - 1) / 2
    expected = steps * costs.decode_step_seconds(batch, middle)
    assert instance_kernel.decode_seconds(numbers.decode, one[0], steps) == expected
    if tokens:
        assert instance_kernel.prefill_seconds(numbers, tokens, batch) == costs.prefill_seconds(tokens, batch)
        assert instance_kernel.score_seconds(numbers, tokens, batch) == costs.score_seconds(tokens, batch)


def test_a_sweep_is_the_mean_of_its_batches():
    batches = [long_tail(64, seed) for seed in range(3)]
    found = sweep_threshold(batches, 4, linear_cost(), limits())
    simulations = [BatchSimulation(batch, 4, linear_cost(), limits()) for batch in batches]
    assert len(found.sweep) == 20
    for point in found.sweep:
        lines = [simulation.timeline(point.threshold) for simulation in simulations]
        rows = [(line.total_seconds, line.generation_seconds, line.migration_seconds) for line in lines]
        means = point.fused_seconds, point.generation_seconds, point.migration_seconds
        assert means == tuple(float(np.mean(column)) for column in zip(*rows))


class SlowScoring(JobCost):
    def score_seconds(self, tokens: float, sequences: float) -> float:
        return 3 * super().score_seconds(tokens, sequences)


def test_what_has_no_form_in_numbers_is_simulated_by_time_lines():
    """A subclass that scores differently, a subclass of the roofline, and measured grids."""

    class OtherRoofline(AnalyticCost):
        pass

    actor = model(8, 1, False, "h100", None)
    grid, flat = Grid(((1.0, 64.0), (1.0, 400.0)), (0.01, 0.02, 0.03, 0.05)), Grid(((1.0,),), (0.001,))
    facts = {"actor_inference_tp": 1, "generation_tp": 1}
    profiled = ProfiledCost(facts, grid, grid, {"actor": grid}, 0.5, flat, None, {})
    others = SlowScoring(actor, (actor,)), JobCost(OtherRoofline(**vars(actor)), (actor,)), profiled
    lengths = long_tail(40)
    for costs in others:
        assert numbers_of(costs, 64) is None
        found = gen_infer_seconds((lengths,), 4, costs, limits(), (0, 12))
        simulation = BatchSimulation(lengths, 4, costs, limits())
        assert [found[n].total for n in (0, 12)] == [simulation.timeline(n).total_seconds for n in (0, 12)]
    plain = gen_infer_seconds((lengths,), 4, JobCost(actor, (actor,)), limits(), (0,))[0].total
    assert gen_infer_seconds((lengths,), 4, others[0], limits(), (0,))[0].total > plain


@pytest.mark.parametrize(
    "instances, threshold, changes, message",
    [
        (0, 0, {}, "0 generation instances"),
        (2, 65, {}, "R_t = 65: .* to the 64 samples"),
        (2, -1, {}, "R_t = -1"),
        (2, 0, {"max_output_tokens": 20}, "clip them first"),
    ],
)
def test_refusals_are_those_of_the_time_lines(instances, threshold, changes, message):
    for costs in (linear_cost(), replace(linear_cost(), swap_in=1.0)):
        with pytest.raises(InputError, match=message):
            gen_infer_seconds((long_tail(64),), instances, costs, limits(**changes), (threshold,))


def test_nothing_is_compiled_unless_it_is_asked_for(tmp_path, programs):
    """The first sweep on a machine does not wait for the compiler, and finds the same."""
    program = (
        "from testkit.sim_helpers import limits, linear_cost, long_tail\n"
        "from rlhfuse.simulator import seconds\n"
        "from rlhfuse.simulator.threshold import sweep_threshold\n"
        "print(sweep_threshold(long_tail(64), 4, linear_cost(), limits()))\n"
        "assert not seconds.seconds_by_threshold.signatures\n"
    )
    done = programs.python("-c", program, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout.strip() == str(sweep_threshold(long_tail(64), 4, linear_cost(), limits())), done.stderr
    assert not list(tmp_path.rglob("*.nbi"))
