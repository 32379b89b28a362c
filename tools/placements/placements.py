"""Placements by name, those of other systems among them, each with its best split and layouts, found exactly.

FlexRLHF: interleaving 1 and 2, disaggregated with shadow models. ReaLHF and REAL: the heuristic, and the free search.
Phases are serial: generation, then inference, then training; within a phase calls on disjoint ranks run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from placements.across_iterations import best_lanes
from placements.exact_search import best_plan
from placements.mesh import Mesh, MeshTree, hardware_on
from placements.problem import MeshPlan, MeshProblem
from placements.run_problem import RunProblem

from rlhfuse.base.errors import InputError
from rlhfuse.tasks.task import TRAINED

Places = Mapping[str, Callable[[Mesh], bool]]  # by call: where it may run
Best = tuple[float, MeshPlan]


@dataclass(frozen=True)
class Placement:
    """`seconds` of an iteration, infinite where it cannot be: then `why_not` says it. `bound`: seconds that it would
    take with all the memory it wants, below which no layouts bring it; infinite where no memory would help."""

    name: str
    seconds: float
    plan: MeshPlan
    why_not: str = ""
    note: str = ""
    bound: float = inf


def placements(
    run: RunProblem, roomy: RunProblem | None = None, told: Callable[[str], None] = lambda what: None
) -> tuple[Placement, ...]:
    """All of them; `free` is last, and no slower than any other but the critic's across iterations. `roomy`: the same
    run with memory without end, if bounds are wanted."""
    made = []
    for name, best in SHAPES.items():
        told(name)
        try:
            placed = Placement(name, *best(run))
        except InputError as error:
            placed = Placement(name, inf, {}, str(error))
        made.append(replace(placed, bound=_bound(best, roomy)))
    told("free")
    free = _free(run, [placement.plan for placement in made if placement.plan and placement.name not in OVERLAPPED])
    return (*made, replace(free, bound=_bound(lambda run: _exact(run.problem, run.aligned), roomy)))


def _bound(best: Callable[[RunProblem], Best], roomy: RunProblem | None) -> float:
    try:
        return best(roomy)[0] if roomy else inf
    except InputError:
        return inf


def _free(run: RunProblem, starts: Iterable[MeshPlan]) -> Placement:
    """The best on aligned meshes, exactly, or a start that is better."""
    problem = run.problem
    try:
        exact = best_plan(problem, run.aligned)
    except InputError as error:
        return Placement("free", inf, {}, str(error))
    best = min([exact.plan, *starts], key=problem.seconds)
    bound = min(exact.bound, exact.seconds)
    note = (
        f"on aligned meshes {exact.seconds:.4g} s: {exact.priced} of {exact.placements} placements of trainings were "
        f"priced, all others take {bound:.4g} s or more"
    )
    return Placement("free", problem.seconds(best), best, note=note)


def _colocated(run: RunProblem) -> Best:
    return _best(run, [(run.aligned, {})])


def _split_training(run: RunProblem) -> Best:
    _needs(run, "critic_train")
    return _best(run, ((tree, _at(actor_train=a, critic_train=b)) for tree, a, b in _halves(run)))


def _interleaving_1(run: RunProblem) -> Best:
    _needs(run, "reference_inference", "reward_inference")
    return _best(run, ((tree, _at(reference_inference=a, reward_inference=b)) for tree, a, b in _halves(run)))


def _interleaving_2(run: RunProblem) -> Best:
    """Generation on all ranks or the actor's."""
    _needs(run, "reference_inference", "reward_inference", "critic_train")
    whole, tables = run.whole, []
    for tree, a, b in _halves(run):
        places = {**_at(actor_train=a, critic_train=b, critic_inference=b), "generation": {a, whole}.__contains__}
        tables.append((tree, {**places, **_at(reference_inference=a, reward_inference=b)}))
        tables.append((tree, {**places, **_at(reference_inference=b, reward_inference=a)}))
    return _best(run, tables)


def _disaggregated(run: RunProblem) -> Best:
    """Trainings on some ranks, generation and inference with copies of their own on the others."""
    tables = []
    for tree, a, b in _halves(run):
        tables.append((tree, {name: (b if name in TRAINED else a).holds for name in run.problem.calls}))
    return _best(run, tables)


def _critic_across(run: RunProblem) -> Best:
    _needs(run, "critic_train")
    lanes = [best for _, a, b in _halves(run) if (best := best_lanes(run.problem, a, b))]
    if not lanes:
        raise InputError("no split has room for the actor's calls on one part and the critic's on the other")
    return min(lanes, key=lambda lane: lane[0])


def _heuristic(run: RunProblem) -> Best:
    """All calls on all ranks with as many tensor ranks as fit; of pipelines the fastest."""
    here = {name: call.options.get(run.whole, ()) for name, call in run.problem.calls.items()}
    why = InputError("no layout fits on all ranks")
    for most in sorted({option.layout.tp for options in here.values() for option in options}, reverse=True):
        calls = {}
        for name, options in here.items():
            degree = max((option.layout.tp for option in options if option.layout.tp <= most), default=0)
            calls[name] = {run.whole: tuple(option for option in options if option.layout.tp == degree)}
        try:
            return _exact(_with_options(run.problem, calls), run.aligned)
        except InputError as error:
            why = error
    raise why


SHAPES: Mapping[str, Callable[[RunProblem], Best]] = {
    "colocated, serial": _colocated,
    "split training": _split_training,
    "interleaving 1": _interleaving_1,
    "interleaving 2": _interleaving_2,
    "disaggregated": _disaggregated,
    "critic across iterations": _critic_across,
    "REAL's heuristic": _heuristic,
}
OVERLAPPED = ("critic across iterations",)  # whose seconds are a period, not an iteration from its beginning to its end


def _best(run: RunProblem, tables: Iterable[tuple[MeshTree, Places]]) -> Best:
    """Finds the best of tables; a call without a place runs on all ranks. Raises InputError where none fits."""
    best, why = None, InputError(f"{run.machines.ranks} ranks have no two parts of whole machines, or halves of one")
    for tree, places in tables:
        try:
            placed = _exact(_restricted(run, places), tree)
        except InputError as error:
            why = error
            continue
        if best is None or placed[0] < best[0]:
            best = placed
    if best is None:
        raise why
    return best


def _exact(problem: MeshProblem, tree: MeshTree) -> Best:
    best = best_plan(problem, tree)
    return best.seconds, best.plan


def _restricted(run: RunProblem, places: Places) -> MeshProblem:
    calls = {}
    for name, call in run.problem.calls.items():
        allowed = places.get(name, run.whole.__eq__)
        calls[name] = {mesh: some for mesh, some in call.options.items() if allowed(mesh)}
    return _with_options(run.problem, calls)


def _with_options(problem: MeshProblem, options: Mapping[str, Mapping]) -> MeshProblem:
    """Raises InputError for a call that is left with none."""
    for name, by_mesh in options.items():
        if not any(by_mesh.values()):
            raise InputError(f"no layout of {name} fits there")
    phases = (tuple(replace(call, options=options[call.name]) for call in phase) for phase in problem.phases)
    return replace(problem, phases=tuple(phases))


def _at(**meshes: Mesh) -> dict[str, Callable[[Mesh], bool]]:
    return {name: mesh.__eq__ for name, mesh in meshes.items()}


def _halves(run: RunProblem) -> Iterator[tuple[MeshTree, Mesh, Mesh]]:
    """Two blocks of all ranks, either way round; of those that differ by the numbers of equal ranks alone the first."""
    seen = set()
    for tree in run.splits:
        left, right = (part.mesh for part in tree.parts)
        for first, second in ((left, right), (right, left)):
            kind = tuple(hardware_on(run.machines, mesh) for mesh in (first, second)), first.size
            if kind not in seen:
                seen.add(kind)
                yield tree, first, second


def _needs(run: RunProblem, *names: str) -> None:
    for name in names:
        if name not in run.problem.calls:
            raise InputError(f"this run has no {name}")
