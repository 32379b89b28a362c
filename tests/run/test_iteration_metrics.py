"""Metrics that are computed from other metrics."""

import pytest

from rlhfuse.costs.flops import IterationFlops
from rlhfuse.fusion.inter.report import GenInferReport
from rlhfuse.run.iteration_metrics import IterationStats, fusion_metrics, memory_metrics, mfu_metrics

SECONDS = {"timing_s/train": 4.0, "fusion/gen_infer_seconds": 2.0, "timing_s/step": 10.0}


def test_utilisation_is_of_all_ranks_for_the_seconds_that_it_took():
    flops = IterationFlops(generation=3e12, inference=1e12, training={"actor": 8e12, "critic": 2e12})
    wanted = {"actor": 8 / (4 * 4), "critic": 2 / (4 * 4), "gen_infer": 4 / (2 * 4), "step": 14 / (10 * 4)}
    named = {f"perf/mfu/{name}": share for name, share in wanted.items()}
    assert mfu_metrics(flops, SECONDS, 4, 1e12) == pytest.approx({**named, "actor/mfu": wanted["actor"]})
    alone = IterationFlops(3e12, 0.0, {"actor": 8e12})
    assert "perf/mfu/critic" not in mfu_metrics(alone, SECONDS, 4, 1e12)
    assert mfu_metrics(alone, SECONDS, 4, None) == {}


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
