"""The prompts that iterations draw: an endless stream of shuffled epochs, a pure function of seed and place in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_SHUFFLE = 0x73687566  # the purpose of this random stream, beside (seed, epoch)


@dataclass(frozen=True)
class PromptSampler:
    """The order of `prompts` prompts under `seed`."""

    prompts: int
    seed: int

    def prompts_from(self, first: int, count: int) -> list[int]:
        """Indices of `count` prompts from place `first` of the stream on. Each epoch has every prompt once."""
        drawn: list[int] = []
        while len(drawn) < count:
            epoch, offset = divmod(first + len(drawn), self.prompts)
            order = np.random.default_rng([self.seed % 2**64, _SHUFFLE, epoch]).permutation(self.prompts)
            drawn += order[offset : offset + count - len(drawn)].tolist()
        return drawn
