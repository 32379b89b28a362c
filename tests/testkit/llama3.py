"""Folders of Llama 3 models: a config.json and nothing else."""

import json
from pathlib import Path

SIZES = {
    "8B": dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=14336),
    "70B": dict(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28672),
}
SHARED = dict(model_type="llama", num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192)


def llama3(base: Path, size: str) -> Path:
    (base / size).mkdir()
    (base / size / "config.json").write_text(json.dumps({**SHARED, **SIZES[size], "eos_token_id": 128001}))
    return base / size
