"""Writes a Hugging Face folder: weights in one file or several, with the config and tokenizer of another folder.

Weights are asked for layer by layer and leave as soon as a file is full, so no whole model needs to be in memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlhfuse.base.errors import InputError, writing
from rlhfuse.base.files import is_listed, open_file, output_folder
from rlhfuse.base.json_values import read_json
from rlhfuse.config.config_json import ARCHITECTURES

EXPORT_BYTES = 5 << 30  # of one weight file
GENERATION = "generation_config.json"
TEMPLATES = "additional_chat_templates"
# Of a model folder, what no tokenizer or template is: weights in any format, what a run of training left, the card.
NOT_CARRIED = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
NOT_CARRIED += (".ot", ".npz", ".md", ".py", ".log", ".jsonl", ".parquet", ".arrow", ".csv", ".yaml", ".gz")
NOT_CARRIED += ("trainer_state.json", "_results.json")


def carried_files(folder: Path) -> list[Path]:
    """Files of a model folder beside weights, config.json and generation_config.json: tokenizer, templates, licence.

    By their names. Raises InputError where the folder, or one of them, cannot be read.
    """
    try:
        found = [*folder.iterdir(), *(folder / TEMPLATES).glob("*.jinja")]
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}; make it readable") from None
    mine = [file for file in sorted(found) if not (file.name.startswith(".") or file.name.endswith(NOT_CARRIED))]
    files = [file for file in mine if file.name not in ("config.json", GENERATION) and not file.is_dir()]
    for file in files:
        open_file(file, "make it readable, or download it again").close()
    return files


def export_checkpoint(
    tensors: Iterable[tuple[str, Tensor]],
    scalar_head: bool,
    like: Path,
    out: Path,
    tokenizer: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Write a Hugging Face folder: (name, tensor), config of `like`, tokenizer of `tokenizer` or `like`.

    It replaces an older `out` when complete; `progress` is told of each weight file, of EXPORT_BYTES at most. Raises
    InputError where it cannot be written: then an older one stays. `tensors` are taken to their end in any case, as
    other ranks may take part in making them.
    """
    left = iter(tensors)
    try:
        with output_folder(out, force=True) as folder:
            write_folder(
                folder, left, like, EXPORT_BYTES, scalar_head=scalar_head, tokenizer=tokenizer, progress=progress
            )
    finally:
        exhaust(left)


def exhaust(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Take all that is left, and keep none of it."""
    for _ in tensors:
        pass


def write_folder(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    like: Path,
    shard_bytes: int | None = None,
    *,
    scalar_head: bool,
    tokenizer: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Fill an empty folder with (name, tensor) in files of at most `shard_bytes` each, but at least one tensor.

    `tokenizer`: the folder that has it, where that is not `like`. With a scalar head the config says what a language
    model has become. Raises InputError naming a bad file.
    """
    dtype = _write_weights(folder, tensors, shard_bytes, progress)
    config = read_json(like / "config.json", own=False)
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = str(dtype).removeprefix("torch.")
    if scalar_head:
        kept = {key: config[key] for key in config if key not in ("num_labels", "problem_type")}
        architecture = f"{ARCHITECTURES[config['model_type']]}ForSequenceClassification"
        config = kept | {"architectures": [architecture], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    with writing(folder / "config.json"):
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    sources = [(file, tokenizer or like) for file in carried_files(tokenizer or like)]
    for file, at in sources + [(like / GENERATION, like)] * is_listed(like / GENERATION):
        target = folder / file.relative_to(at)
        with writing(target):
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def _write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int | None, progress: Callable[[str], None]
) -> torch.dtype:
    """The weight files and, of several, their index. Returns the dtype that they have."""
    shard_of, total, dtype, number = {}, 0, torch.float32, 0
    for number, shard in enumerate(_shards(tensors, shard_bytes), start=1):
        file = folder / f"model-{number:05}.safetensors"
        with writing(file):
            save_tensors(shard, file, {"format": "pt"})
        progress(f"exporting models: {file} is written")
        shard_of |= dict.fromkeys(shard, number)
        total += sum(tensor.nbytes for tensor in shard.values())
        dtype = next(iter(shard.values())).dtype
    several = number > 1
    names = {
        n: f"model-{n:05}-of-{number:05}.safetensors" if several else "model.safetensors" for n in range(1, number + 1)
    }
    for n, name in names.items():
        os.replace(folder / f"model-{n:05}.safetensors", folder / name)
    if several:
        index = {"metadata": {"total_size": total}, "weight_map": {key: names[n] for key, n in shard_of.items()}}
        with writing(folder / "model.safetensors.index.json"):
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return dtype


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int | None) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and shard_bytes and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu().contiguous().clone()
        size += tensor.nbytes
    yield shard


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str]) -> None:
    """`safetensors.torch.save_file`, but with the mode that the umask leaves, and with the system's error number."""
    with open(file, "wb") as empty:
        mode = stat.S_IMODE(os.fstat(empty.fileno()).st_mode)
    try:
        save_file(dict(tensors), str(file), metadata=dict(metadata))
        os.chmod(file, mode)
    except SafetensorError as error:
        if match := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(match[1]), os.strerror(int(match[1])), str(file)) from None
        raise
