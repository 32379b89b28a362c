"""Which models train with backwards in two parts: B, the gradient of the input, and W, those of the weights.

A model is split where that lowers the proved bound of a mini-batch's seconds, the cost of splitting in the prices and
the memory cap in the bound: the same on every rank, and no clock decides it. How far each W then stands behind its B is
the search's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import FusionConfig
from rlhfuse.planning.training.training_problem import TICK_SECONDS, planned_bound
from rlhfuse.schedule.bounds.bounds import capped_bound, latency_bound
from rlhfuse.schedule.io import load_schedule
from rlhfuse.schedule.ir.problem import FusionProblem, Number

WORTH_SPLITTING = 0.01  # of the bound: less is not worth an overhead that is priced, not measured
WORTH_ONE_MORE = 0.001  # the same of a further model
Stated = Callable[[frozenset[str]], FusionProblem]  # the run's problem with the backwards of these models split


@dataclass(frozen=True)
class SplitChoice:
    """The models whose backwards are split, the problem without, and why.

    `compared`: the problem with some split whose bound the plan tells beside that of whole ones, if it chose by bounds.
    """

    models: frozenset[str]
    whole: FusionProblem
    because: str
    compared: FusionProblem | None = None

    @property
    def why(self) -> str:
        """A line for the plan; it takes as long as two bounds."""
        if self.compared is None:
            return self.because
        before, after = _bound(self.whole, latency_bound), _bound(self.compared, latency_bound)
        told = f"{self.because}: {_named(self.models, self.whole.models)}"
        if before is None or after is None:  # no schedule fits: the memory's check says so
            return told
        seconds = f"{after * TICK_SECONDS:.4g} s instead of {before * TICK_SECONDS:.4g} s ({after / before - 1:+.1%})"
        if self.models:
            return f"{told}: the lower bound is {seconds}"
        return f"{told}: split, their lower bound would be {seconds}, not {WORTH_SPLITTING:.0%} less"


def given_split(fusion: FusionConfig, models: Sequence[str]) -> frozenset[str] | None:
    """Those of `models`, all that train, whose backwards the configuration splits; None: the plan chooses.

    Raises InputError as `load_schedule`.
    """
    if fusion.split_backward == "true":
        return frozenset(models)
    if fusion.split_backward == "false" or fusion.intra_stage != "search":
        return frozenset()
    if not fusion.schedule:
        return None
    return frozenset(pipeline.model for pipeline in load_schedule(fusion.schedule).problem.pipelines if pipeline.split)


def choose_split(fusion: FusionConfig, priced: bool, stated: Stated) -> SplitChoice:
    """Choose as fusion.split_backward says; `priced`: the parts of a split backward have a price.

    Raises InputError where what it asks for cannot be.
    """
    whole, asked = stated(frozenset()), f"fusion.split_backward={fusion.split_backward}"
    fix = "; run tools/profile_costs.py again" if fusion.profile else ""
    reason = "" if priced else f"{fusion.profile or 'trainer.pace'} has no times of split backwards{fix}"
    if fusion.split_backward == "false":
        return SplitChoice(frozenset(), whole, f"{asked}: all backwards are whole")
    if fusion.split_backward == "true":
        if reason:
            raise InputError(f"{asked}: {reason}")
        return SplitChoice(frozenset(whole.models), whole, asked, stated(frozenset(whole.models)))
    if fusion.intra_stage != "search":
        why = f"{asked}: all backwards are whole, as fusion.intra_stage={fusion.intra_stage} is no search"
        return SplitChoice(frozenset(), whole, why)
    if (split := given_split(fusion, whole.models)) is not None:
        if split and reason:
            raise InputError(f"fusion.schedule={fusion.schedule} splits backwards: {reason}")
        return SplitChoice(split, whole, f"{asked}: {_named(split, whole.models)}, as in {fusion.schedule}")
    if reason:
        return SplitChoice(frozenset(), whole, f"{asked}: all backwards are whole: {reason}")
    split = _cheapest(whole, stated)
    return SplitChoice(split, whole, asked, stated(split or frozenset(whole.models)))


def _cheapest(whole: FusionProblem, stated: Stated) -> frozenset[str]:
    """The fewest models, in order, that reach the least bound; none where that is not worth it.

    A bound is proved where a quicker one leaves open whether it matters.
    """
    sets = [frozenset(some) for count in range(len(whole.models) + 1) for some in combinations(whole.models, count)]
    problems = {some: stated(some) if some else whole for some in sets}
    quick = {some: bound for some, problem in problems.items() if (bound := _bound(problem, capped_bound)) is not None}
    none, least, bounds = frozenset[str](), inf, {}
    if none not in quick:
        return none
    for some in sorted(quick, key=lambda some: (quick[some], sets.index(some))):
        if quick[some] <= (1 + WORTH_ONE_MORE) * least:
            bounds[some] = float(planned_bound(problems[some]))
            least = min(least, bounds[some])
    without = bounds.get(none, quick[none])
    if least > (1 - WORTH_SPLITTING) * without:
        without = bounds.get(none) or float(planned_bound(whole))
    if least > (1 - WORTH_SPLITTING) * without:
        return none
    return next(some for some in sets if some in bounds and bounds[some] <= (1 + WORTH_ONE_MORE) * least)


def _bound(problem: FusionProblem, bound: Callable[[FusionProblem], Number]) -> float | None:
    """None where no schedule fits into memory."""
    try:
        return float(bound(problem))
    except InputError:
        return None


def _named(split: frozenset[str], models: Sequence[str]) -> str:
    named = [model for model in models if model in split]
    return f"backwards of {' and '.join(named)} are split" if named else "all backwards are whole"
