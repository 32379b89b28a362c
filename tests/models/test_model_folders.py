"""Model folders that say a thing twice, in another place, or not at all; and all that an export takes along."""

import json
import os
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from testkit.tiny import change_json, with_models, write_checkpoint, write_tokenizer

from rlhfuse.base.errors import InputError
from rlhfuse.config.config_json import ARCHITECTURES
from rlhfuse.config.load import model_folder
from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
from rlhfuse.models.hf import check_checkpoint, checkpoint_index, hf_tensors, load_weights
from rlhfuse.models.hf_folder import export_checkpoint
from rlhfuse.models.tokenizer import read_tokenizer
from rlhfuse.run.checkpoint.checkpoint import finished_iterations
from rlhfuse.run.checkpoint.contents import contents_of
from rlhfuse.tasks.role import ROLES

HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
PROMPT = [1, 5, 9, 30] * 8


def store(folder: Path, tensors: dict, name: str = "model.safetensors") -> None:
    save_file(tensors, folder / name, metadata={"format": "pt"})


def stored(folder: Path) -> dict:
    return load_file(folder / "model.safetensors")


def shard(folder: Path, tensors: dict, **twice: float) -> None:
    """Two files and an index; with `twice` the final norm is in both, multiplied by it in the second."""
    names = sorted(tensors)
    files = {name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        part = {name: tensors[name] for name in names if files[name] == file}
        store(folder, {NORM: tensors[NORM] * twice["twice"]} | part if twice else part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def check(folder: Path, scalar_head: bool = False) -> None:
    check_checkpoint(folder, ModelSpec.from_config(folder), scalar_head, fresh_head=scalar_head)


def assert_drawn_as_by_transformers(folder: Path) -> None:
    """Log-probabilities of eight tokens behind a prompt."""
    engine = Engine.from_pretrained(folder, EngineOptions(num_blocks=16))
    (result,) = engine.generate([PROMPT], SamplingParams(max_tokens=8, ignore_eos=True))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *result.tokens]])).logits[0, len(PROMPT) - 1 : -1]
    theirs = torch.log_softmax(logits, -1).gather(1, torch.tensor(result.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(result.logprobs), theirs, rtol=0, atol=3e-5)


# weights ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_head_beside_a_tied_embedding_is_equal_or_refused(tmp_path, family):
    folder = write_checkpoint(tmp_path / "m", model_type=family, tie_word_embeddings=True, pad_token_id=0)
    weights = stored(folder)
    store(folder, weights | {HEAD: weights[EMBEDDING].clone()})
    check(folder)
    other = weights[EMBEDDING].clone()
    other[3, 4] = 7.5
    store(folder, weights | {HEAD: other})
    with pytest.raises(InputError, match=rf"{HEAD} .*\[3, 4\] is 7.5, {EMBEDDING} .* is .*tie_word_embeddings=false"):
        load_weights(folder, ModelSpec.from_config(folder))
    check(folder, scalar_head=True)  # which reads no output layer
    change_json(folder / "config.json", tie_word_embeddings=False)
    assert_drawn_as_by_transformers(folder)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_tied_model_may_be_stored_as_its_output_layer(tmp_path, family):
    folder = write_checkpoint(tmp_path / "m", model_type=family, tie_word_embeddings=True)
    weights = stored(folder)
    store(folder, {HEAD if name == EMBEDDING else name: tensor for name, tensor in weights.items()})
    assert_drawn_as_by_transformers(folder)
    spec = ModelSpec.from_config(folder)
    export_checkpoint(hf_tensors(load_weights(folder, spec), spec, False), False, folder, tmp_path / "out")
    assert stored(tmp_path / "out").keys() == weights.keys()


def test_an_index_and_a_whole_file_are_one_model_or_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "m")
    weights = stored(folder)
    shard(folder, weights)
    check(folder)
    assert {entry.file.name for entry in checkpoint_index(folder).values()} == {"model.safetensors"}
    assert_drawn_as_by_transformers(folder)
    shard(folder, {name: tensor + 1 for name, tensor in weights.items()})
    with pytest.raises(InputError, match=r"of model-0000.*, .* of model.safetensors is .*remove the wrong one"):
        check(folder)
    for file in folder.glob("model-*"):  # a listing of what is gone says nothing
        file.unlink()
    check(folder)
    assert_drawn_as_by_transformers(folder)


def test_a_tensor_in_two_shards_is_equal_or_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "m")
    weights = stored(folder)
    (folder / "model.safetensors").unlink()
    shard(folder, weights, twice=1.0)
    check(folder)
    shard(folder, weights, twice=3.0)
    with pytest.raises(InputError, match=rf"{NORM} of model-00001.* is .*, {NORM} of model-00002.* is "):
        check(folder)


def test_files_that_an_index_cannot_name(tmp_path):
    folder = write_checkpoint(tmp_path / "m")
    for name in ("x" * 300, "x" * 100_000, "../other.safetensors", "a\0b"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NORM: name}}))
        with pytest.raises(InputError, match="index.json names .*, which is no file") as caught:
            check(folder)
        assert len(str(caught.value)) < 600


def test_an_adapter_is_refused(tmp_path):
    (write_checkpoint(tmp_path / "m") / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="adapter"):
        check(tmp_path / "m")


# config.json --------------------------------------------------------------------------------------------------------

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "changes, values",
    [
        (dict(rope_theta=1e4, rope_scaling=LINEAR | {"rope_theta": 5e5}), ["10000.0", "500000.0"]),
        (dict(rope_scaling=LINEAR, rope_parameters=LINEAR | {"factor": 2.0}), ["4.0", "2.0"]),
        (dict(rope_scaling=LINEAR, rope_parameters={"rope_type": "default"}), ["4.0", "None"]),
        (dict(rope_scaling={"type": "linear", "rope_type": "default", "factor": 2}), ["'linear'", "'default'"]),
        (dict(rope_scaling=LLAMA3 | {"original_max_position_embeddings": 32}, original_max_position_embeddings=16),
         ["16", "32"]),
    ],
)  # fmt: skip
def test_two_settings_of_one_thing_are_refused_with_both(tmp_path, changes, values):
    folder = write_checkpoint(tmp_path / "m")
    change_json(folder / "config.json", **changes)
    with pytest.raises(InputError) as caught:
        ModelSpec.from_config(folder)
    assert all(value in str(caught.value) for value in values)


def test_a_key_that_is_there_twice(tmp_path):
    file = write_checkpoint(tmp_path / "m") / "config.json"
    text = file.read_text()
    file.write_text(text.replace('"head_dim": 32', '"head_dim": 32, "head_dim": 32'))
    assert ModelSpec.from_config(tmp_path / "m").head_dim == 32
    file.write_text(text.replace('"head_dim": 32', '"head_dim": 32, "head_dim": 16'))
    with pytest.raises(InputError, match="'head_dim' is there twice, with 32 and 16"):
        ModelSpec.from_config(tmp_path / "m")


SUITED = {
    "LlamaForCausalLM": ("actor", "reference", "critic"),
    "LlamaForSequenceClassification": ("reward", "critic"),
    "LlamaForTokenClassification": (),
    "MistralForCausalLM": (),
}


@pytest.mark.parametrize("name", SUITED)
def test_architectures_must_suit_the_role(tmp_path, name):
    folder = write_checkpoint(tmp_path / "m")
    change_json(folder / "config.json", architectures=[name])
    for role in ROLES:
        if role in SUITED[name]:
            ModelSpec.from_config(folder, role)
            continue
        with pytest.raises(InputError, match=f"architectures .*{name} cannot be {role}.path; use a Llama"):
            ModelSpec.from_config(folder, role)


def test_a_number_is_no_model():
    for role, value in product(ROLES, (float("nan"), -1)):
        with pytest.raises(ValueError, match="path"):
            with_models().with_(**{role: {"path": value}})


# files that cannot be read ------------------------------------------------------------------------------------------


@contextmanager
def no_root():
    """Root may read everything: be somebody else."""
    before = os.geteuid()
    os.seteuid(65534 if before == 0 else before)
    try:
        yield
    finally:
        os.seteuid(before)


READERS = {
    "config.json": ModelSpec.from_config,
    "generation_config.json": ModelSpec.from_config,
    "model.safetensors": checkpoint_index,
    "model.safetensors.index.json": checkpoint_index,
    "tokenizer_config.json": read_tokenizer,
    "tokenizer.json": read_tokenizer,
    "chat_template.jinja": read_tokenizer,
    "additional_chat_templates/rag.jinja": read_tokenizer,
    "finished.json": finished_iterations,
}


@pytest.fixture
def folder():
    with TemporaryDirectory(dir="/tmp") as made:  # whose parents let everybody through
        Path(made).chmod(0o755)
        yield write_tokenizer(write_checkpoint(Path(made)))


@pytest.mark.parametrize("name", READERS)
def test_links_to_nothing_and_files_of_others(folder, name):
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    for target, word in (("../blobs/gone", "does not exist"), (file.name, "symbolic links")):
        file.symlink_to(target)
        with pytest.raises(InputError, match=f"{file.name}.*{word}"):
            READERS[name](folder)
        file.unlink()
    file.write_text("{}")
    file.chmod(0)
    with no_root(), pytest.raises(InputError, match=f"cannot read .*{file.name}: Permission denied"):
        READERS[name](folder)


def test_a_folder_of_others(folder):
    folder.chmod(0)
    for read in (ModelSpec.from_config, checkpoint_index, read_tokenizer, finished_iterations):
        with no_root(), pytest.raises(InputError, match="cannot read .*: Permission denied"):
            read(folder)


def test_a_folder_that_is_a_link_to_nothing_is_no_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models/mine").symlink_to("../gone")
    with pytest.raises(InputError, match="models/mine is no folder"):
        model_folder("models/mine", "actor.path")


# exports ------------------------------------------------------------------------------------------------------------

CONTENT = "{{ messages[0]['content'] }}"
TEMPLATES = {"default": CONTENT, "tool_use": "{{ tools | length }}" + CONTENT, "rag": "{{ documents }}"}
LOOSE = ("tokenizer.model.v3", "vocab.txt", "qwen.tiktoken", "spiece.model", "chat_template.json", "LICENSE")
LEFT = ("README.md", "pytorch_model.bin", "optimizer.pt", "train.jsonl", "tools.py", ".gitattributes")


def with_everything(folder: Path) -> Path:
    write_tokenizer(write_checkpoint(folder), model_max_length=99)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATES
    tokenizer.save_pretrained(folder)
    for name in LOOSE + LEFT:
        (folder / name).write_text(name)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "top_k": 20}))
    return folder


def assert_same_tokenizer(one: Path, other: Path) -> None:
    first, second = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (one, other))
    assert first.chat_template == second.chat_template == TEMPLATES
    assert first.get_vocab() == second.get_vocab() and first.init_kwargs.keys() == second.init_kwargs.keys()
    assert first.special_tokens_map == second.special_tokens_map and second.model_max_length == 99
    turns, tools = [{"role": "user", "content": "w1 w2"}], [{"type": "function"}]
    for named in (dict(), dict(tools=tools), dict(chat_template="rag", documents=[])):
        texts = [made.apply_chat_template(turns, tokenize=False, **named) for made in (first, second)]
        assert texts[0] == texts[1] and "w1" in texts[0] or texts[0] == "[]"


@pytest.mark.parametrize("scalar_head", [False, True])
@pytest.mark.parametrize("apart", [False, True], ids=["one-folder", "tokenizer-apart"])
def test_an_export_has_everything_but_weights(tmp_path, apart, scalar_head):
    """A tokenizer of another folder comes with all that lies beside it, and generation_config.json of the model's."""
    whole = with_everything(tmp_path / "in")
    like = write_checkpoint(tmp_path / "like", seed=1) if apart else whole
    change_json(like / "config.json", architectures=None, problem_type="single_label_classification")
    spec, out = ModelSpec.from_config(like), tmp_path / "out"
    weights = load_weights(like, spec, scalar_head=scalar_head, fresh_head=scalar_head)
    tensors = hf_tensors(weights, spec, scalar_head)
    export_checkpoint(tensors, scalar_head, like, out, whole if apart else None)
    assert_same_tokenizer(whole, out)
    assert all((out / name).read_text() == name for name in LOOSE)
    assert not any((out / name).exists() for name in LEFT)
    assert (out / "generation_config.json").exists() is not apart
    if scalar_head:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(out)
        assert model.config.architectures == ["LlamaForSequenceClassification"] and model.num_labels == 1
    elif not apart:
        theirs = [transformers.GenerationConfig.from_pretrained(folder).to_dict() for folder in (whole, out)]
        assert theirs[0] == theirs[1] and theirs[0]["eos_token_id"] == [2, 7]


def test_a_changed_template_is_another_tokenizer(tmp_path):
    folder = with_everything(tmp_path / "m")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    config = with_models().with_(data={"train_files": (str(prompts),)})

    def digest() -> str:
        return contents_of(config, {"actor": folder}, folder)["actor.tokenizer"]

    before = digest()
    assert digest() == before
    (folder / "additional_chat_templates/rag.jinja").write_text("{{ tools }}")
    assert digest() != before
