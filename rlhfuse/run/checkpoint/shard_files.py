"""The files of a checkpoint that hold tensors: one per rank, each with what that rank owns, readable as whole models.

    rank-R.safetensors    tensor <role>.<kind>.<parameter>, flat; the header says which part of the parameter it is

Readers map the files and take the rows that they need, so a run of any layout reads the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import json_value
from rlhfuse.models.hf_folder import save_tensors
from rlhfuse.parallel.fragments import Fragment, Place, Read, assemble


@dataclass(frozen=True)
class FileFacts:
    """One rank's file."""

    name: str
    size_bytes: int
    sha256: str

    def check(self, folder: Path) -> None:
        """Raise InputError unless the file is there as it was written."""
        file = folder / self.name
        if not file.is_file():
            raise InputError(f"{file} is missing: the checkpoint is incomplete")
        size = file.stat().st_size
        if size != self.size_bytes:
            raise InputError(f"{file} has {size} bytes, its manifest says {self.size_bytes}: the file is corrupt")
        if file_digest(file) != self.sha256:
            raise InputError(f"{file} does not have the sha256 of its manifest: the file is corrupt")


def file_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def file_digest(file: Path) -> str:
    sha = hashlib.sha256()
    with open(file, "rb") as stream:
        while piece := stream.read(1 << 20):
            sha.update(piece)
    return sha.hexdigest()


def write_rank_file(folder: Path, rank: int, state: Mapping[str, Sequence[Fragment]]) -> FileFacts:
    """One rank's fragments by role, on disk when this returns. Raises OSError."""
    tensors, header = {}, {}
    for role, fragments in state.items():
        header[role] = [[part.name, part.step, list(part.tensors), part.place.to_list()] for part in fragments]
        tensors |= {f"{role}.{kind}.{part.name}": value for part in fragments for kind, value in part.tensors.items()}
    file = folder / file_name(rank)
    save_tensors(tensors, file, {"fragments": json.dumps(header)})
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())
    return FileFacts(file.name, file.stat().st_size, file_digest(file))


class ShardReader:
    """All ranks' fragments of a checkpoint, of whatever layout, under the names of whole parameters."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Reads headers only. Raises InputError naming a file that is none of a checkpoint."""
        self._stored: dict[tuple[str, str, str], list[tuple[Place, Read]]] = defaultdict(list)
        self._steps: dict[tuple[str, str], int] = {}
        for file in files:
            try:
                opened = safe_open(file, framework="pt")
                header = json_value((opened.metadata() or {})["fragments"], str(file))
                for role, rows in header.items():
                    for name, step, kinds, place in rows:
                        self._note(role, name, step, kinds, Place.from_list(place), opened)
            except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
                raise InputError(f"{file} is no part of a checkpoint ({error}); use another checkpoint") from None

    def _note(self, role: str, name: str, step: int, kinds: list[str], place: Place, opened: Any) -> None:
        self._steps[role, name] = int(step)
        for kind in kinds:
            key = f"{role}.{kind}.{name}"
            if opened.get_slice(key).get_shape() != [place.stop - place.start]:
                raise ValueError(f"{key} is not of the length that the header says")
            self._stored[role, kind, name].append((place, partial(_slice, opened, key)))

    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for role, _ in self._steps))

    def shapes(self, role: str) -> dict[str, tuple[int, ...]]:
        """Whole parameters of a role."""
        mine = {name: rows for (of, kind, name), rows in self._stored.items() if (of, kind) == (role, "main")}
        return {name: rows[0][0].shape for name, rows in mine.items()}

    def step(self, role: str, name: str) -> int:
        """Adam's step."""
        return self._steps[role, self._known(role, name)]

    def read(self, role: str, name: str, kind: str, place: Place) -> Tensor:
        """Float32 values of `place`, flat. Raises ValueError naming what is missing or of another shape."""
        stored = self._stored[role, kind, self._known(role, name)]
        try:
            return assemble(place, stored, torch.float32)
        except ValueError as error:
            raise ValueError(f"{role}.{kind}.{name}: {error}") from None

    def whole(self, role: str, name: str) -> Tensor:
        """A whole parameter of a role, float32. Raises ValueError as `read` does."""
        shape = self.shapes(role)[self._known(role, name)]
        return self.read(role, name, "main", Place.whole(shape)).view(shape)

    def _known(self, role: str, name: str) -> str:
        """The name under which a parameter is stored: a tied output layer has its own only apart from its embedding."""
        if (role, name) in self._steps:
            return name
        if name == "output_layer.weight" and (role, tied := "embedding.word_embeddings.weight") in self._steps:
            return tied
        raise ValueError(f"{role}.{name} is not in the checkpoint, which has {len(self._steps)} parameters")


def _slice(opened: Any, key: str, start: int, stop: int) -> Tensor:
    return opened.get_slice(key)[start:stop]
