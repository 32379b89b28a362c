"""Runs of two ranks that train in every order that fusion.intra_stage names, their backwards split or whole: the same
bits, also after a change."""

from __future__ import annotations

import json

import pytest
from test_train_algorithms import job
from testkit.tiny import write_run

from rlhfuse.run.report.compare import compare_runs
from rlhfuse.run.report.forecast import Forecaster
from rlhfuse.run.report.run_files import RunFiles
from rlhfuse.schedule.io import load_schedule

POOL_RANKS = 2


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orders")
    return write_run(folder, trainer__iterations=2, rollout__max_response_tokens=12, trainer__save_every=1)


SPLIT_SHARED = ("fusion.intra_stage=time_sharing", "fusion.split_backward=true")


def layouts(text: str) -> tuple[str, ...]:
    return tuple(f"parallel.{model}_train={text}" for model in ("actor", "critic"))


def assert_equal(one, other):
    for compared in compare_runs(one, other):
        assert compared.entries > 10 and not compared.differences, compared


@pytest.mark.parametrize("layout, rules", [("d1t1p2", ("time_sharing", "serial")), ("d1t1p2v2", ("interleaved",))])
def test_every_order_trains_the_same(workers, config, layout, rules):
    """Searched with split backwards, by rule with whole ones."""
    searched = config.parent / f"{layout}-search"
    workers.run(job, config, searched, (*layouts(layout), "fusion.split_backward=true"))
    assert {"actor W", "critic W"} < {span.kind for span in Forecaster(RunFiles.read(searched)).spans(1)}
    assert all(pipeline.split for pipeline in load_schedule(searched / "schedule.json").problem.pipelines)
    for rule in rules:
        run = config.parent / f"{layout}-{rule}"
        workers.run(job, config, run, (*layouts(layout), f"fusion.intra_stage={rule}"))
        assert_equal(searched, run)
        plan, schedule = json.loads((run / "plan.json").read_text()), load_schedule(run / "schedule.json")
        assert plan["schedule"]["source"].endswith(f"fusion.intra_stage={rule}")
        places = {p.model: p.placement[:2] for p in schedule.problem.pipelines}
        assert (places["actor"] == places["critic"]) == (rule == "time_sharing")
        others = {other["setting"].split("=")[1]: other for other in plan["schedule"]["others"]}
        assert others["search"]["makespan_seconds"] <= plan["schedule"]["makespan_seconds"] * 1.001
        # what the run did is laid beside what its order promised, on the ranks that it trained on
        assert any(span.kind == "critic B" for span in Forecaster(RunFiles.read(run)).spans(1))


def test_a_run_goes_on_in_another_order(workers, config):
    """On other ranks, where the critic's stages are: its states are found wherever they were."""
    whole, run = config.parent / "d1t1p2-search", config.parent / "changed"
    workers.run(job, config, run, (*layouts("d1t1p2"), "trainer.iterations=1", *SPLIT_SHARED))
    workers.run(job, config, run, (*layouts("d1t1p2"), "fusion.intra_stage=serial", "trainer.resume=auto"))
    assert_equal(whole, run)


def test_tensor_ranks_train_the_same_with_split_backwards(workers, config):
    """With their sequences cut and every layer run again."""
    settings = (*layouts("d1t2p1"), "parallel.sequence_parallel=true", "trainer.recompute=full")
    settings += ("parallel.generation=d1t2p1", "trainer.iterations=1")
    for split in ("true", "false"):
        workers.run(job, config, config.parent / f"cut-{split}", (*settings, f"fusion.split_backward={split}"))
    assert_equal(config.parent / "cut-true", config.parent / "cut-false")
