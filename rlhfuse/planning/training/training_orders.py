"""In which order a run trains: by rule, from a file, or searched; and what each of these promises for its problem.

By rule: serial 1F1B, interleaved 1F1B (Megatron's virtual stages), time-sharing (PUZZLE 4.2). Rules are deterministic,
and so is the short search that they are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import FusionConfig
from rlhfuse.planning.training.split_choice import SplitChoice
from rlhfuse.planning.training.training_problem import TICK_SECONDS
from rlhfuse.schedule.io import check_same_layout, load_family
from rlhfuse.schedule.ir.evaluate import evaluate, over_cap
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.ir.ranks import FusedShape, ModelShare, fused_shape
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import serial_1f1b
from rlhfuse.schedule.rules.interleaved import interleaved_1f1b
from rlhfuse.schedule.rules.time_sharing import time_sharing
from rlhfuse.schedule.search.search import SearchSettings, search

SHORT_SEARCH_MOVES = 20_000  # of the search that a rule is compared with: no clock decides what a plan says


@dataclass(frozen=True)
class OrderPromise:
    """What another `setting` than the run's would take for a mini-batch; or in a word why it cannot be."""

    setting: str  # key=value
    makespan_seconds: float | None = None
    peak_activation_bytes: float | None = None
    why_not: str = ""
    searched: bool = False  # for a moment: a longer search may find better


def given_schedules(
    fusion: FusionConfig, problems: Mapping[int, FusionProblem], shape: FusedShape
) -> tuple[dict[int, Schedule], str] | None:
    """Orders of a rule, or of a file in this run's times, and where they are from; None: search them.

    `problems`: by micro-batches per actor pipeline, of which those are left out that have more than any of the file.
    Raises InputError where the rule cannot order the run's layouts, with what would do, or the file is for others.
    """
    if fusion.by_rule:
        rule = fusion.intra_stage
        name = "interleaved 1F1B" if rule == "serial" and _interleaves(shape) else NAMES[rule]
        try:
            made = {rung: RULES[rule](problem, shape) for rung, problem in problems.items()}
        except InputError as error:
            raise InputError(f"fusion.intra_stage={rule}: {error}; or set fusion.intra_stage=search") from None
        return made, f"{name}: fusion.intra_stage={rule}"
    if fusion.schedule:
        loaded = load_family(fusion.schedule)
        most = max(loaded)
        usable = {rung: problem for rung, problem in problems.items() if rung <= most} or problems
        try:
            for rung, problem in usable.items():
                check_same_layout(loaded[most].problem.with_microbatches(min(rung, most)), problem, fusion.schedule)
        except InputError as error:
            raise InputError(f"fusion.schedule={error}") from None
        return derived(loaded, problems), f"order read from {fusion.schedule}"
    return None


def derived(known: Mapping[int, Schedule], problems: Mapping[int, FusionProblem]) -> dict[int, Schedule]:
    """Schedules of `problems` from those that are `known`: of the next with as many micro-batches or more, if any."""
    made = {}
    for rung, problem in problems.items():
        if larger := [count for count in known if count >= rung]:
            made[rung] = known[min(larger)].of_fewer(problem)
    return made


def other_promises(
    fusion: FusionConfig, seed: int, problem: FusionProblem, split: SplitChoice, shape: FusedShape
) -> tuple[OrderPromise, ...]:
    """Promises of orders that the run does not train in, for the same layouts, times and micro-batches; search first.

    `problem`: the run's, with the backwards of `split` in two parts. `seed`: of the short search.
    """
    searches = {"fusion.split_backward=false": split.whole} if split.models else {}
    alike = problem if fusion.split_backward == "true" else split.whole  # what another order would be chosen for
    if fusion.intra_stage != "search" or fusion.schedule:
        searches = {"fusion.intra_stage=search": directed(alike, shape, alternate=True)}
    promises = [_promise(key, partial(short_search, seed, stated), searched=True) for key, stated in searches.items()]
    for rule, build in RULES.items():
        if rule != fusion.intra_stage and not (rule == "serial" and _interleaves(shape)):
            placed = directed(alike, shape, alternate=rule != "time_sharing")
            promises.append(_promise(f"fusion.intra_stage={rule}", partial(build, placed, shape)))
    return tuple(promises)


def short_search(seed: int, problem: FusionProblem) -> Schedule:
    """What a moment finds, by a number of moves."""
    settings = SearchSettings(iterations=SHORT_SEARCH_MOVES, seed=seed, objective="memory")
    return search(problem, settings)[0]


def directed(problem: FusionProblem, shape: FusedShape, alternate: bool) -> FusionProblem:
    """`problem` with every second model in the other direction, or all in one; it then has no memory cap of a node's
    own, for other stages meet on a node."""
    shares = fused_shape(shape.layouts, alternate).shares
    places = {name: share.placement(k) for share in shares for k, name in enumerate(share.names)}
    if all(places[pipeline.name] == pipeline.placement for pipeline in problem.pipelines):
        return problem
    placed = tuple(replace(pipeline, placement=places[pipeline.name]) for pipeline in problem.pipelines)
    return replace(problem, pipelines=placed, memory_cap=None, static_memory=0)


def _promise(setting: str, build: Callable[[], Schedule], searched: bool = False) -> OrderPromise:
    try:
        schedule = build()
    except InputError as error:
        return OrderPromise(setting, why_not=str(error))
    timeline = evaluate(schedule)
    if over_cap(schedule.problem, timeline.node_peak_memory) is not None:
        return OrderPromise(setting, why_not="needs more memory than a rank has")
    seconds = float(timeline.makespan) * TICK_SECONDS
    return OrderPromise(setting, seconds, float(timeline.peak_memory), searched=searched)


def _interleaved(problem: FusionProblem, shape: FusedShape) -> Schedule:
    for share in shape.shares:
        if share.layout.chunks == 1:
            raise InputError(f"{_key(share)} has no virtual stages; give it some, as in d1t1p2v2")
    return interleaved_1f1b(problem)


def _time_sharing(problem: FusionProblem, shape: FusedShape) -> Schedule:
    """Raises InputError naming the layouts unless all models' pipelines cover the same nodes once."""
    kinds = {(share.depth, share.pipelines, share.layout.chunks) for share in shape.shares}
    if len(kinds) > 1 or shape.shares[0].layout.chunks > 1:
        named = " and ".join(map(_key, shape.shares))
        raise InputError(f"{named} need equal pipelines without virtual stages; give all models one layout")
    return time_sharing(problem)


def _key(share: ModelShare) -> str:
    return f"parallel.{share.model}_train={replace(share.layout, cut=None)}"


def _interleaves(shape: FusedShape) -> bool:
    return all(layout.chunks > 1 for layout in shape.layouts.values())


RULES: dict[str, Callable[[FusionProblem, FusedShape], Schedule]] = {
    "interleaved": _interleaved,
    "time_sharing": _time_sharing,
    "serial": lambda problem, shape: interleaved_1f1b(problem) if _interleaves(shape) else serial_1f1b(problem),
}
NAMES = {"interleaved": "interleaved 1F1B", "time_sharing": "time-sharing 1F1B", "serial": "serial 1F1B"}
