"""Lengths that plans and searches are for: of past samples, or assumed, with a long tail, where none are named.

Samples that are all as long as they can become would show no tail to hide, and give decoding too many tensor ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log
from statistics import NormalDist

import numpy as np

from rlhfuse.base.errors import InputError
from rlhfuse.simulator.lengths import SampleLengths, load_lengths

QUANTILES = 1000
LAST = 0.9995  # instead of 1, which would be without end; it is cut to the longest response
MEDIAN_SHARE = 0.1  # of the longest response


@dataclass(frozen=True)
class PlannedLengths:
    """`samples`, cut to the run's longest; `known`: of past samples, not assumed; `told`: a line on what they are.

    `trained`: what training is for, where it leaves out samples and a past run says which: its last iterations.
    `begun`: groups that a past run began for one that it took.
    """

    samples: SampleLengths
    known: bool
    told: str
    trained: tuple[SampleLengths, ...] = ()
    begun: float = 1.0

    @staticmethod
    def of(source: str, longest: tuple[int, int], skips: bool = False) -> PlannedLengths:
        """What `source`, parallel.lengths, names, else the assumption, in which every prompt is as long as it may be.

        `longest`: tokens of a prompt and of a response; `skips`: the run leaves out samples without gradient. Raises
        InputError naming the file.
        """
        prompt, response = longest
        if source:
            try:
                file = load_lengths(source, default_prompt=prompt)
            except InputError as error:
                raise InputError(f"parallel.lengths={source}: {error}") from None
            planned = PlannedLengths.seen(file.lengths, longest, f"parallel.lengths={source}")
            trained = tuple(seen.clip(*longest) for seen in file.recent) if skips else ()
            return replace(planned, trained=trained or planned.trained, begun=file.begun)
        samples = assumed_lengths(prompt, response)
        marks = samples.percentiles()
        told = (
            f"lengths are assumed: responses lognormal with median {marks['p50']} and p99.9 {marks['p999']} tokens, "
            f"prompts of {prompt}; parallel.lengths names past ones"
        )
        return PlannedLengths(samples, False, told)

    @staticmethod
    def seen(seen: SampleLengths, longest: tuple[int, int], where: str) -> PlannedLengths:
        """Past samples, which people know as `where`, cut to the `longest`."""
        prompt, response = longest
        samples = seen.clip(prompt, response)
        marks = samples.percentiles()
        told = f"output p50 {marks['p50']}, p99.9 {marks['p999']}; {samples.clipped} cut to this run's {response}"
        told = f"lengths are those of {len(samples)} samples of {where}, {told}"
        return PlannedLengths(samples, True, told, (samples,) if samples.spared else ())

    @property
    def trained_shares(self) -> tuple[float, float]:
        """Parts of the samples, and of their tokens, that training does not leave out."""
        every = SampleLengths.joined(self.trained or (self.samples,))
        tokens = sum(every.prompt) + sum(every.output)
        return len(every.trained) / len(every), sum(map(sum, every.trained)) / tokens


def assumed_lengths(prompt: int, response: int) -> SampleLengths:
    """Quantiles of a lognormal whose p99.9 is `response` tokens and whose median a tenth of it, in a fixed order."""
    median = max(1.0, MEDIAN_SHARE * response)
    normal = NormalDist()
    spread = log(response / median) / normal.inv_cdf(0.999)
    at = (min(number / QUANTILES, LAST) for number in range(1, QUANTILES + 1))
    output = [min(response, max(1, round(median * exp(spread * normal.inv_cdf(share))))) for share in at]
    order = np.random.default_rng(0).permutation(QUANTILES)  # ranks that take samples in turn get no sorted ones
    return SampleLengths((prompt,) * QUANTILES, tuple(output[i] for i in order))
