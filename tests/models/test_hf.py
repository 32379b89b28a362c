"""Hugging Face folders in and out, bit for bit, what is refused of them, and a critic that begins as an actor."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from testkit.paths import ROOT
from testkit.tiny import write_checkpoint
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhfuse.base.errors import InputError
from rlhfuse.config.spec import ModelSpec
from rlhfuse.models.hf import check_checkpoint, has_scalar_head, hf_tensors, load_weights
from rlhfuse.models.hf_folder import export_checkpoint
from rlhfuse.models.tokenizer import read_tokenizer

HEAD = "output_layer.weight"
FRESH = dict(scalar_head=True, fresh_head=True)


def same(found: dict, wanted: dict) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def store(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("scalar_head", [False, True])
@pytest.mark.parametrize(
    "kind, changes", [("llama", {"attention_bias": True}), ("qwen3", {"attention_bias": True}), ("phi3", {})]
)
def test_out_as_it_came_in(tmp_path, kind, changes, scalar_head):
    folder = write_checkpoint(tmp_path / "in", model_type=kind, scalar_head=scalar_head, **changes)
    spec = ModelSpec.from_config(folder)
    weights = load_weights(folder, spec, scalar_head=scalar_head)
    export_checkpoint(hf_tensors(weights, spec, scalar_head), scalar_head, folder, tmp_path / "out")
    assert same(stored(tmp_path / "out"), stored(folder))


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.bias", "v_head.summary.weight"]
)
def test_a_tensor_that_nothing_reads_is_refused_by_name(tmp_path, name):
    folder = write_checkpoint(tmp_path / "model")
    store(folder, stored(folder) | {name: torch.zeros(3)})
    with pytest.raises(InputError, match=f"nothing reads the tensor {name}: a llama model has none"):
        check_checkpoint(folder, ModelSpec.from_config(folder), scalar_head=False)


def test_tensors_that_transformers_leaves_aside_too(tmp_path):
    """Frequencies that old checkpoints hold, and the output layer of a tied model or of one with another head."""
    folder = write_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    spec, weights = ModelSpec.from_config(folder), stored(folder)
    old = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.zeros(16) for n in range(4)}
    store(folder, weights | old | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    check_checkpoint(folder, spec, scalar_head=False)
    check_checkpoint(folder, spec, scalar_head=True, fresh_head=True)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def actor(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("lm"), tie_word_embeddings=request.param, seed=3)


def test_a_missing_head_is_refused_unless_it_may_be_fresh(actor):
    spec = ModelSpec.from_config(actor)
    assert not has_scalar_head(actor)
    with pytest.raises(InputError, match="no tensor score.weight; train one with .*RewardTrainer"):
        check_checkpoint(actor, spec, scalar_head=True)
    check_checkpoint(actor, spec, **FRESH)
    broken = ModelSpec(**{**vars(spec), "layers": spec.layers + 1})
    with pytest.raises(InputError, match="no tensor model.layers.4"):
        check_checkpoint(actor, broken, **FRESH)


def test_the_trunk_is_the_language_models_and_the_head_zero(actor):
    spec = ModelSpec.from_config(actor)
    own, fresh = load_weights(actor, spec), load_weights(actor, spec, **FRESH)
    assert torch.equal(fresh.pop(HEAD), torch.zeros(1, spec.hidden))
    own.pop(HEAD, None)
    assert same(fresh, own)
    last = load_weights(actor, spec, layers=range(2, 4), first=False, **FRESH)
    assert torch.equal(last[HEAD], torch.zeros(1, spec.hidden))


def test_a_head_that_is_there_is_read(tmp_path):
    folder = write_checkpoint(tmp_path / "critic", scalar_head=True)
    weights = load_weights(folder, ModelSpec.from_config(folder), **FRESH)
    assert has_scalar_head(folder) and weights[HEAD].abs().sum() > 0


def test_its_export_is_a_model_that_scores(actor, tmp_path):
    spec, critic = ModelSpec.from_config(actor), tmp_path / "critic"
    weights = load_weights(actor, spec, **FRESH)
    weights[HEAD] = torch.arange(spec.hidden, dtype=torch.float32)[None] / spec.hidden
    export_checkpoint(hf_tensors(weights, spec, True), True, actor, critic)
    assert json.loads((critic / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    model = AutoModelForSequenceClassification.from_pretrained(critic, dtype=torch.float32)
    assert model.num_labels == 1 and torch.equal(model.score.weight, weights[HEAD])
    assert same(load_weights(critic, ModelSpec.from_config(critic), scalar_head=True), weights)


def test_the_folder_of_trls_reward_trainer_is_a_reward_model(tmp_path):
    """RewardTrainer.save_model writes what transformers does: a model with one label in float32, and a tokenizer."""
    actor = ROOT / "examples" / "tiny" / "actor"
    model = AutoModelForSequenceClassification.from_pretrained(actor, num_labels=1, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(actor).save_pretrained(tmp_path)
    spec = ModelSpec.from_config(tmp_path)
    assert spec == ModelSpec.from_config(actor)
    check_checkpoint(tmp_path, spec, scalar_head=True)
    loaded = load_weights(tmp_path, spec, scalar_head=True)
    assert torch.equal(loaded[HEAD], model.get_parameter("score.weight"))
    assert read_tokenizer(tmp_path).eos_token_id in spec.eos_token_ids
