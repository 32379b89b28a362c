"""Lengths that layouts are searched for: of past samples, or assumed, with a long tail, where none are named.

A search on samples as long as they can become would see no tail, and give decoding too many tensor ranks.
"""

from __future__ import annotations

from math import exp, log
from statistics import NormalDist

import numpy as np

from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import RunConfig
from rlhfuse.simulator.lengths import SampleLengths, load_lengths

QUANTILES = 1000
LAST = 0.9995  # instead of 1, which would be without end; it is cut to the longest response
MEDIAN_SHARE = 0.1  # of the longest response


def search_lengths(config: RunConfig) -> tuple[SampleLengths, str]:
    """What `parallel.lengths` names, cut to the run's lengths, else the assumption; and a line that says which.

    data.max_prompt_tokens is a number: every assumed prompt has as many. Raises InputError naming the file.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if not (source := config.parallel.lengths):
        lengths = assumed_lengths(prompt, response)
        marks = lengths.percentiles()
        return lengths, (
            f"lengths of the search: assumed, lognormal with median {marks['p50']} and p99.9 {marks['p999']} tokens; "
            "parallel.lengths names past ones"
        )
    try:
        lengths = load_lengths(source, default_prompt=prompt).lengths.clip(prompt, response)
    except InputError as error:
        raise InputError(f"parallel.lengths={source}: {error}") from None
    marks = lengths.percentiles()
    told = f"output p50 {marks['p50']}, p99.9 {marks['p999']}; {lengths.clipped} cut to this run's {response}"
    return lengths, f"lengths of the search: {len(lengths)} samples of parallel.lengths={source}, {told}"


def assumed_lengths(prompt: int, response: int) -> SampleLengths:
    """Quantiles of a lognormal whose p99.9 is `response` tokens and whose median a tenth of it, in a fixed order."""
    median = max(1.0, MEDIAN_SHARE * response)
    normal = NormalDist()
    spread = log(response / median) / normal.inv_cdf(0.999)
    at = (min(number / QUANTILES, LAST) for number in range(1, QUANTILES + 1))
    output = [min(response, max(1, round(median * exp(spread * normal.inv_cdf(share))))) for share in at]
    order = np.random.default_rng(0).permutation(QUANTILES)  # ranks that take samples in turn get no sorted ones
    return SampleLengths((prompt,) * QUANTILES, tuple(output[i] for i in order))
