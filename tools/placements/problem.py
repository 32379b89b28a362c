"""What an iteration's calls may choose from, and what a choice for all of them takes.

Calls come in phases; each phase waits for all of the one before, as generation, inference and training do. Within a
phase calls run side by side where their meshes are disjoint, else one after the other in the best order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import permutations

from placements.mesh import Mesh

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout


@dataclass(frozen=True)
class Option:
    """A layout of a call: its seconds, and bytes of each rank of its mesh."""

    layout: ParallelLayout
    seconds: float
    held_bytes: float = 0.0  # all the time: gradients and optimizer states
    passing_bytes: float = 0.0  # while the call runs
    fetch_seconds: float = 0.0  # bringing the weights here first, where the call's source lies otherwise
    note: str = ""  # what the layout does not say, for people


@dataclass(frozen=True)
class Call:
    """One model's work in a phase. `options`: by mesh, none where it may not run; `source`: the call whose weights it
    needs, empty where they never change."""

    name: str
    options: Mapping[Mesh, Sequence[Option]] = field(hash=False)
    source: str = ""

    def choices(self, *meshes: Mesh) -> list[Choice]:
        """All on these meshes."""
        return [Choice(mesh, option) for mesh in meshes for option in self.options.get(mesh, ())]

    @property
    def resident(self) -> bool:
        """Whether it takes memory from calls of other phases."""
        return any(option.held_bytes for options in self.options.values() for option in options)


@dataclass(frozen=True)
class Choice:
    """Where and how a call runs."""

    mesh: Mesh
    option: Option

    def __str__(self) -> str:
        return f"{self.option.layout}{self.mesh}"


MeshPlan = Mapping[str, Choice]  # by the name of the call


@dataclass(frozen=True)
class MeshProblem:
    """Calls by phase; `memory_bytes`: of each rank. The largest mesh is all of them, no mesh has fewer than `least`.

    Raises InputError for a source that holds nothing, so that there would be no saying where weights stay.
    """

    memory_bytes: tuple[float, ...]
    least: int
    phases: tuple[tuple[Call, ...], ...]

    def __post_init__(self) -> None:
        residents = [call.name for call in self.residents]
        for call in self.calls.values():
            if call.source and (call.source not in residents or call.name in residents):
                raise InputError(f"call {call.name} takes weights from {call.source!r}; sources are {residents}")

    @property
    def ranks(self) -> int:
        return len(self.memory_bytes)

    @cached_property
    def calls(self) -> dict[str, Call]:
        return {call.name: call for phase in self.phases for call in phase}

    @cached_property
    def residents(self) -> tuple[Call, ...]:
        """Those that hold memory all the time, which decide on the room of the others."""
        return tuple(call for phase in self.phases for call in phase if call.resident)

    def call_seconds(self, call: Call, plan: MeshPlan) -> float:
        """The call, and bringing its weights unless it runs where and as its source does."""
        own = plan[call.name]
        if call.source:
            source = plan[call.source]
            if (source.mesh, source.option.layout) != (own.mesh, own.option.layout):
                return own.option.seconds + own.option.fetch_seconds
        return own.option.seconds

    def seconds(self, plan: MeshPlan) -> float:
        """Seconds of an iteration."""
        return sum(
            _phase_seconds(tuple((plan[call.name].mesh, self.call_seconds(call, plan)) for call in phase))
            for phase in self.phases
        )

    def fits(self, plan: MeshPlan) -> bool:
        return all(need <= self.memory_bytes[rank] for rank, need in self._needs(plan))

    def need_bytes(self, plan: MeshPlan) -> float:
        """Bytes of the fullest rank: what its calls hold, and the most of what passes while one of them runs."""
        return max(need for _, need in self._needs(plan))

    def _needs(self, plan: MeshPlan) -> Iterator[tuple[int, float]]:
        """Ranks and their bytes. No rank has more calls than some mesh's first, nor less memory than the first of
        those that have as much."""
        for rank in {choice.mesh.first for choice in plan.values()} | self._borders:
            there = [choice.option for choice in plan.values() if choice.mesh.first <= rank <= choice.mesh.last]
            if there:
                held = sum(option.held_bytes for option in there)
                yield rank, held + max(option.passing_bytes for option in there)

    @cached_property
    def _borders(self) -> frozenset[int]:
        """Ranks with other memory than the one before."""
        pairs = enumerate(zip(self.memory_bytes, self.memory_bytes[1:]), 1)
        return frozenset(rank for rank, (before, own) in pairs if before != own)


@lru_cache(maxsize=1024)  # most plans that are compared differ in one call
def _phase_seconds(work: tuple[tuple[Mesh, float], ...]) -> float:
    """The end of calls in their best order."""
    return min(map(_end_in_order, permutations(work)))


def _end_in_order(work: Sequence[tuple[Mesh, float]]) -> float:
    """The end of calls that are all ready at 0 and start in this order, each when its ranks are free."""
    placed: list[tuple[Mesh, float]] = []
    for mesh, seconds in work:
        start = max((end for other, end in placed if other.overlaps(mesh)), default=0.0)
        placed.append((mesh, start + seconds))
    return max(end for _, end in placed)
