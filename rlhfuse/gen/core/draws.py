"""What the draws of a step need besides its logits, and what they give, whoever makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Draws(NamedTuple):
    """Per row; a token is -1, its log-probability NaN, where the row holds a number that is not finite.

    Behind a row whose token is not its guess a CPU draws nothing: any token stands there.
    """

    tokens: list[int]
    logprobs: list[float]
    entropies: list[float] | None = None  # of the rows' distributions after temperature, where the engine measures them


class Launched(NamedTuple):
    """A step that was launched, whose draws can be read."""

    places: np.ndarray  # [R]: token ~i of the next step means what this one draws at its place i
    read: Callable[[], Draws]  # waits for them; once another two steps are launched, it is too late


@dataclass(frozen=True)
class DrawBatch:
    """Inputs of the sampler for R rows."""

    keys: np.ndarray  # [R, 2] uint32: of (seed, sample id, position)
    temperatures: np.ndarray  # [R] float32, 0 = greedy
    top_ks: np.ndarray  # [R] int64, 0 = off
    top_ps: np.ndarray  # [R] float64, 1 = off
    banned: np.ndarray  # [R, B] int64, unused columns -1, behind the used ones
    asked: np.ndarray | None = None  # [R] bool: whose log-probability somebody reads; None: all
    measures: bool = False  # entropies, too
    guesses: np.ndarray | None = None  # [R] int64: the next row counts if this is drawn; -1: it is another sample's
