"""A run whose rewards and whose export take longer than trainer.hang_seconds ends well: slow work reports progress."""

from __future__ import annotations

import json

import pytest
from testkit.programs import finish
from testkit.tiny import write_run

HANG_SECONDS = 40
FUNCTION = """
import os, time

def slow_on_one_rank(completions):
    if os.environ["RANK"] == "0":
        time.sleep(6 * len(completions))  # 8 samples: 48 s, while rank 1 waits in a collective
    return [float(len(text)) for text in completions]
"""
SLOW_STORAGE = """
import time
import train_ppo
from rlhfuse.models import hf_folder

save = hf_folder.save_tensors
hf_folder.EXPORT_BYTES = 1  # a file for each tensor
hf_folder.save_tensors = lambda *arguments: (time.sleep(3), save(*arguments))
if __name__ == "__main__":
    train_ppo.run()
"""


@pytest.mark.slow
def test_rewards_and_export_slower_than_hang_seconds(programs, tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION)
    (tmp_path / "slow.py").write_text(SLOW_STORAGE)
    config = write_run(tmp_path, rollout__max_response_tokens=8, fusion__inter_stage=False)
    limits = f"trainer.hang_seconds={HANG_SECONDS}", "trainer.watchdog_seconds=30", "reward.timeout_seconds=30"
    settings = f"reward.function={tmp_path}/mine.py:slow_on_one_rank", "reward.signature=trl", "reward.path=''"
    more = "algorithm.name=rloo", "trainer.iterations=1", "trainer.export=true", "fusion.search_seconds=1"
    finish(programs.train(config, *limits, *settings, *more, programs=(tmp_path / "slow.py",)))
    index = json.loads((tmp_path / "run" / "export" / "actor" / "model.safetensors.index.json").read_text())
    assert len(index["weight_map"]) * 3 > HANG_SECONDS


def test_iterations_without_a_decode_step(programs, tmp_path):
    """max_response_tokens=1: every sample ends with the token that its prompt's prefill gives."""
    config = write_run(tmp_path, rollout__max_response_tokens=1)
    out = programs.trained(config, "trainer.iterations=3", "fusion.search_seconds=1")
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 3 and "warning: costs" not in out, out
