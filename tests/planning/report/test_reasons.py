"""What a plan gives as its reasons: models that may be too small for their rates, files that the run writes."""

import json

from testkit.four_ranks import SPECS, planned, run

from rlhfuse.planning.job import Job
from rlhfuse.planning.report.reasons import Reasons
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.settle import settle


def reasons_of(config, specs=SPECS) -> Reasons:
    return Reasons(settle(Job(config, specs, 4)))


def test_a_plan_says_what_training_leaves_out_and_does_not_price_it(tmp_path):
    """Half of the samples of a past run, which had four fifths of the tokens."""
    row = {"lengths/prompt": [10] * 8, "lengths/output": [150, 30] * 4, "lengths/zero_gradient": [1, 0] * 4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    grpo = {"algorithm__name": "grpo", "algorithm__kl_coef": 0, "parallel__lengths": str(tmp_path)}
    kinds = {"on": {"algorithm__skip_zero_gradients": True}, "off": {}}
    kinds["not known"] = kinds["on"] | {"parallel__lengths": ""}
    plans = {kind: PlanReport.of(planned(run(**grpo | keys))) for kind, keys in kinds.items()}
    said = {kind: [reason for reason in plan.reasons if "skip_zero" in reason] for kind, plan in plans.items()}
    assert said["off"] == []
    assert said["on"] == [
        "algorithm.skip_zero_gradients: training is priced without these: 50.0% of the samples, 80.0% of the tokens, "
        f"have none, by the last iterations of {tmp_path}"
    ]
    assert len(said["not known"]) == 1 and "training is priced with all; parallel.lengths=RUN" in said["not known"][0]
    on, off = plans["on"], plans["off"]
    assert on.schedule.makespan_seconds < 0.8 * off.schedule.makespan_seconds
    assert on.seconds.generation_fused == off.seconds.generation_fused and on.batch == off.batch


def files(**trainer):
    config = run().with_(data={"val_files": ("held_out.jsonl",)}, trainer={"iterations": 5} | trainer)
    return dict(reasons_of(config).output_files())
