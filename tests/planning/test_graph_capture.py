"""Recording CUDA graphs is in a plan's seconds, once or in every iteration."""

import pytest
from testkit.flat_profile import facts_of
from testkit.four_ranks import SPECS, planned, run
from testkit.sim_helpers import linear_file

from rlhfuse.base.files import write_json
from rlhfuse.config.device_defaults import resolve_device
from rlhfuse.config.settings import RunConfig
from rlhfuse.planning.report.report import PlanReport

GPU = dict(trainer__hardware="h200", rollout__max_response_tokens=384, fusion__threshold=0)
# 8 samples an instance: 1, 2, 4, 8 rows; 256 and 512 tokens; 8 layers of 9 launches, 6 beside them
SHAPES, SHAPE_SECONDS = 5, 0.03 + (8 * 9 + 6) * 60e-6


def report(monkeypatch, kept: bool, made: RunConfig) -> PlanReport:
    monkeypatch.setattr(
        "rlhfuse.planning.memory.memory_budget.MemoryBudget.keeps_generation", lambda self, activations: kept
    )
    return PlanReport.of(planned(made))


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
