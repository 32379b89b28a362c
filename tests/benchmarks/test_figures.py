"""Figures of the benchmarks against numbers worked out by hand."""

from dataclasses import replace

import pytest
from inter_stage import Point, Run, fit_costs
from intra_stage import QUICK, SIDES, Case, cut
from intra_stage_rank import MODELS
from run_report.timeline import simulate_gen_infer

from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.tasks.instance_limits import InstanceLimits

LENGTHS = SampleLengths((1,) * 4, (5, 5, 5, 25))
LIMITS = InstanceLimits(4, 1000.0, 1.0, 1, 4, 1, 25, 100)


def observed_run(seconds=0.4, plan=""):
    """Two instances, decode steps of 10 ms, scoring of 1 ms a token, nothing else costs anything."""
    score = [[tokens, count, 0.001 * tokens] for tokens, count in ((10, 1), (20, 3), (40, 4), (80, 7)) * 3]
    steps = [[batch, context, 0, 0.01] for batch in (1, 2, 8) for context in (10, 30, 90)]
    observations = {"step": [*steps, [4, 4, 4, 0.01]], "score": score}
    observations |= {"load": [[0.0]], "migration": [[9, 0.0]]}
    spans = [("generate", 100.0, 100.1), ("generate", 100.13, 100.3)]
    rank = {"total_seconds": seconds, "generation_seconds": 0.25, "spans": spans, "plan": plan}
    return Run([{**rank, "observations": observations}] * 2)


def point(threshold, *runs):
    costs = fit_costs([observed_run()])
    timeline = simulate_gen_infer(LENGTHS, 2, costs, LIMITS, threshold)
    return Point(threshold, timeline, timeline, runs)


def test_ideal_of_generation_with_inference():
    serial, fused = point(0), point(1)
    # 25 tokens: one by the prefill, 24 steps; 44 tokens are scored, 22 on each instance
    assert serial.predicted.generation_seconds == pytest.approx(0.25)
    assert serial.ideal_seconds(0.044) == pytest.approx(0.25 + 0.022)
    # the freed instance scores from step 4 on: what is ready there has room before generation ends
    assert fused.predicted.trigger_seconds == pytest.approx(0.05)
    assert fused.ideal_seconds(0.044) == pytest.approx(0.25)
    assert fused.ideal_seconds(0.4) == pytest.approx((0.25 + 0.05 + 0.4) / 2)


def trained(actor):
    """Two micro-batches of a critic whose forward takes 1 ms and whose backward 2 ms, and an actor `actor` times it."""
    seconds = {"F": 0.001, "B": 0.002, "B of input": 0.001, "W": 0.001}
    sizes = dict(zip(MODELS, (actor, 1)))
    times = {(m, s, what): [sizes[m] * value] for m in MODELS for s in (0, 1) for what, value in seconds.items()}
    return Case.of(2, times, seed=1)


def test_predictions_of_training_by_hand():
    """9 units serially in each model, the textbook's 1.5 fused."""
    equal, larger = trained(1), trained(2.5)
    predicted = {side: 1000 * equal.predicted(side) for side in SIDES}
    plain = {"serial": 18, "megatron_1f1b": 18, "serial_no_barrier": 17, "fused": 12, "split": 12}
    assert predicted == pytest.approx(plain) and equal.bounds == pytest.approx({"fused": 0.012, "split": 0.012})
    for side, seconds in (("fused", 0.0225), ("split", 0.0215)):
        assert larger.predicted(side) == pytest.approx(seconds) == pytest.approx(larger.bounds[side])


def test_a_trace_is_cut_as_a_run_would_and_drawn_order_is_known():
    sizes = replace(QUICK[0], samples=4, longest=64)
    drawn = SampleLengths((512, 1024, 256, 1024), (512, 1024, 256, 512))  # scaled to 32, 64, 16, 48
    assert cut(sizes, "samples", drawn) == ([(64,), (48,), (32,), (16,)], [2, 0, 3, 1])
    by_tokens, unsorted = cut(sizes, "tokens", drawn)
    assert sorted(map(sorted, by_tokens)) == [[16, 64], [32, 48]] and sorted(unsorted) == [0, 1]
    assert set(by_tokens[unsorted[0]]) == {32, 48}, "the first sample that was drawn is in it"


def test_sides_of_training_run_the_same_instructions():
    case = trained(1)
    words = {
        side: sorted(
            str(one) for phase in case.phases(side) for program in phase.values() for one in program.instructions
        )
        for side in SIDES
        if side != "megatron_1f1b"
    }
    assert words["serial"] == words["serial_no_barrier"] == words["fused"]
    weights = {f"{m}:{s}W{mb}" for m in MODELS for s in (0, 1) for mb in (0, 1)}
    assert set(words["split"]) - set(words["fused"]) == weights and len(case.phases("serial")) == 2
