"""Hugging Face checkpoints in and out: the one place that knows both sides' parameter names.

Inside, weights go by Megatron-core names: linear_qkv holds for each KV group the rows of its queries, key and value,
linear_fc1 [gate, up] of this tensor rank. Layers are numbered from 0 within the part that is loaded. A scalar head
(`score.weight` outside) is `output_layer.weight` [1, hidden], whole on every tensor rank. Reading is lazy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import is_listed, open_file
from rlhfuse.base.json_values import JsonModel, parse_json, read_json
from rlhfuse.config.layer_weights import layer_weights
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import LONGEST_NAME
from rlhfuse.models.hf_names import EMBEDDING, JOINED, LM_HEAD, SCALAR_HEAD, expected_tensors, joined, layer_shapes

SINGLE = "model.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor of a checkpoint lies: rows of what is stored as `name`, from row `first` on."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    first: int = 0


class _IndexJson(JsonModel, extra="ignore"):
    weight_map: dict[str, str]


def checkpoint_index(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of the folder, from its files' headers alone, as transformers finds them: a model.safetensors comes
    before an index, of its files the last. Raises InputError for a missing or broken file."""
    single, shards = path / SINGLE, _listed_shards(path)
    files = shards if shards and not is_listed(single) else [single]
    return {entry.name: entry for file in files for entry in _entries(file)}


def _listed_shards(path: Path) -> list[Path]:
    """Files that the folder's index names; none without one."""
    listing = path / f"{SINGLE}.index.json"
    if not is_listed(listing):
        return []
    again = "download the checkpoint again"
    names = set(parse_json(_IndexJson, read_json(listing, own=False, fix=again), str(listing)).weight_map.values())
    if outside := [
        name for name in names if Path(name).name != name or "\0" in name or len(name.encode()) > LONGEST_NAME
    ]:
        raise InputError(f"{listing} names {outside[0]!r:.80}, which is no file of the folder; {again}")
    return sorted(path / name for name in names)


def _entries(file: Path) -> list[TensorEntry]:
    opened = _open(file)
    views = {name: opened.get_slice(name) for name in opened.keys()}
    return [TensorEntry(file, name, tuple(view.get_shape()), view.get_dtype()) for name, view in views.items()]


def _open(file: Path) -> Any:
    if not is_listed(file):
        raise InputError(f"{file} is missing: the checkpoint is incomplete (safetensors are needed); fetch it again")
    open_file(file, "fetch it again").close()
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is half-written or no safetensors file ({error}); fetch it again") from None


def _model_index(path: Path, spec: ModelSpec) -> dict[str, TensorEntry]:
    """`checkpoint_index`, where a tied model may have its embedding under the name of the output layer."""
    index = checkpoint_index(path)
    if spec.tied_embeddings and LM_HEAD in index:
        index.setdefault(EMBEDDING, index[LM_HEAD])
    return index


def _check_said_twice(path: Path, tied: bool) -> None:
    """Raise InputError where the folder has two values of one weight: in two files, or of a tied output layer."""
    index = checkpoint_index(path)
    again = [entry for file in _listed_shards(path) if is_listed(file) for entry in _entries(file)]
    pairs = [(entry, index.get(entry.name, entry), "remove the wrong one") for entry in again]
    if tied and index.keys() >= {LM_HEAD, EMBEDDING}:
        fix = "the two are tied by config.json; set tie_word_embeddings=false there, or remove the wrong one"
        pairs.append((index[LM_HEAD], index[EMBEDDING], fix))
    for one, other, fix in pairs:
        if one != other and (difference := _difference(one, other)):
            raise InputError(f"{path}: {difference}; {fix}")


def _difference(one: TensorEntry, other: TensorEntry) -> str:
    """Where two entries that should be equal differ, with both values; empty where they do not."""
    names = [f"{entry.name} of {entry.file.name}" for entry in (one, other)]
    if one.shape != other.shape:
        return f"{names[0]} has shape {list(one.shape)}, {names[1]} has {list(other.shape)}"
    first, second = (_open(entry.file).get_tensor(entry.name).float() for entry in (one, other))
    if torch.equal(first, second):
        return ""
    at = tuple((first != second).nonzero()[0].tolist())
    return f"{names[0]} at {list(at)} is {float(first[at]):.6g}, {names[1]} is {float(second[at]):.6g}"


def _separate(index: dict[str, TensorEntry], spec: ModelSpec) -> dict[str, TensorEntry]:
    """Inverse of `joined` for entries of an index, which keep pointing into what is stored."""
    for layer in range(spec.layers if spec.architecture in JOINED else 0):
        prefix = f"model.layers.{layer}."
        shapes = layer_shapes(spec, prefix)
        for name, parts in JOINED[spec.architecture].items():
            entry, first = index.pop(prefix + name), 0
            for part in parts:
                shape = shapes[prefix + part]
                index[prefix + part] = replace(entry, shape=shape, first=first)
                first += shape[0]
    return index


def has_scalar_head(path: Path) -> bool:
    """Whether the folder's model gives one number per token. Raises InputError for a bad checkpoint."""
    return SCALAR_HEAD in checkpoint_index(path)


def check_checkpoint(path: Path, spec: ModelSpec, scalar_head: bool, fresh_head: bool = False) -> None:
    """Raise InputError unless exactly the tensors that config.json says are there; a `fresh_head` may be missing.

    The embedding of a language model's output may be there where another head is read, or where it is tied and equal.
    """
    if is_listed(adapter := path / "adapter_config.json"):
        raise InputError(f"{adapter}: adapters are not read; merge it into the weights, or remove it")
    index, expected = _model_index(path, spec), expected_tensors(spec, scalar_head)
    for name in sorted(index.keys() - expected.keys()):
        if not (name.endswith("rotary_emb.inv_freq") or name == LM_HEAD):  # computed; equal or not read by this head
            raise InputError(
                f"{path}: nothing reads the tensor {name}: a {spec.architecture} model has none; use a "
                "checkpoint of a supported model"
            )
    for name, shape in expected.items():
        if name == SCALAR_HEAD and name not in index and fresh_head:
            continue
        if name not in index:
            fix = "train one with TRL's RewardTrainer" if name == SCALAR_HEAD else "fetch the checkpoint again"
            raise InputError(f"{path} has no tensor {name}; {fix}")
        if index[name].shape != shape:
            wanted = f"config.json, with the defaults of {spec.architecture}, makes it {list(shape)}"
            raise InputError(f"{path}: {name} has shape {list(index[name].shape)}, {wanted}; use the model's own")
        if index[name].dtype not in DTYPES:
            raise InputError(f"{path}: {name} is stored as {index[name].dtype}; F32, BF16 and F16 can be read")
    _check_said_twice(path, spec.tied_embeddings and not scalar_head)


class _Reader:
    """Lazy reads of rows and columns by Hugging Face name, of parts of joined tensors by that of the part."""

    def __init__(self, path: Path, spec: ModelSpec, dtype: torch.dtype, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self.index = _separate(_model_index(path, spec), spec)
        self.files = {file: _open(file) for file in {entry.file for entry in self.index.values()}}
        self.dtype = dtype

    def part(self, name: str, part: int = 0, parts: int = 1, dim: int = 0) -> Tensor:
        """One of `parts` equal cuts along dimension `dim`, 0 or 1."""
        entry = self._begin(name)
        view, size = self.files[entry.file].get_slice(entry.name), entry.shape[dim] // parts
        first = part * size + (0 if dim else entry.first)  # no joined tensor is cut by columns
        kept = slice(first, first + size)
        return (view[:, kept] if dim else view[kept]).to(self.dtype).contiguous()

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows [first, last) of what is stored by itself."""
        entry = self._begin(name)
        if first == last:  # which the format cannot say
            return torch.empty(0, *entry.shape[1:], dtype=self.dtype)
        return self.files[entry.file].get_slice(entry.name)[first:last].to(self.dtype)

    def _begin(self, name: str) -> TensorEntry:
        entry = self.index[name]
        self._progress(f"reading {name} of {entry.file}")
        return entry


def load_weights(
    path: str | Path,
    spec: ModelSpec,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    layers: range | None = None,
    first: bool = True,
    last: bool = True,
    scalar_head: bool = False,
    fresh_head: bool = False,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Tensor]:
    """This rank's weights under Megatron-core names: global layers `layers` (default all), renumbered from 0.

    `first` adds the embedding, `last` the final norm and the head. With tied embeddings the head is absent
    when `first` is also loaded and a copy of the embedding otherwise. A scalar head that the folder lacks is zero
    with `fresh_head`, so that every value begins at 0 in any layout. `progress` is told of every tensor before it is
    read. Raises InputError for a bad checkpoint.
    """
    path = Path(path)
    check_checkpoint(path, spec, scalar_head, fresh_head)
    read = _Reader(path, spec, dtype, progress)
    weights: dict[str, Tensor] = {}
    if first:
        weights["embedding.word_embeddings.weight"] = _vocab_part(read, spec, "model.embed_tokens", tp_rank, tp_size)
    for local, layer in enumerate(range(spec.layers) if layers is None else layers):
        weights |= _layer(read, spec, f"model.layers.{layer}.", f"decoder.layers.{local}.", tp_rank, tp_size)
    if last:
        weights["decoder.final_layernorm.weight"] = read.part("model.norm.weight")
        if scalar_head:
            stored = SCALAR_HEAD in read.index
            head = read.part(SCALAR_HEAD) if stored else torch.zeros(1, spec.hidden, dtype=dtype)
            weights["output_layer.weight"] = head
        elif not (spec.tied_embeddings and first):
            module = "model.embed_tokens" if spec.tied_embeddings else "lm_head"
            weights["output_layer.weight"] = _vocab_part(read, spec, module, tp_rank, tp_size)
    return weights


def _vocab_part(read: _Reader, spec: ModelSpec, module: str, tp_rank: int, tp_size: int) -> Tensor:
    size = spec.padded_vocab // tp_size
    first, last = (min(rank * size, spec.vocab) for rank in (tp_rank, tp_rank + 1))
    stored = read.rows(f"{module}.weight", first, last)
    return torch.nn.functional.pad(stored, (0, 0, 0, size - len(stored)))


def _layer(read: _Reader, spec: ModelSpec, hf: str, ours: str, tp_rank: int, tp_size: int) -> dict[str, Tensor]:
    weights = {}
    for weight in layer_weights(spec):
        share = (0, 1, 0) if weight.cut is None else (tp_rank, tp_size, weight.cut)
        parts = [read.part(hf + name, *share) for name in weight.parts]
        if weight.grouped:
            by_group = [part.view(spec.kv_heads // tp_size, -1, *part.shape[1:]) for part in parts]
            parts = [torch.cat(by_group, dim=1).flatten(0, 1)]
        weights[ours + weight.name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return weights


def hf_tensors(weights: Mapping[str, Tensor], spec: ModelSpec, scalar_head: bool) -> Iterator[tuple[str, Tensor]]:
    """Inverse of `load_weights` for a whole model: (Hugging Face name, tensor) one by one, padding stripped."""
    yield EMBEDDING, weights["embedding.word_embeddings.weight"][: spec.vocab]
    for layer in range(spec.layers):
        hf = f"model.layers.{layer}."
        yield from joined(spec, hf, _hf_layer(weights, spec, hf, f"decoder.layers.{layer}."), torch.cat).items()
    yield "model.norm.weight", weights["decoder.final_layernorm.weight"]
    if scalar_head:
        yield SCALAR_HEAD, weights["output_layer.weight"]
    elif not spec.tied_embeddings:
        yield LM_HEAD, weights["output_layer.weight"][: spec.vocab]


def _hf_layer(weights: Mapping[str, Tensor], spec: ModelSpec, hf: str, ours: str) -> dict[str, Tensor]:
    out = {}
    for weight in layer_weights(spec):
        whole = weights[ours + weight.name]
        groups = spec.kv_heads if weight.grouped else 1
        rows = [shape[0] // groups for shape in weight.parts.values()]
        for name, part in zip(weight.parts, whole.unflatten(0, (groups, -1)).split(rows, dim=1)):
            out[hf + name] = part.flatten(0, 1)
    return out
