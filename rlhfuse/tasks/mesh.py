"""The ranks that one call of an iteration runs on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

from rlhfuse.base.errors import InputError

_MESH = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")


class Mesh(tuple[int, ...]):
    """Global ranks in ascending order, written 0-3,8. Raises InputError where there are none or a rank is repeated."""

    def __new__(cls, ranks: Iterable[int]) -> Mesh:
        mesh = super().__new__(cls, ranks)
        if not mesh or list(mesh) != sorted({*mesh}):
            raise InputError(f"mesh of ranks {tuple(mesh)!s:.80}: give at least one rank, ascending, each once")
        return mesh

    @staticmethod
    @cache
    def of_all(world_size: int) -> Mesh:
        """All ranks of a job."""
        return Mesh(range(world_size))

    @staticmethod
    def parse(text: str) -> Mesh:
        """Inverse of `str`. Raises InputError for anything but ranks and ranges of ranks, such as 0-3,8."""
        if not _MESH.fullmatch(str(text)):
            raise InputError(f"mesh {text!r:.80} is not of the form 0-3 or 0-3,8")
        ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
        return Mesh(rank for part in ends for rank in range(part[0], part[-1] + 1))

    def __str__(self) -> str:
        ranks = {*self}
        firsts, lasts = ([rank for rank in self if rank + step not in ranks] for step in (-1, 1))
        return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in zip(firsts, lasts))


MeshText = Annotated[Mesh, PlainValidator(Mesh.parse), PlainSerializer(str)]  # in JSON
