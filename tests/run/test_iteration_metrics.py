"""Metrics that are computed from other metrics."""

import pytest
import torch
from testkit.rollouts import batch_of

from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.costs.flops import IterationFlops
from rlhfuse.fusion.inter.report import GenInferReport
from rlhfuse.fusion.intra.step_report import StepReport
from rlhfuse.fusion.intra.training_step import MinibatchResult
from rlhfuse.parallel.optimizer import StepResult
from rlhfuse.ppo.rollout import Rollout
from rlhfuse.run.iteration_metrics import (
    IterationStats,
    failing_tools,
    fusion_metrics,
    lengths_of,
    memory_metrics,
    mfu_metrics,
    reward_metrics,
    spared_metrics,
    training_metrics,
    turn_metrics,
)
from rlhfuse.run.sampling.tool_caller import ToolStats
from rlhfuse.simulator.lengths import Turn

SECONDS = {"timing_s/train": 4.0, "fusion/gen_infer_seconds": 2.0, "timing_s/step": 10.0}


def test_utilisation_is_of_all_ranks_for_the_seconds_that_it_took():
    flops = IterationFlops(generation=3e12, inference=1e12, training={"actor": 8e12, "critic": 2e12})
    wanted = {"actor": 8 / (4 * 4), "critic": 2 / (4 * 4), "gen_infer": 4 / (2 * 4), "step": 14 / (10 * 4)}
    named = {f"perf/mfu/{name}": share for name, share in wanted.items()}
    assert mfu_metrics(flops, SECONDS, 4, 1e12) == pytest.approx({**named, "actor/mfu": wanted["actor"]})
    alone = IterationFlops(3e12, 0.0, {"actor": 8e12})
    assert "perf/mfu/critic" not in mfu_metrics(alone, SECONDS, 4, 1e12)
    assert mfu_metrics(alone, SECONDS, 4, None) == {}


def minibatch(tokens: int, lengths, parts: int) -> MinibatchResult:
    step, each = StepResult(2.0, True, 1e-3), sum(map(sum, lengths)) // parts
    report = StepReport((), {}, {"actor": step}, (), 0, 0.0, 0, 0.0)
    return MinibatchResult({}, tokens, lengths, (each,) * parts, {"actor": step}, report)


def test_what_was_left_out_counts_in_scores_and_not_in_means_of_training():
    """Two passes over three samples of 2 tokens: of the first one nobody needs the gradient, and once it was computed
    to fill a micro-batch."""
    algorithm = AlgorithmConfig(name="rloo", kl_coef=0, epochs=2, skip_zero_gradients=True)
    batch = batch_of([0.0, 1.0, 2.0]).with_fields(advantages=torch.tensor([0.0, 1.0, -1.0]))
    results = [minibatch(2, ((1, 1), (1, 1)), 2), minibatch(3, ((1, 1),) * 3, 3)]
    assert spared_metrics(batch, algorithm, results) == {
        "training/zero_gradient/samples": pytest.approx(1 / 6),
        "training/zero_gradient/tokens": pytest.approx(1 / 6),
        "lengths/zero_gradient": [1, 0, 0],
    }
    assert spared_metrics(batch, algorithm.with_(skip_zero_gradients=False), results) == {}
    sums = {"pg_loss": 10.0, "entropy": 5.0, "logprob_abs_diff": 4.0}
    made = training_metrics(results, [IterationStats([{"actor": sums}, {"actor": sums}], {}, 0.0, {}, [])])
    assert (made["actor/pg_loss"], made["actor/entropy"]) == (20 / 5, 10 / 5), "means over computed response tokens"
    assert made["rollout/train_logprob_abs_diff"] == 4 / 2
    assert made["global_seqlen/max"] == made["global_seqlen/balanced_max"] == 2


def test_recorded_graphs_are_told_where_some_were():
    report = GenInferReport(generation_seconds=3.0, total_seconds=4.0, capture_seconds=0.5)
    found = fusion_metrics(report, 0, 1)
    assert (found["timing_s/graph_capture"], found["timing_s/gen"]) == (0.5, 3.0)
    assert "timing_s/graph_capture" not in fusion_metrics(GenInferReport(), 0, 1)


def test_memory_is_that_of_the_fullest_rank():
    peaks = {"base": 10**9, "generation": 3 * 10**9}, {"base": 2 * 10**9, "generation": 2500 * 10**6}
    assert memory_metrics([IterationStats([], {}, 0.0, of_rank, []) for of_rank in peaks]) == {
        "perf/peak_memory_gb/base": 2.0,
        "perf/peak_memory_gb/generation": 3.0,
        "perf/max_memory_allocated_gb": 3.0,
    }


def test_turns_are_told_where_there_are_tools():
    """By sample id, in order of the batch."""
    batch = batch_of([0.0, 1.0])
    assert turn_metrics(batch, GenInferReport()) == {} and lengths_of(batch).turns == ()
    first, second = batch.sample_ids.tolist()
    tokens = batch.response_lengths.tolist()
    turns = {second: [[tokens[1], 0.0, 0]], first: [[tokens[0], 0.0, 0]]}
    assert turn_metrics(batch, GenInferReport(turns=turns)) == {"lengths/turns": [turns[first], turns[second]]}
    assert lengths_of(batch, turns=turns).turns == ((Turn(tokens[0], 0.0, 0),), (Turn(tokens[1], 0.0, 0),))


def test_tools_that_always_fail_are_told():
    leaders = [ToolStats(failed={"a": "x", "b": "y"}, answered={"c"}), ToolStats(failed={"a": "z"}, answered={"b"})]
    assert failing_tools(leaders) == {"a": "z"} and failing_tools([]) == {}


def test_a_failed_sample_is_in_no_part_of_a_mixed_score():
    rollouts = [Rollout(i, (1,), (2,), torch.zeros(1), "stop", score=float(i), failed=i == 1) for i in range(3)]
    report = GenInferReport(rollouts=rollouts, function_scores={0: 1.0, 1: 50.0, 2: 4.0})
    assert reward_metrics(report) == {"reward/model/mean": 1.0, "reward/function/mean": 2.5}
