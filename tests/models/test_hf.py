"""Hugging Face folders in and out, bit for bit, and what is refused of them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from testkit.tiny import write_checkpoint

from rlhfuse.base.errors import InputError
from rlhfuse.config.spec import ModelSpec
from rlhfuse.models.hf import check_checkpoint, hf_tensors, load_weights
from rlhfuse.models.hf_folder import export_checkpoint


@pytest.mark.parametrize("scalar_head", [False, True])
@pytest.mark.parametrize(
    "kind, changes", [("llama", {"attention_bias": True}), ("qwen3", {"attention_bias": True}), ("phi3", {})]
)
def test_out_as_it_came_in(tmp_path, kind, changes, scalar_head):
    folder = write_checkpoint(tmp_path / "in", model_type=kind, scalar_head=scalar_head, **changes)
    spec = ModelSpec.from_config(folder)
    weights = load_weights(folder, spec, scalar_head=scalar_head)
    export_checkpoint(hf_tensors(weights, spec, scalar_head), scalar_head, folder, tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_joined_tensors_are_read_as_separate_ones_are(tmp_path, tp_size):
    phi3, llama = write_checkpoint(tmp_path / "phi3", model_type="phi3"), write_checkpoint(tmp_path / "llama")
    stored = load_file(phi3 / "model.safetensors")
    separate = {}
    for name, tensor in stored.items():
        sizes = {"qkv": {"q": 128, "k": 64, "v": 64}, "gate_up": {"gate": 96, "up": 96}}
        kind = next((kind for kind in sizes if f".{kind}_proj" in name), None)
        parts = sizes[kind] if kind else {}
        pieces = tensor.split(list(parts.values())) if kind else [tensor]
        names = [name.replace(f"{kind}_proj", f"{part}_proj") for part in parts] or [name]
        separate |= {new: piece.contiguous() for new, piece in zip(names, pieces, strict=True)}
    save_file(separate, llama / "model.safetensors", metadata={"format": "pt"})
    for tp_rank in range(tp_size):
        a, b = (
            load_weights(folder, ModelSpec.from_config(folder), tp_rank=tp_rank, tp_size=tp_size)
            for folder in (phi3, llama)
        )
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.bias", "v_head.summary.weight"]
)
def test_a_tensor_that_nothing_reads_is_refused_by_name(tmp_path, name):
    folder = write_checkpoint(tmp_path / "model")
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(3)}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"nothing reads the tensor {name}: a llama model has none"):
        check_checkpoint(folder, ModelSpec.from_config(folder), scalar_head=False)


def test_tensors_that_transformers_leaves_aside_too(tmp_path):
    """Frequencies that old checkpoints hold, and the output layer of a tied model or of one with another head."""
    folder = write_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    file, spec = folder / "model.safetensors", ModelSpec.from_config(folder)
    weights = load_file(file)
    old = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.zeros(16) for n in range(4)}
    save_file(weights | old | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file)
    check_checkpoint(folder, spec, scalar_head=False)
    check_checkpoint(folder, spec, scalar_head=True, fresh_head=True)
