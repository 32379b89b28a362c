"""Values shared by the simulator's tests: a linear cost model, limits, lengths and hypothesis strategies."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from run_report.timeline import GenInferTimeline, InstanceSpan

from rlhfuse.costs.fits import Line
from rlhfuse.costs.measured import MeasuredCost
from rlhfuse.costs.table import CostTable, RewardCost
from rlhfuse.simulator.lengths import SampleLengths, Turn
from rlhfuse.tasks.instance_limits import InstanceLimits


def linear_cost(swap_in: float = 0.5, score_token: float = 1e-3, reward: float | None = None) -> CostTable:
    """The table of `linear_file`."""
    return linear_file(swap_in, score_token, reward).table


def linear_file(swap_in: float = 0.5, score_token: float = 1e-3, reward: float | None = None) -> MeasuredCost:
    """A step costs 10 ms + 1 ms per sequence; a scored token 1 ms; times are easy to add by hand."""
    return MeasuredCost(
        decode=Line(10e-3, (1e-3, 1e-6)),
        prefill=Line(2e-3, (1e-4, 0.0)),
        score=Line(5e-3, (score_token, 0.0)),
        migration=Line(1e-3, (1e-9,)),
        swap_in=swap_in,
        meeting=0.0,
        release=0.0,
        reward=None if reward is None else RewardCost(reward),
    )


TICK = 2.0**-20  # every cost is a whole multiple of it, so every sum of them is exact


def exact_costs(swap_in: int, per_token: int, reward: int = 0, at_once: int = 1, release: int | None = None):
    """Costs in ticks."""
    return MeasuredCost(
        decode=Line(10000 * TICK, (1000 * TICK, 2 * TICK)),
        prefill=Line(2048 * TICK, (128 * TICK, 0.0)),
        score=Line(4096 * TICK, (per_token * TICK, 64 * TICK)),
        migration=Line(1024 * TICK, (TICK,)),
        swap_in=swap_in * TICK,
        meeting=3072 * TICK,
        release=(swap_in // 2 if release is None else release) * TICK,
        reward=RewardCost(reward * TICK, at_once) if reward else None,
    ).table


def limits(**changes) -> InstanceLimits:
    base = dict(
        max_sequences=64,
        kv_capacity_bytes=64 * 300 * 100.0,
        kv_bytes_per_token=100.0,
        block_tokens=16,
        bs_max=8,
        max_prompt_tokens=100,
        max_output_tokens=200,
        score_tokens=256,
        scoring_models=1,
        reward_workers=1,
    )
    return InstanceLimits(**{**base, **changes})


def tight(capacity: int, **changes) -> InstanceLimits:
    """Those of `lengths_strategy`, with a cache of so many tokens."""
    return limits(kv_capacity_bytes=capacity * 100.0, max_prompt_tokens=60, max_output_tokens=80, **changes)


def equal(samples: int, prompt: int, output: int) -> SampleLengths:
    return SampleLengths((prompt,) * samples, (output,) * samples)


def long_tail(samples: int, seed: int = 0, longest: int = 200) -> SampleLengths:
    generator = np.random.default_rng(seed)
    output = np.clip(np.exp(generator.normal(np.log(20), 1.0, samples)), 1, longest).astype(int)
    prompt = generator.integers(1, 100, samples)
    return SampleLengths(tuple(map(int, prompt)), tuple(map(int, output)))


def lengths_strategy(most: int = 24):
    pairs = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 80)), min_size=1, max_size=most)
    return pairs.map(lambda rows: SampleLengths(tuple(p for p, _ in rows), tuple(o for _, o in rows)))


def with_turns(
    lengths: SampleLengths, seed: int, most: int = 4, seconds: float = 0.5, tick: float = TICK
) -> SampleLengths:
    """Responses cut at random into up to so many turns, with pauses of whole ticks around so many `seconds`."""
    draw, turns = np.random.default_rng(seed), []
    for tokens in lengths.output:
        count = int(draw.integers(0, min(most, (tokens + 1) // 2))) if tokens > 2 else 0  # calls
        cuts = sorted(draw.choice(np.arange(1, tokens), 2 * count, replace=False).tolist())
        drawn = [end - start for start, end in zip((0, *cuts[1::2]), (*cuts[::2], tokens))]
        observed = [end - start for start, end in zip(cuts[::2], cuts[1::2])]
        pauses = [round(2 * seconds * float(draw.random()) / tick) * tick for _ in observed]
        turns.append((*map(Turn, drawn, pauses, observed), Turn(drawn[-1], 0.0, 0)))
    return replace(lengths, turns=tuple(turns))


def spans_of(line: GenInferTimeline, instance: int) -> list[InstanceSpan]:
    return [span for span in line.spans if span.instance == instance]
