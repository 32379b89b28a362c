"""Small random checkpoints in Hugging Face layout, for tests that need a model but no trained one."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from rlhfuse.config.config_json import ARCHITECTURES
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.models.hf_names import expected_tensors

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


def write_checkpoint(
    folder: Path, *, scalar_head: bool = False, seed: int = 0, model_type: str = "llama", scale: float = 1.0, **shape
) -> Path:
    """Write a random model; `shape` overrides SHAPE's fields, `scale` multiplies its matrices."""
    folder.mkdir(parents=True, exist_ok=True)
    architecture = ARCHITECTURES[model_type] + ("ForSequenceClassification" if scalar_head else "ForCausalLM")
    config = {**SHAPE, **shape, "model_type": model_type, "architectures": [architecture], "torch_dtype": "float32"}
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
            size_of_one = 0.5 if len(size) == 1 else scale * size[-1] ** -0.5
            tensors[key] = torch.randn(size, generator=generator) * size_of_one
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def with_models(**groups) -> RunConfig:
    """The settings of a run whose files are named, and not there."""
    models = {"actor": {"path": "a"}, "reward": {"path": "r"}, "data": {"train_files": ("prompts",)}}
    return RunConfig().with_(**models, **groups)


def write_tokenizer(folder: Path, words: int = 197, **more: object) -> Path:
    """A word-level tokenizer of `words` words w0, w1, ... beside <unk>, <s> and </s>; puts <s> first.

    `more`: of its tokenizer_config.json.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i + 3 for i in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special, **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def change_json(file: Path, **values: object) -> None:
    """Set values of the object that a JSON file holds."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def write_run(folder: Path, **settings: object) -> Path:
    """A config file with its models and prompts, small enough to train in seconds; `settings` are dotted keys."""
    import yaml

    actor = write_tokenizer(write_checkpoint(folder / "actor", seed=1))
    reward = write_tokenizer(write_checkpoint(folder / "reward", scalar_head=True, seed=2))
    lines = [json.dumps({"prompt": " ".join(f"w{(i * 7 + j) % 190}" for j in range(2 + i % 4))}) for i in range(12)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    config: dict = {
        "actor": {"path": str(actor), "optim": {"lr": 1e-3}},
        "reward": {"path": str(reward)},
        "critic": {"optim": {"lr": 1e-3}},
        "data": {"train_files": [str(folder / "prompts.jsonl")], "max_prompt_tokens": 16},
        "rollout": {"prompts_per_iteration": 4, "samples_per_prompt": 4, "max_response_tokens": 24},
        "algorithm": {"minibatches": 2},
        "fusion": {"actor_microbatches": 2, "search_seconds": 0.2},
        "parallel": {"actor_train": "d1t1p2", "critic_train": "d2t1p1", "generation": "d2t1p1"},
        # silence means nothing on a busy machine; that a rank is gone is seen at once
        "trainer": {"iterations": 3, "tensorboard": False, "output_dir": str(folder / "run"), "watchdog_seconds": 590},
    }
    for key, value in settings.items():
        group, name = key.split("__")
        config.setdefault(group, {})[name] = value
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


SENTENCES = ["hello world, how are you? I am fine .", "x != y and a.b == c", "grüße 你好 naïve", "1 + 1 = 2 ; 12 * 3"]


def write_text_tokenizer(folder: Path, drops_space: bool, **more: object) -> Path:
    """As `write_tokenizer`, of text: of bytes, or like Llama-2's, whose decoder drops a first space."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer, known = Tokenizer(models.BPE(byte_fallback=drops_space, unk_token="<unk>")), ["<unk>", "<s>", "</s>"]
    if drops_space:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        undo = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
        tokenizer.decoder, known = decoders.Sequence(list(undo)), [*known, *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    letters = list("▁abcdefghijklmnopqrstuvwxyz") if drops_space else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=known, initial_alphabet=letters, limit_alphabet=256)
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    write_tokenizer(folder, **more)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
