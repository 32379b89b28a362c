"""The prompts that iterations draw: an endless stream of shuffled epochs, a pure function of seed and place in it."""

from __future__ import annotations

import numpy as np

_SHUFFLE = 0x73687566  # the purpose of this random stream, beside (seed, epoch)


def prompts_from(prompts: int, seed: int, first: int, count: int) -> list[int]:
    """Indices of `count` of so many prompts from place `first` of the stream on. Each epoch has every prompt once."""
    drawn: list[int] = []
    while len(drawn) < count:
        epoch, offset = divmod(first + len(drawn), prompts)
        order = np.random.default_rng([seed % 2**64, _SHUFFLE, epoch]).permutation(prompts)
        drawn += order[offset : offset + count - len(drawn)].tolist()
    return drawn
