"""Which groups of its draw an iteration trains on: the first by place whose scores differ (DAPO: Yu et al. 2025, 3.2).

Groups have places in the draw. Which are taken depends on the scores of places alone: not on how many were begun, in
how many rounds, or in which order they ended. So no sample is preferred for being short.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rlhfuse.base.errors import JointError

PREFIX = "training/filter_groups/"  # of metrics
PLACES = f"{PREFIX}places"
BEGUN = f"{PREFIX}num_gen_batches"  # groups begun for one that is taken
TAKEN, FILLED, EQUAL, SURPLUS, DROPPED = "AFESX"


@dataclass(frozen=True)
class GroupSelection:
    """`wanted` groups of the first `most` places; `differs`: whether scores of a place differ, of those judged so far.

    `prior`: what part of groups differed before; it counts as `wanted` groups beside those judged here.
    """

    wanted: int
    most: int
    differs: Mapping[int, bool] = field(default_factory=dict)
    prior: float = 1.0

    def with_scores(self, scores: Mapping[int, Sequence[float]]) -> GroupSelection:
        """With what the samples of further places were given, all samples of each but those that failed.

        Fewer than two are equal: there is nothing to compare with.
        """
        judged = {place: len({*given}) > 1 for place, given in scores.items()}
        return replace(self, differs={**self.differs, **judged})

    @cached_property
    def accepted(self) -> tuple[int, ...]:
        """Places taken, as far as is known: a lower one that is not judged yet may take the last one's turn."""
        return tuple(sorted(place for place, differs in self.differs.items() if differs)[: self.wanted])

    @property
    def end(self) -> int:
        """The first place that is not needed, whatever the others will be."""
        return self.accepted[-1] + 1 if len(self.accepted) == self.wanted else self.most

    @property
    def done(self) -> bool:
        """Whether nothing that is not judged yet can change what is taken."""
        return all(place in self.differs for place in range(self.end))

    @property
    def share(self) -> float:
        """What part of groups differ, by those before and those here."""
        seen = self.prior * self.wanted + sum(self.differs.values())
        return max(seen / (self.wanted + len(self.differs)), 1 / (2 * self.most))

    def missing(self, begun: int, inflight: int, deviations: float = 0.0) -> int:
        """How many places more to begin after the first `begun`, so that `wanted` can be expected, or are in so many
        standard `deviations` better or worse cases; at most `inflight` are then not judged."""
        waiting = sum(place not in self.differs for place in range(min(begun, self.end)))
        if not (short := self.wanted - len(self.accepted)):
            return 0
        # share n - deviations sqrt(share (1 - share) n) = short
        spread = deviations * math.sqrt(self.share * (1 - self.share))
        enough = ((spread + math.sqrt(spread**2 + 4 * self.share * short)) / (2 * self.share)) ** 2
        return max(0, min(math.ceil(enough - waiting - 1e-9), inflight - waiting, self.most - begun))

    def taken(self, fill: bool) -> tuple[int, ...]:
        """Places of the iteration, ascending, once it is `done`. Where too few differ, `fill` takes the first others.

        Raises JointError without `fill`.
        """
        short = self.wanted - len(self.accepted)
        if short and not fill:
            raise JointError(
                f"algorithm.filter_groups: scores differ in {len(self.accepted)} of {self.most} prompts, {self.wanted} "
                "are wanted; raise max_num_gen_batches, use other prompts, or set on_shortage=fill"
            )
        others = sorted(place for place, differs in self.differs.items() if not differs)[:short]
        return tuple(sorted((*self.accepted, *others)))

    def letters(self, begun: int, taken: Collection[int]) -> str:
        """What became of each place that was begun: A accepted, F equal but taken as too few differ, E equal, S differs
        and is not needed, X not needed and dropped."""

        def letter(place: int) -> str:
            if place not in self.differs:
                return DROPPED
            differs = self.differs[place]
            return (TAKEN if differs else FILLED) if place in taken else SURPLUS if differs else EQUAL

        return "".join(map(letter, range(begun)))
