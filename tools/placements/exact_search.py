"""The fastest placement of all calls on aligned meshes, exactly.

First the calls that hold memory all the time, trainings: their placements in ascending order of a bound, one of each
kind that only renumbers equal parts of the cluster. In the room that one leaves the others are placed exactly: aligned
meshes nest, so that a phase takes the largest sum of its calls on a rank, which splits over the halves of a mesh.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import inf

from placements.mesh import Mesh, MeshTree, aligned_meshes
from placements.problem import Call, Choice, MeshPlan, MeshProblem, Option

from rlhfuse.base.errors import InputError
from rlhfuse.base.readable_bytes import readable_bytes

Placed = tuple[tuple[str, int, Option, int], ...]  # name, first rank from a mesh's first on, option, ranks
Table = list[tuple[float, Placed]]  # by set of calls, as bits: least seconds of a mesh with these on it, and how


@dataclass(frozen=True)
class BestPlan:
    """The best plan, and what it was compared with: `placements` of trainings, of which so many were `priced`; all
    others have a bound of at least `bound` seconds."""

    plan: MeshPlan
    seconds: float
    placements: int
    priced: int
    bound: float


def best_plan(problem: MeshProblem, tree: MeshTree | None = None) -> BestPlan:
    """The plan of least seconds that fits, on the meshes of a tree, or on all that are aligned.

    Nothing is random; of equal plans the first by its text. Raises InputError where nothing fits.
    """
    tree = tree or aligned_meshes(problem.ranks, problem.least)
    kinds = mesh_kinds(problem, tree)
    rooms = _Rooms(problem, kinds)
    alone = [rooms.least_seconds(number, tree) for number in range(len(problem.phases))]
    training = [any(call.resident for call in phase) for phase in problem.phases]
    queue = []
    for text, plan in _resident_placements(problem, tree, kinds):
        parts = [
            max(least, _load(problem, number, plan)) if training[number] else least
            for number, least in enumerate(alone)
        ]
        queue.append((sum(parts), text, plan, parts))
    queue.sort(key=lambda entry: entry[:2])
    best, best_seconds, priced, bound = None, inf, 0, inf
    for bound, _, plan, parts in queue:
        if bound >= best_seconds:
            break
        priced += 1
        filled = rooms.fill(plan, tree, parts, best_seconds)
        if filled is not None:
            best_seconds, best = filled
    else:
        bound = inf
    if best is None:
        names, size = ", ".join(call.name for call in problem.residents), readable_bytes(max(problem.memory_bytes))
        what = f"no placement beside {names}" if queue else f"no placement of {names}"
        raise InputError(
            f"{what} on {problem.ranks} ranks fits into {size} of a rank; use more ranks or larger devices"
        )
    return BestPlan(best, problem.seconds(best), len(queue), priced, bound)


def mesh_kinds(problem: MeshProblem, tree: MeshTree) -> dict[Mesh, int]:
    """A number for each mesh; equal where calls have the same options and ranks as much memory, in it and in the parts
    that it is made of."""
    options: dict[tuple, int] = {}
    seen: dict[int, int] = {}  # by identity: most meshes share their options
    kinds: dict[tuple, int] = {}
    by_mesh: dict[Mesh, int] = {}

    def number(some: Sequence[Option]) -> int:
        if id(some) not in seen:
            seen[id(some)] = options.setdefault(tuple(some), len(options))
        return seen[id(some)]

    def visit(tree: MeshTree) -> int:
        mesh = tree.mesh
        own = tuple(number(call.options.get(mesh, ())) for call in problem.calls.values())
        memory = problem.memory_bytes[mesh.first : mesh.last + 1]
        runs = tuple((size, len(list(same))) for size, same in groupby(memory))
        parts = tuple((part.mesh.first - mesh.first, visit(part)) for part in tree.parts)
        by_mesh[mesh] = kinds.setdefault((mesh.size, own, runs, parts), len(kinds))
        return by_mesh[mesh]

    visit(tree)
    return by_mesh


def _resident_placements(
    problem: MeshProblem, tree: MeshTree, kinds: Mapping[Mesh, int]
) -> Iterator[tuple[str, dict[str, Choice]]]:
    """Placements of the calls that hold memory: those that fit by themselves, one of each kind; first their text."""
    choices = {
        (call.name, mesh): [(str(choice), choice) for choice in call.choices(mesh)]
        for call in problem.residents
        for mesh in kinds
    }
    names = [call.name for call in problem.residents]
    for meshes in _unlike(tree, len(names), (), kinds):
        for chosen in product(*(choices[key] for key in zip(names, meshes))):
            plan = {name: choice for name, (_, choice) in zip(names, chosen)}
            if not plan or problem.fits(plan):
                yield " ".join(text for text, _ in chosen), plan


def _unlike(
    tree: MeshTree, count: int, marked: tuple[Mesh, ...], kinds: Mapping[Mesh, int]
) -> Iterator[tuple[Mesh, ...]]:
    """Meshes for so many calls, one tuple of all that differ by the numbers of equal parts alone."""
    if len(marked) == count:
        yield marked
        return
    for mesh in _first_of_equals(tree, marked, kinds):
        yield from _unlike(tree, count, (*marked, mesh), kinds)


def _first_of_equals(tree: MeshTree, marked: tuple[Mesh, ...], kinds: Mapping[Mesh, int]) -> Iterator[Mesh]:
    """Meshes, of parts of one kind that no marked mesh has touched only those of the first."""
    yield tree.mesh
    seen = set()
    for part in tree.parts:
        if not any(part.mesh.holds(mesh) for mesh in marked):
            if kinds[part.mesh] in seen:
                continue
            seen.add(kinds[part.mesh])
        yield from _first_of_equals(part, marked, kinds)


def _load(problem: MeshProblem, number: int, plan: MeshPlan) -> float:
    """The largest sum of the phase's placed calls on a rank."""
    placed = [plan[call.name] for call in problem.phases[number] if call.name in plan]
    on_rank = (
        sum(choice.option.seconds for choice in placed if choice.mesh.first <= rank <= choice.mesh.last)
        for rank in {choice.mesh.first for choice in placed}
    )
    return max(on_rank, default=0.0)


class _Rooms:
    """Places the calls that hold nothing into what the others leave."""

    def __init__(self, problem: MeshProblem, kinds: Mapping[Mesh, int]) -> None:
        self.problem, self._kinds = problem, kinds
        self.free = [[call for call in phase if not call.resident] for phase in problem.phases]
        first = {kind: mesh for mesh, kind in reversed(list(kinds.items()))}
        self._stairs = {
            (call.name, kind): _stairs(call.options.get(mesh, ()))
            for calls in self.free
            for call in calls
            for kind, mesh in first.items()
        }
        self._untouched: dict[tuple[int, int, float], Table] = {}  # by phase, kind of mesh, and bytes held above
        self._memory: dict[Mesh, float] = {}

    def least_seconds(self, number: int, tree: MeshTree) -> float:
        """Seconds of the phase with nothing else placed and no weights to fetch: no plan takes less."""
        calls = [_without_fetching(call) for call in self.free[number]]
        only = replace(self.problem, phases=(tuple(calls),))
        alone = _Rooms(only, self._kinds)
        return alone._table(0, tree, {}, 0.0)[0][-1][0]

    def fill(
        self, plan: dict[str, Choice], tree: MeshTree, lower: list[float], limit: float
    ) -> tuple[float, dict[str, Choice]] | None:
        """Seconds and the whole plan, if they are below `limit`; `lower`: bounds of the phases."""
        whole, seconds = dict(plan), sum(lower)
        for number in sorted(range(len(lower)), key=lambda number: len(self.free[number])):
            added, placed = self._table(number, tree, plan, 0.0)[0][-1]
            seconds += added - lower[number]
            if not seconds < limit:
                return None
            whole |= {name: Choice(Mesh(first, size), option) for name, first, option, size in placed}
        return seconds, whole

    def _table(self, number: int, tree: MeshTree, plan: Mapping[str, Choice], above: float) -> tuple[Table, float]:
        """Table of a phase on a mesh where calls on larger ones hold `above` bytes, and the least room of a rank."""
        mesh = tree.mesh
        inside = [choice for choice in plan.values() if mesh.holds(choice.mesh)]
        key = number, self._kinds[mesh], above
        if not inside and key in self._untouched:
            return self._untouched[key], self._least_memory(mesh) - above
        held = above + sum(choice.option.held_bytes for choice in inside if choice.mesh == mesh)
        whole = (1 << len(self.free[number])) - 1
        table: Table = [(0.0, ()), *[(inf, ())] * whole]
        room = self._least_memory(mesh) - held
        for place, part in enumerate(tree.parts):
            inner, inner_room = self._table(number, part, plan, held)
            room, offset = min(room, inner_room), part.mesh.first - mesh.first
            inner = [
                (seconds, tuple((name, offset + first, option, size) for name, first, option, size in placed))
                for seconds, placed in inner
            ]
            table = inner if place == 0 else [_side_by_side(table, inner, calls) for calls in range(whole + 1)]
        pinned = sum(
            plan[call.name].option.seconds
            for call in self.problem.phases[number]
            if call.name in plan and plan[call.name].mesh == mesh
        )
        here = [self._fastest(call, mesh, plan, room) for call in self.free[number]]
        table = [self._with_here(table, here, calls, pinned, number, mesh) for calls in range(whole + 1)]
        if not inside:
            self._untouched[key] = table
        return table, room

    def _least_memory(self, mesh: Mesh) -> float:
        if mesh not in self._memory:
            self._memory[mesh] = min(self.problem.memory_bytes[mesh.first : mesh.last + 1])
        return self._memory[mesh]

    def _with_here(
        self, table: Table, here: list[tuple[float, Option | None]], calls: int, pinned: float, number: int, mesh: Mesh
    ) -> tuple[float, Placed]:
        """The best of running some of `calls` on the whole mesh, after what runs on parts of it."""
        best: tuple[float, Placed] = (inf, ())
        for chosen in _subsets(calls):
            seconds, placed = table[calls ^ chosen]
            seconds += pinned + sum(here[bit][0] for bit in _bits(chosen))
            if seconds < best[0]:
                names = [self.free[number][bit].name for bit in _bits(chosen)]
                running = [option for bit in _bits(chosen) if (option := here[bit][1])]
                options = [(name, 0, option, mesh.size) for name, option in zip(names, running)]
                best = seconds, (*placed, *options)
        return best

    def _fastest(self, call: Call, mesh: Mesh, plan: MeshPlan, room: float) -> tuple[float, Option | None]:
        """The call's best option on the mesh with so many bytes left, and its seconds."""
        passing, fastest = self._stairs[call.name, self._kinds[mesh]]
        step = bisect_right(passing, room) - 1
        best = fastest[step] if step >= 0 else (inf, None)
        source = plan.get(call.source)
        if source is not None and source.mesh == mesh:
            for option in call.options.get(mesh, ()):  # where and as the source: nothing to fetch
                if option.layout == source.option.layout and option.passing_bytes <= room and option.seconds < best[0]:
                    best = option.seconds, option
        return best


def _stairs(options: Sequence[Option]) -> tuple[tuple[float, ...], tuple[tuple[float, Option], ...]]:
    """Bytes in ascending order, and the fastest option that needs no more, its weights fetched."""
    ordered = sorted(options, key=lambda option: (option.passing_bytes, option.seconds, str(option.layout)))
    fastest: list[tuple[float, Option]] = []
    for option in ordered:
        seconds = option.seconds + option.fetch_seconds
        fastest.append(fastest[-1] if fastest and fastest[-1][0] <= seconds else (seconds, option))
    return tuple(option.passing_bytes for option in ordered), tuple(fastest)


def _without_fetching(call: Call) -> Call:
    options = {
        mesh: tuple(Option(option.layout, option.seconds, 0.0, option.passing_bytes) for option in options)
        for mesh, options in call.options.items()
    }
    return Call(call.name, options)


def _side_by_side(left: Table, right: Table, calls: int) -> tuple[float, Placed]:
    """The best of dealing `calls` to two disjoint meshes."""
    best: tuple[float, Placed] = (inf, ())
    for chosen in _subsets(calls):
        seconds = max(left[chosen][0], right[calls ^ chosen][0])
        if seconds < best[0]:
            best = seconds, left[chosen][1] + right[calls ^ chosen][1]
    return best


def _subsets(calls: int) -> Iterator[int]:
    """All sets of calls within this one, as bits."""
    chosen = calls
    while True:
        yield chosen
        if not chosen:
            return
        chosen = (chosen - 1) & calls


def _bits(calls: int) -> Iterator[int]:
    return (bit for bit in range(calls.bit_length()) if calls >> bit & 1)
