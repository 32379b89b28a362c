"""Samples that pause between turns: closed forms, and that whoever pauses moves too."""

from dataclasses import replace

import numpy as np
import pytest
from run_report.timeline import simulate_gen_infer
from testkit.profiles import share
from testkit.sim_helpers import exact_costs, limits, linear_cost, long_tail, tight, with_turns

from rlhfuse.simulator.lengths import SampleLengths, Turn
from rlhfuse.simulator.simulation import Simulation
from rlhfuse.simulator.threshold import sweep_threshold


def of_turns(*samples: tuple[Turn, ...], prompt: int = 10) -> SampleLengths:
    output = tuple(sum(turn.drawn + turn.observed for turn in own) for own in samples)
    return SampleLengths((prompt,) * len(samples), output, turns=samples)


def decoding(context: int, steps: int) -> float:
    """Seconds of so many steps of one sequence that begins them with so many tokens."""
    return steps * 11e-3 + sum(range(context, context + steps)) * 1e-6


def ended(lengths: SampleLengths, **changes) -> tuple[float, ...]:
    return simulate_gen_infer(lengths, 1, linear_cost(), limits(**changes), 0).sample_seconds


def test_an_instance_whose_samples_all_pause_goes_on_with_the_first():
    """21 tokens, the last not run yet: the 16 of a block stay, 5 and the 7 observed are run."""
    one = (Turn(11, 0.5, 7), Turn(5, 0.0, 0))
    first = 2e-3 + 10e-4 + decoding(11, 10)
    last = 2e-3 + (5 + 7) * 1e-4 + decoding(29, 4)
    assert ended(of_turns(one)) == pytest.approx((first + 0.5 + last,))
    both_wait = ended(of_turns(one, (Turn(11, 9.0, 7), Turn(5, 0.0, 0))))
    assert both_wait[1] - both_wait[0] == pytest.approx(8.5, abs=0.05)


def test_an_answer_runs_beside_those_that_decode():
    """Its step takes as much longer as a prefill takes longer than the shortest step; a long prompt costs as much."""
    lengths = of_turns((Turn(1, 0.2, 500), Turn(1, 0.0, 0)), (Turn(90, 0.0, 0),))
    found = ended(lengths, max_output_tokens=600, kv_capacity_bytes=1e5 * 100.0)
    alone = 2e-3 + 20e-4 + decoding(11, 89)
    assert found[1] == pytest.approx(alone + 2e-3 + 511 * 1e-4 - 11e-3)
    assert found[0] == pytest.approx(0.2 + 4e-3 + 11e-3 + 2e-3 + 511e-4 - 11e-3, abs=11.1e-3)


def test_what_runs_takes_the_cache_of_the_first_that_paused():
    """With room for both nothing is run again; with a token less the last block, at last all."""
    lengths = of_turns((Turn(60, 2.0, 1), Turn(1, 0.0, 0)), (Turn(180, 0.0, 0),), prompt=20)  # 64 tokens stay, of 80
    longest = dict(max_prompt_tokens=20, max_output_tokens=180)
    seconds = [ended(lengths, kv_capacity_bytes=tokens * 100.0, **longest)[0] for tokens in (300, 264, 263, 200)]
    again = [later - seconds[0] for later in seconds]
    assert again == pytest.approx([0.0, 0.0, 16e-4, 64e-4], abs=1e-9)


def test_one_turn_is_none_to_the_last_bit():
    lengths, setting = long_tail(64), (4, linear_cost(reward=0.02), limits(kv_capacity_bytes=1e5, early_models=1))
    single = replace(lengths, turns=((),) * 64)
    for threshold in (0, 10, 40):
        assert simulate_gen_infer(single, *setting, threshold) == simulate_gen_infer(lengths, *setting, threshold)
    assert sweep_threshold(single, *setting) == sweep_threshold(lengths, *setting)


def test_samples_that_pause_are_moved():
    """Samples that pause stay and leave, with their cache and without."""
    draw = np.random.default_rng(0)
    pausing = moved = sent = lost = 0
    for _ in range(share(100)):
        samples, instances = int(draw.integers(4, 25)), int(draw.integers(2, 6))
        prompt, output = (tuple(draw.integers(1, most + 1, samples).tolist()) for most in (60, 80))
        lengths = with_turns(SampleLengths(prompt, output), int(draw.integers(1 << 20)), seconds=0.3)
        lim = tight(int(draw.integers(140, 500)), bs_max=int(draw.integers(1, 9)), max_sequences=6)
        threshold = int(draw.integers(1, samples + 1))
        _, state, _ = Simulation([lengths], instances, exact_costs(1 << 16, 1024, release=0), lim).trace(threshold)
        tail = state.samples[state.samples["tail"]]
        moved += int((tail["home"] != tail["at"]).sum())
        pausing += int(tail["resumed"].sum())
        sent += int((tail["resumed"] & (tail["kv_tokens"] > 0)).sum())
        lost += int((tail["resumed"] & (tail["home"] != tail["at"]) & (tail["kv_tokens"] == 0)).sum())
    assert min(pausing, moved, sent, lost) >= share(10)


def test_fewer_instances_keep_a_tail_that_mostly_pauses():
    lengths = with_turns(long_tail(64), 0, seconds=2.0)
    active = lengths.active_share(0.02)
    drawn, pauses = sum(lengths.drawn), sum(turn.pause for own in lengths.turns for turn in own)
    assert (
        active == pytest.approx(drawn * 0.02 / (drawn * 0.02 + pauses))
        and replace(lengths, turns=()).active_share(1) == 1
    )
    lim = limits(bs_max=4)
    assert lim.destinations(32, 16) == 8 and replace(lim, active_share=0.25).destinations(32, 16) == 2
