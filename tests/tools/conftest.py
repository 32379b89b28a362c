"""A run that several tools are asked about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

MODEL = dict(
    model_type="llama",
    hidden_size=64,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_hidden_layers=8,
    intermediate_size=192,
    vocab_size=512,
    max_position_embeddings=512,
)


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
