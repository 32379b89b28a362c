"""A run that several tools are asked about."""

import json
from pathlib import Path

import pytest
from testkit.finished_run import MODEL


@pytest.fixture
def run_yaml(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(MODEL))
    (tmp_path / "run.yaml").write_text(
        f"actor: {{path: {tmp_path}/model}}\nreward: {{path: {tmp_path}/model}}\n"
        "data: {train_files: [prompts.jsonl], max_prompt_tokens: 128}\n"
        "parallel: {actor_train: d1t1p4, critic_train: d2t1p2, generation: d4t1p1}\n"
        "fusion: {search_seconds: 0.2}\n"
    )
    return str(tmp_path / "run.yaml")
