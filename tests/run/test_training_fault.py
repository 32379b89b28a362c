"""A run whose losses are no longer finite ends with what was not finite and the checkpoint to resume from."""

from __future__ import annotations

import pytest
from testkit.programs import ended
from testkit.tiny import write_run


@pytest.mark.slow
def test_the_job_ends_naming_model_and_checkpoint(programs, tmp_path):
    config = write_run(tmp_path, rollout__max_response_tokens=8, fusion__inter_stage=False, trainer__save_every=1)
    # one step of such a critic is finite, its values are not: the second mini-batch's losses are NaN
    process = programs.train(config, "critic.optim.lr=1e37", "trainer.iterations=3")
    out = ended(process)
    assert process.returncode == 1, out
    first, *others = [line for line in out.splitlines() if "error: iteration 0: " in line]
    assert "micro-batch 0: the loss" in first and "no model stepped" in first, first
    assert first.endswith("; no checkpoint was saved: start again with trainer.resume=auto"), first
    assert first.startswith("error: ") and all(other.startswith("  traceback : ") for other in others), out
    assert out.splitlines()[-2] == others[-1] and 'train_ppo.py", line' not in out, out
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""
