"""Groups that begin while others still decode, where an iteration trains on groups whose scores differ alone.

Leaders send each other scores and decide each for itself. Every round ends: a leader waits only for unfinished samples
and for groups that it would begin itself (`missing`). If nobody decodes or begins, leaders that have stopped hold all
unfinished samples, at most R_t when the last of them looked, so the others stop too. With R_t = 0 nobody stops before
every score has reached it. A score that comes after a stop is needed in the next round only (`GroupSelection`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rlhfuse.base.sample_ids import sample_origin
from rlhfuse.fusion.inter.inference import Rewarder
from rlhfuse.fusion.inter.iteration_store import StoreReporter
from rlhfuse.fusion.inter.request import Request
from rlhfuse.tasks.group_selection import GroupSelection

LIKELY = -0.7  # standard deviations beside what is expected: a group that begins beside others is likely to be needed


@dataclass(frozen=True)
class GroupStream:
    """What a round of generation may begin beside its requests, the same on every rank.

    `selection`: what is known before it; `begun`: places before the first that it may add; `copies`: samples of a
    group; `inflight`: most places that are not judged; `requests`: those of a place; `as_counted`: scores of a group
    from the function's, as the batch will have them.
    """

    selection: GroupSelection
    begun: int
    copies: int
    inflight: int
    requests: Callable[[int], Sequence[Request]]
    as_counted: Callable[[Sequence[float]], Sequence[float]]


class LiveGroups:
    """What the leader of an instance knows of a round's groups at this moment."""

    def __init__(self, stream: GroupStream, reporter: StoreReporter, rewarder: Rewarder) -> None:
        self._stream, self._reporter, self._rewarder = stream, reporter, rewarder
        self._scores: dict[int, dict[int, float | None]] = {}  # place -> copy -> what the function said
        self._added = 0  # places that the round has added anywhere, as this instance has heard last
        self.selection = stream.selection

    def update(self, failed: Collection[int] = ()) -> None:
        """Tell the others what the reward function has said here, and take in what it has said anywhere.

        `failed`: ids of samples that failed here, whose scores are none.
        """
        if news := self._rewarder.news():
            told = [(sample, None if sample in failed else score) for sample, score in news.items()]
            self._reporter.send_scores(json.dumps(told))
        complete: dict[int, Sequence[float]] = {}
        for sample, score in (pair for letter in self._reporter.take_scores() for pair in json.loads(letter)):
            _, place, copy = sample_origin(sample)
            group = self._scores.setdefault(place, {})
            group[copy] = score
            if len(group) == self._stream.copies:
                complete[place] = self._stream.as_counted([one for one in group.values() if one is not None])
        if complete:
            self.selection = self.selection.with_scores(complete)

    @property
    def begun(self) -> int:
        """Places begun anywhere, in rounds before too."""
        self._added = max(self._added, self._reporter.places)
        return min(self._stream.begun + self._added, self.selection.most)

    @property
    def missing(self) -> int:
        """Groups that are still to begin, by what is known. Leaders wait for no others, and begin no others."""
        return self.selection.missing(self.begun, self._stream.inflight, LIKELY)

    def remaining(self, first: int) -> int:
        """Samples of this round that are not done, of `first` and of all groups that have begun or are missing."""
        added = self.begun - self._stream.begun
        return first + (added + self.missing) * self._stream.copies - self._reporter.finished

    def next_place(self, begin: Callable[[int], int]) -> int | None:
        """A place for this instance to begin; None where none is missing. `begin`: `IterationStore.begin_places`."""
        if not self.missing:
            return None
        self._added = begin(1)
        place = self._stream.begun + self._added - 1
        return place if place < self.selection.most else None


def complete_groups(samples: Sequence[int], copies: int) -> set[int]:
    """Places of which all samples are there, of these ids."""
    counts = Counter(sample_origin(sample)[1] for sample in samples)
    return {place for place, count in counts.items() if count == copies}
