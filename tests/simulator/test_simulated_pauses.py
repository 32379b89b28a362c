"""Samples that pause between turns: closed forms, and that whoever pauses moves too."""

from dataclasses import replace

import pytest
from run_report.timeline import simulate_gen_infer
from testkit.sim_helpers import limits, linear_cost, long_tail

from rlhfuse.simulator.lengths import SampleLengths, Turn
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


def test_one_turn_is_none_to_the_last_bit():
    lengths, setting = long_tail(64), (4, linear_cost(reward=0.02), limits(kv_capacity_bytes=1e5, early_models=1))
    single = replace(lengths, turns=((),) * 64)
    for threshold in (0, 10, 40):
        assert simulate_gen_infer(single, *setting, threshold) == simulate_gen_infer(lengths, *setting, threshold)
    assert sweep_threshold(single, *setting) == sweep_threshold(lengths, *setting)
