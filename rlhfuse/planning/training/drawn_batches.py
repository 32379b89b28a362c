"""The batches that an iteration is predicted for, and their micro-batches as a run would cut them.

A pipeline waits for its heaviest micro-batch once for every stage, and a mini-batch for its slowest pipeline. So a
mini-batch costs what equal micro-batches of somewhat more than the mean tokens would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from rlhfuse.costs.cost_model import MicrobatchTokens
from rlhfuse.decisions.balance import deal, split_minibatches
from rlhfuse.decisions.microbatch_cut import MicrobatchCut
from rlhfuse.simulator.lengths import SampleLengths

DRAWS = 5  # batches drawn from lengths and averaged


@dataclass(frozen=True)
class DrawnBatches:
    """Batches of an iteration, each split into mini-batches as the first epoch of a run with this seed begins.

    `even`: micro-batches are of mean tokens, as if samples could be split.
    """

    batches: tuple[SampleLengths, ...]
    minibatches: int
    seed: int
    even: bool = False

    @staticmethod
    def of(lengths: SampleLengths, samples: int, minibatches: int, seed: int) -> DrawnBatches:
        """DRAWS batches of so many samples of the lengths."""
        return DrawnBatches(lengths.draw(samples, DRAWS, seed), minibatches, seed)

    def rungs(self, cut: MicrobatchCut) -> Mapping[int, float]:
        """Shares of mini-batches by their micro-batches per actor pipeline (M1), ascending."""
        if cut not in self._shares:
            rungs = [cut.rung_of(weights) for weights in self._weights(cut)]
            self._shares[cut] = {rung: rungs.count(rung) / len(rungs) for rung in sorted(set(rungs))}
        return self._shares[cut]

    def microbatch(self, cut: MicrobatchCut, rung: int, pipelines: int, depth: int) -> MicrobatchTokens:
        """The micro-batch of which a pipeline of `depth` stages, of so many `pipelines`, takes as long as the real ones
        take the slowest: (their sum + (depth - 1) * heaviest) / (their number + depth - 1). Means over the mini-batches
        that are cut into `rung` for each actor pipeline; where none is, full ones. Raises InputError where samples are
        fewer than micro-batches."""
        key = cut, rung, pipelines, depth
        if key not in self._made:
            self._made[key] = self._proportioned(self._tokens(*key))
        return self._made[key]

    def _tokens(self, cut: MicrobatchCut, rung: int, pipelines: int, depth: int) -> float:
        weights = [weights for weights in self._weights(cut) if cut.rung_of(weights) == rung]
        if not weights:
            return cut.tokens
        count = cut.pipelines * rung // pipelines
        if self.even:
            return sum(map(sum, weights)) / (len(weights) * pipelines * count)
        slowest = []
        for parts in weights:
            own = (deal(parts, pipelines, pipeline) for pipeline in range(pipelines))
            slowest.append(max(sum(dealt) + (depth - 1) * max(dealt) for dealt in own) / (count + depth - 1))
        return fmean(slowest)

    def _weights(self, cut: MicrobatchCut) -> list[list[int]]:
        """Tokens of the micro-batches of each mini-batch of each batch, the heaviest first."""
        if cut not in self._cuts:
            self._cuts[cut] = [
                [sum(tokens[sample] for sample in part) for part in cut.split(tokens)]
                for tokens in self._minibatch_tokens
            ]
        return self._cuts[cut]

    def _proportioned(self, tokens: float) -> MicrobatchTokens:
        """A micro-batch of so many tokens in the proportions of all batches."""
        everything, samples, outputs = self._sums
        return MicrobatchTokens(tokens, tokens * samples / everything, tokens * outputs / everything)

    @cached_property
    def _sums(self) -> tuple[int, int, int]:
        """Sums over all batches: tokens, samples, response tokens."""
        prompts, outputs = (
            sum(sum(side) for side in sides) for sides in zip(*((b.prompt, b.output) for b in self.batches))
        )
        return prompts + outputs, sum(map(len, self.batches)), outputs

    @cached_property
    def _minibatch_tokens(self) -> tuple[list[int], ...]:
        """Tokens of each sample of each mini-batch, batch by batch."""
        made = []
        for batch in self.batches:
            tokens = np.asarray(batch.prompt, np.int64) + np.asarray(batch.output, np.int64)
            made += [
                tokens[part].tolist()
                for part in split_minibatches(len(batch), self.minibatches, self.seed, iteration=0)
            ]
        return tuple(made)

    @cached_property
    def _made(self) -> dict[tuple[MicrobatchCut, int, int, int], MicrobatchTokens]:
        return {}

    @cached_property
    def _shares(self) -> dict[MicrobatchCut, Mapping[int, float]]:
        return {}

    @cached_property
    def _cuts(self) -> dict[MicrobatchCut, list[list[int]]]:
        return {}
