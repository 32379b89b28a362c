"""Small random checkpoints in Hugging Face layout, for tests that need a model but no trained one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from rlhfuse.models.hf import expected_tensors
from rlhfuse.spec import ModelSpec

SHAPE = dict(
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=96,
    vocab_size=200,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    hidden_act="silu",
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)


def write_checkpoint(folder: Path, *, scalar_head: bool = False, seed: int = 0, model_type: str = "llama", **shape) -> Path:
    """Write a random model; `shape` overrides SHAPE's fields."""
    folder.mkdir(parents=True, exist_ok=True)
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model_type]
    task = "ForSequenceClassification" if scalar_head else "ForCausalLM"
    config = {**SHAPE, **shape, "model_type": model_type, "architectures": [name + task], "torch_dtype": "float32"}
    if scalar_head:
        config |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    spec = ModelSpec.from_config(folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, size in expected_tensors(spec, scalar_head).items():
        if key.endswith("norm.weight") and len(size) == 1:
            tensors[key] = 1 + 0.1 * torch.randn(size, generator=generator)
        else:
            tensors[key] = torch.randn(size, generator=generator) * (0.5 if len(size) == 1 else size[-1] ** -0.5)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
