"""From a checkpoint of a run to Hugging Face folders, on one process and without the ranks that wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import output_folder
from rlhfuse.config.load import model_folder
from rlhfuse.config.spec import ModelSpec
from rlhfuse.models.hf import hf_tensors
from rlhfuse.models.hf_folder import write_folder
from rlhfuse.run.checkpoint.checkpoint import Checkpoint, checkpoints_in
from rlhfuse.run.checkpoint.compatibility import shape_of
from rlhfuse.run.checkpoint.shard_files import ShardReader
from rlhfuse.tasks.role import role_named


@dataclass(frozen=True)
class StoredWeights(Mapping[str, Tensor]):
    """A trained model's whole parameters, read from the files when they are asked for."""

    reader: ShardReader
    role: str
    dtype: torch.dtype

    def __getitem__(self, name: str) -> Tensor:
        return self.reader.whole(self.role, name).to(self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.reader.shapes(self.role))

    def __len__(self) -> int:
        return len(self.reader.shapes(self.role))


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint `path`, or the newest of the run `path`; every byte of it is checked. Raises InputError."""
    if (path / "manifest.json").exists() or path.name == "latest":
        return Checkpoint.open(path)
    folders = checkpoints_in(path)
    if not folders:
        raise InputError(f"{path} is no checkpoint and no run with checkpoints; give one of them")
    return Checkpoint.open(folders[-1])


def convert(
    checkpoint: Checkpoint,
    role: str,
    out: Path,
    like: Path | None = None,
    shard_bytes: int | None = None,
    force: bool = False,
) -> None:
    """Write `role` as a Hugging Face folder `out`, with config and tokenizer of `like`, by default the run's.

    Weights have the dtype that the run trains in, as in its export/. Raises InputError for a role that was not
    trained, for a `like` of another shape and for a disk that is full.
    """
    facts, reader = checkpoint.manifest.facts, checkpoint.open_reader()
    if role not in reader.roles():
        raise InputError(f"{checkpoint.folder} has no {role}, only {', '.join(reader.roles())}")
    named, tokenizer = facts.settings.get("actor.tokenizer"), None
    if like is None and named not in (None, facts.settings["actor.path"]):
        tokenizer = model_folder(named, "actor.tokenizer")
    like = like or model_folder(facts.settings[f"{role}.path"], f"{role}.path", weights=True)
    spec = ModelSpec.from_config(like)
    if json.loads(json.dumps(asdict(spec))) != shape_of(facts.models[role]):
        raise InputError(f"{like} is of another shape than the {role} of {checkpoint.folder}; give --like its folder")
    weights = StoredWeights(reader, role, getattr(torch, facts.settings["trainer.dtype"]))
    head = role_named(role).scalar_head
    with output_folder(out, force) as fresh:
        write_folder(fresh, hf_tensors(weights, spec, head), like, shard_bytes, scalar_head=head, tokenizer=tokenizer)
