"""The batches that an iteration is predicted for, and their micro-batches as a run would cut them.

A pipeline waits for its heaviest micro-batch once for every stage, and a mini-batch for its slowest pipeline. So a
mini-batch costs what equal micro-batches of somewhat more than the mean tokens would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from statistics import fmean

import numpy as np

from rlhfuse.base.remembered import remembered
from rlhfuse.costs.forms.training import MicrobatchTokens
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.tasks.balance import deal, split_microbatches, split_minibatches
from rlhfuse.tasks.microbatch_cut import MicrobatchCut

DRAWS = 5  # batches drawn from lengths and averaged


@dataclass(frozen=True)
class DrawnBatches:
    """Batches of an iteration, each split into mini-batches as the first epoch of a run with this seed begins.

    `trained`: what training cuts, where these are others than those that are generated.
    """

    batches: tuple[SampleLengths, ...]
    minibatches: int
    seed: int
    trained: tuple[SampleLengths, ...] = ()

    @staticmethod
    def of(
        lengths: SampleLengths,
        samples: int,
        minibatches: int,
        seed: int,
        trained: Sequence[SampleLengths] = (),
        begun: float = 1.0,
    ) -> DrawnBatches:
        """DRAWS batches of so many samples of the lengths; for training one of each iteration of `trained`, if any.
        `begun` samples are generated for one that is taken."""
        others = tuple(chain(*(one.draw(samples, 1, seed + number) for number, one in enumerate(trained))))
        batches = lengths.draw(round(samples * begun), DRAWS, seed)
        if begun != 1 and not others:
            others = tuple(SampleLengths(batch.prompt[:samples], batch.output[:samples]) for batch in batches)
        return DrawnBatches(batches, minibatches, seed, trained=others)

    @remembered
    def rungs(self, cut: MicrobatchCut) -> Mapping[int, float]:
        """Shares of mini-batches by their micro-batches per actor pipeline (M1), ascending."""
        rungs = self.rung_of_each(cut)
        return {rung: rungs.count(rung) / len(rungs) for rung in sorted(set(rungs))}

    @remembered
    def rung_of_each(self, cut: MicrobatchCut) -> tuple[int, ...]:
        """M1 of each mini-batch of each batch: cuts for which these are alike cut alike."""
        of = enumerate(self._minibatches)
        return tuple(cut.rung_of(cut.split(*own, into=partial(self._into, number))) for number, own in of)

    @remembered
    def microbatch(self, cut: MicrobatchCut, rung: int, pipelines: int, depth: int) -> MicrobatchTokens:
        """The micro-batch of which a pipeline of `depth` stages, of so many `pipelines`, takes as long as the real ones
        take the slowest: (their sum + (depth - 1) * heaviest) / (their number + depth - 1). Means over the mini-batches
        that are cut into `rung` for each actor pipeline; where none is, full ones. Raises InputError where samples are
        fewer than micro-batches."""
        tokens, (everything, samples, outputs) = self._tokens(cut, rung, pipelines, depth), self._sums
        return MicrobatchTokens(tokens, tokens * samples / everything, tokens * outputs / everything)

    def _tokens(self, cut: MicrobatchCut, rung: int, pipelines: int, depth: int) -> float:
        of = [number for number, own in enumerate(self.rung_of_each(cut)) if own == rung]
        if not of:
            return cut.tokens
        parts = cut.pipelines * rung
        loads, count = [self._loads(number, parts, pipelines) for number in of], parts // pipelines
        slowest = (max(tokens + (depth - 1) * heaviest for tokens, heaviest in load) for load in loads)
        return fmean(slowest) / (count + depth - 1)

    @property
    def tokens(self) -> float:
        """Tokens of all samples of a batch, prompts included."""
        return fmean(sum(batch.prompt) + sum(batch.output) for batch in self.batches)

    @property
    def trained_tokens(self) -> float:
        """The same of samples that training does not leave out."""
        return self._sums[0] / len(self.trained or self.batches)

    @cached_property
    def _sums(self) -> tuple[int, int, int]:
        """Sums over the samples of all batches that are trained on: tokens, samples, response tokens."""
        batches = self.trained or self.batches
        kept = [pair for batch in batches for pair in batch.trained]
        kept = kept or [pair for batch in batches for pair in zip(batch.prompt, batch.output)]
        outputs = sum(output for _, output in kept)
        return sum(map(sum, kept)), len(kept), outputs

    @cached_property
    def _minibatches(self) -> tuple[tuple[list[int], frozenset[int]], ...]:
        """Tokens of each sample of each mini-batch, and positions of those that are left out, batch by batch."""
        made = []
        for batch in self.trained or self.batches:
            tokens = np.asarray(batch.prompt, np.int64) + np.asarray(batch.output, np.int64)
            spared = np.asarray(batch.spared or (False,) * len(batch))
            made += [
                (tokens[part].tolist(), frozenset(np.flatnonzero(spared[part]).tolist()))
                for part in split_minibatches(len(batch), self.minibatches, self.seed, iteration=0)
            ]
        return tuple(made)

    @remembered
    def _into(self, number: int, parts: int) -> list[list[int]]:
        """A mini-batch in so many micro-batches: many budgets of tokens come to the same."""
        tokens, spared = self._minibatches[number]
        return split_microbatches(tokens, parts, spared)

    @remembered
    def _loads(self, number: int, parts: int, pipelines: int) -> list[tuple[int, int]]:
        """Tokens of each pipeline and of its heaviest micro-batch, of a mini-batch that is dealt in so many parts."""
        tokens, _ = self._minibatches[number]
        weights = [sum(tokens[sample] for sample in part) for part in self._into(number, parts)]
        dealt = (deal(weights, pipelines, pipeline) for pipeline in range(pipelines))
        return [(sum(own), max(own)) for own in dealt]
