"""The example of little sums, end to end but short: a function reward, held-out sums, and the report of both."""

from __future__ import annotations

import json

from testkit.paths import ROOT

from rlhfuse.run.report.report import render_report
from rlhfuse.run.report.run_files import RunFiles


def test_little_sums_are_trained_and_evaluated(programs, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # the example names its model and files from there
    overrides = ("trainer.iterations=2", "trainer.eval_every=1", "rollout.prompts_per_iteration=4")
    config = ROOT / "examples" / "sums_grpo.yaml"
    programs.trained(config, *overrides, "trainer.export=false", f"trainer.output_dir={tmp_path}/run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [-1, 0, 1]
    assert all(row["val/samples"] == 512 for row in rows) and 0.3 < rows[0]["val/score/mean"] < 0.45
    trained = [row["critic/score/mean"] for row in rows[1:]]
    assert all(0 < score < 1 and score * 32 == round(score * 32) for score in trained)
    page = render_report(RunFiles.read(tmp_path / "run"))
    assert "held-out prompts" in page and f"{rows[0]['val/score/mean']:+.3f}" in page
