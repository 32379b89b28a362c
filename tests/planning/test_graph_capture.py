"""Recording CUDA graphs is in a plan's seconds, once or in every iteration."""

import pytest
from testkit.flat_profile import facts_of
from testkit.four_ranks import SPECS, planned, run
from testkit.sim_helpers import linear_file

from rlhfuse.base.files import write_json
from rlhfuse.config.device_defaults import resolve_device
from rlhfuse.config.settings import RunConfig
from rlhfuse.costs.kernels import Kernels
from rlhfuse.planning.report.report import PlanReport

GPU = dict(trainer__hardware="h200", rollout__max_response_tokens=384, fusion__threshold=0)
# 8 samples an instance: 1, 2, 4, 8 rows; 256 and 512 tokens; 8 layers of 9 launches, 6 beside them
SHAPES, SHAPE_SECONDS = 5, 0.03 + (8 * 9 + 6) * 60e-6


def report(monkeypatch, kept: bool, made: RunConfig) -> PlanReport:
    monkeypatch.setattr(
        "rlhfuse.planning.memory.memory_budget.MemoryBudget.keeps_generation", lambda self, activations: kept
    )
    return PlanReport.of(planned(made))


def test_each_iteration_pays_unless_generation_is_kept(monkeypatch):
    samples = dict(rollout__prompts_per_iteration=16, rollout__samples_per_prompt=2)
    kept, released = (report(monkeypatch, keep, run(**GPU, **samples)) for keep in (True, False))
    for made in (kept, released):
        assert made.generation.capture.shapes == SHAPES and not made.generation.capture.measured
        assert made.generation.capture.seconds == pytest.approx(SHAPES * SHAPE_SECONDS)
        assert PlanReport.from_dict(made.to_dict()) == made
    assert (kept.seconds.capture, released.seconds.capture) == (0.0, released.generation.capture.seconds)
    for kind in ("serial", "fused"):
        parts = sum(getattr(released.seconds, f"{part}_{kind}") for part in ("gen_infer", "training"))
        parts += released.seconds.weight_moves
        assert getattr(released.seconds, kind) == pytest.approx(parts + SHAPES * SHAPE_SECONDS)
    assert kept.seconds.gen_infer_serial == released.seconds.gen_infer_serial
    told = "5 shapes as CUDA graphs takes 0.173 s in the first iteration alone: 34.7 ms each, estimated"
    assert told in kept.render()
    text = released.render()
    assert "takes 0.173 s in every iteration" in text
    rows = [line.split()[:-2] for line in text.splitlines()]
    order = [rows.index(name.split()) for name in ("weights moved", "CUDA graphs recorded", "generation")]
    assert order == list(range(order[0], order[0] + 3)) and "CUDA graphs recorded" not in kept.render()


def test_nothing_is_recorded_on_cpus_or_without_graphs(monkeypatch):
    for made in (run(), run(**GPU, rollout__cuda_graphs=False)):
        without = report(monkeypatch, False, made)
        assert (
            without.generation.capture is None
            and without.seconds.capture == 0
            and "CUDA graphs" not in without.render()
        )


def test_an_earlier_run_knows_better(monkeypatch, tmp_path):
    for capture, seconds in ((0.25, 0.25), (0.0, SHAPE_SECONDS)):
        config = run(**GPU, fusion__profile=str(tmp_path / "costs.json"))
        made_for = facts_of(resolve_device(config), SPECS)
        write_json(tmp_path / "costs.json", linear_file().to_dict() | {"capture": capture, "made_for": made_for})
        made = report(monkeypatch, False, config).generation.capture
        assert made.shape_seconds == pytest.approx(seconds) and made.measured == bool(capture)
        assert ("measured" if capture else "estimated") in str(made)


def test_tensor_ranks_record_their_sums_too():
    alone, two = (Kernels().capture_seconds(SPECS["actor"], tp, 60e-6) for tp in (1, 2))
    assert alone == pytest.approx(SHAPE_SECONDS) and two - alone == pytest.approx((8 * 2 + 2) * 60e-6)
