"""The batches that an iteration is predicted for, and their micro-batches as a run would cut them.

A pipeline waits for its heaviest micro-batch once for every stage, and a mini-batch for its slowest pipeline. So a
mini-batch costs what equal micro-batches of somewhat more than the mean tokens would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlhfuse.costs.cost_model import MicrobatchTokens
from rlhfuse.decisions.balance import deal, split_microbatches, split_minibatches
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

    def microbatch(self, pipelines: int, microbatches: int, depth: int) -> MicrobatchTokens:
        """The micro-batch of which `microbatches` take a pipeline of `depth` stages as long as the real ones take the
        slowest of `pipelines`: (their sum + (depth - 1) * heaviest) / (microbatches + depth - 1), means over
        mini-batches and batches. Raises InputError where samples are fewer than micro-batches."""
        key = pipelines, microbatches, depth
        if key not in self._made:
            self._made[key] = self._proportioned(self._slowest(*key))
        return self._made[key]

    def _slowest(self, pipelines: int, microbatches: int, depth: int) -> np.ndarray:
        """Tokens of such a micro-batch of each batch."""
        if self.even:
            return self._sums[:, 0] / (self.minibatches * pipelines * microbatches)
        total, heaviest = self._pipelines(pipelines, microbatches)
        slowest = (total + (depth - 1) * heaviest).max(axis=1) / (microbatches + depth - 1)
        return slowest.reshape(len(self.batches), self.minibatches).mean(axis=1)

    def _proportioned(self, tokens: np.ndarray) -> MicrobatchTokens:
        """Micro-batches of so many tokens, one of each batch, in the proportions of the batch: their mean."""
        everything, samples, outputs = self._sums.T
        means = (float(np.mean(tokens * share / everything)) for share in (samples, outputs))
        return MicrobatchTokens(float(np.mean(tokens)), *means)

    def _pipelines(self, pipelines: int, microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each pipeline and of its heaviest micro-batch: [batch and mini-batch, pipeline]."""
        key = pipelines, microbatches
        if key not in self._by_pipeline:
            parts = pipelines * microbatches
            if parts not in self._by_parts:
                self._by_parts[parts] = [self._cut(tokens, parts) for tokens in self._minibatch_tokens]
            dealt = [[deal(sums, pipelines, k) for k in range(pipelines)] for sums in self._by_parts[parts]]
            sums = np.array(dealt, np.float64)
            self._by_pipeline[key] = sums.sum(axis=2), sums.max(axis=2)
        return self._by_pipeline[key]

    @staticmethod
    def _cut(tokens: Sequence[int], parts: int) -> list[int]:
        return [sum(tokens[sample] for sample in part) for part in split_microbatches(tokens, parts)]

    @cached_property
    def _sums(self) -> np.ndarray:
        """Sums of each batch: tokens, samples, response tokens."""
        sums = [(sum(batch.prompt) + sum(batch.output), len(batch), sum(batch.output)) for batch in self.batches]
        return np.array(sums, np.float64)

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
    def _made(self) -> dict[tuple[int, int, int], MicrobatchTokens]:
        return {}

    @cached_property
    def _by_parts(self) -> dict[int, list[list[int]]]:
        return {}

    @cached_property
    def _by_pipeline(self) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
        return {}
