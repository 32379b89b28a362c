"""A critic that begins as a language model: a value head of zeros, and an export that scores."""

import json

import pytest
import torch
from testkit.tiny import write_checkpoint
from transformers import AutoModelForSequenceClassification

from rlhfuse.base.errors import InputError
from rlhfuse.config.spec import ModelSpec
from rlhfuse.models.hf import check_checkpoint, has_scalar_head, hf_tensors, load_weights
from rlhfuse.models.hf_folder import export_checkpoint

HEAD = "output_layer.weight"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("lm"), tie_word_embeddings=request.param, seed=3)


def test_a_missing_head_is_refused_unless_it_may_be_fresh(folder):
    spec = ModelSpec.from_config(folder)
    assert not has_scalar_head(folder)
    with pytest.raises(InputError, match="no tensor score.weight; train one with tools/train_reward.py"):
        check_checkpoint(folder, spec, scalar_head=True)
    check_checkpoint(folder, spec, scalar_head=True, fresh_head=True)
    broken = ModelSpec(**{**vars(spec), "layers": spec.layers + 1})
    with pytest.raises(InputError, match="no tensor model.layers.4"):
        check_checkpoint(folder, broken, scalar_head=True, fresh_head=True)


def test_the_trunk_is_the_language_models_and_the_head_zero(folder):
    spec = ModelSpec.from_config(folder)
    own, fresh = load_weights(folder, spec), load_weights(folder, spec, scalar_head=True, fresh_head=True)
    assert torch.equal(fresh.pop(HEAD), torch.zeros(1, spec.hidden))
    own.pop(HEAD, None)
    assert own.keys() == fresh.keys() and all(torch.equal(own[name], fresh[name]) for name in own)
    last = load_weights(folder, spec, layers=range(2, 4), first=False, scalar_head=True, fresh_head=True)
    assert torch.equal(last[HEAD], torch.zeros(1, spec.hidden))


def test_a_head_that_is_there_is_read(tmp_path):
    folder = write_checkpoint(tmp_path / "critic", scalar_head=True)
    weights = load_weights(folder, ModelSpec.from_config(folder), scalar_head=True, fresh_head=True)
    assert has_scalar_head(folder) and weights[HEAD].abs().sum() > 0


def test_its_export_is_a_model_that_scores(folder, tmp_path):
    spec = ModelSpec.from_config(folder)
    weights = load_weights(folder, spec, scalar_head=True, fresh_head=True)
    weights[HEAD] = torch.arange(spec.hidden, dtype=torch.float32)[None] / spec.hidden
    export_checkpoint(hf_tensors(weights, spec, True), True, folder, tmp_path / "critic")
    assert json.loads((tmp_path / "critic/config.json").read_text())["architectures"] == [
        "LlamaForSequenceClassification"
    ]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", dtype=torch.float32)
    assert model.num_labels == 1 and torch.equal(model.score.weight, weights[HEAD])
    again = load_weights(tmp_path / "critic", ModelSpec.from_config(tmp_path / "critic"), scalar_head=True)
    assert all(torch.equal(again[name], weights[name]) for name in weights)
