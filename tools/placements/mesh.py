"""Blocks of consecutive ranks, and those of them that are aligned: any two are nested or disjoint."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfuse.config.machines import Machines, worst
from rlhfuse.config.spec import HardwareSpec


@dataclass(frozen=True, order=True)
class Mesh:
    """`size` ranks from `first` on."""

    first: int
    size: int

    @property
    def last(self) -> int:
        return self.first + self.size - 1

    def overlaps(self, other: Mesh) -> bool:
        return self.first <= other.last and other.first <= self.last

    def holds(self, other: Mesh) -> bool:
        """Whether all ranks of `other` are among these."""
        return self.first <= other.first and other.last <= self.last

    def __str__(self) -> str:
        return f"@{self.first}-{self.last}"


@dataclass(frozen=True)
class MeshTree:
    """A mesh and the largest aligned ones inside it."""

    mesh: Mesh
    parts: tuple[MeshTree, ...]

    def meshes(self) -> list[Mesh]:
        """This one first, then those of each part."""
        return [self.mesh, *(mesh for part in self.parts for mesh in part.meshes())]


def aligned_meshes(ranks: int, least: int) -> MeshTree:
    """All ranks, and every block of a power of two of them, at least `least`, that begins at a multiple of its size."""
    return _tree(Mesh(0, ranks), least)


def split_meshes(ranks: int, left: int, least: int) -> MeshTree:
    """All ranks, the first `left` of them and the others, and what each of these is made of."""
    return MeshTree(Mesh(0, ranks), (_tree(Mesh(0, left), least), _tree(Mesh(left, ranks - left), least)))


def _tree(mesh: Mesh, least: int) -> MeshTree:
    sizes = [1 << bit for bit in reversed(range(mesh.size.bit_length())) if mesh.size >> bit & 1]
    if len(sizes) == 1:
        sizes = [mesh.size // 2] * 2
    parts, first = [], mesh.first
    for size in sizes:
        if size >= max(least, 1):
            parts.append(_tree(Mesh(first, size), least))
        first += size
    return MeshTree(mesh, tuple(parts))


def hardware_on(machines: Machines, mesh: Mesh) -> HardwareSpec:
    """What a task on these ranks can count on."""
    there, begin = [], 0
    for spec, count in machines.kinds:
        if (held := min(mesh.last + 1, begin + count) - max(mesh.first, begin)) > 0:
            there.append((spec, held))
        begin += count
    return worst(there)
