"""Serial and fused time lines of generation and inference: closed forms and what every time line must keep."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_report.timeline import simulate_gen_infer
from testkit.profiles import examples
from testkit.sim_helpers import (
    equal,
    exact_costs,
    lengths_strategy,
    limits,
    linear_cost,
    long_tail,
    spans_of,
    tight,
    with_turns,
)

from rlhfuse.base.errors import InputError
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.tasks.migration import most_holding


def kinds_of(line, instance=0):
    return [span.kind for span in spans_of(line, instance)]


def test_serial_closed_form():
    """Two instances, equal samples: generation, cache out, weights in, then 4 x 30 tokens on each in one packed batch;
    each instance's reward function takes its four samples one after the other."""
    lengths, costs = equal(8, 10, 20), replace(linear_cost(reward=0.3), meeting=0.25, release=0.125)
    line = simulate_gen_infer(lengths, 2, costs, limits(), 0)
    generation = line.generation_seconds
    context = sum(4 * (10 + done) for done in range(1, 20))
    assert generation == pytest.approx(2e-3 + 40 * 1e-4 + 19 * 14e-3 + context * 1e-6)
    scored = generation + 0.375 + 0.5 + 5e-3 + 120 * 1e-3
    assert (line.total_seconds, line.reward_seconds) == pytest.approx((generation + 1.2, generation + 1.2 - scored))
    assert kinds_of(line) == ["generate", "meet", "idle", "swap_in", "score", "reward"]
    assert simulate_gen_infer(lengths, 2, costs, limits(reward_workers=2), 0).total_seconds == pytest.approx(scored)


def test_weights_that_come_in_while_samples_decode():
    """From the end of the prefill on, at 6 ms; with two models the second follows, or waits for the cache to go."""
    for tokens, ready in ((20, 0.506), (40, None)):
        lengths = equal(8, 10, tokens)
        line = simulate_gen_infer(lengths, 2, linear_cost(), limits(early_models=1), 0)
        begin = ready or line.generation_seconds  # hidden
        assert line.total_seconds == pytest.approx(begin + 5e-3 + 4 * (10 + tokens) * 1e-3)
        kinds = ["generate", "swap_in", "score"] if ready else ["generate", "score"]
        assert kinds_of(line) == kinds
    two = limits(scoring_models=2, early_models=1)
    line = simulate_gen_infer(lengths, 2, linear_cost(), two, 0)
    seconds = 5e-3 + 200 * 1e-3
    second = max(line.generation_seconds + seconds / 2, line.generation_seconds + 0.25)
    assert line.total_seconds == pytest.approx(second + seconds / 2)


def test_the_destination_scores_at_once_with_weights_that_came_meanwhile():
    """Its last samples end together: instance 1 takes one pack of them, and who has decoded them another."""
    lengths = SampleLengths((10,) * 8, (150, 20, 150, 20, 150, 20, 150, 20))
    late, early = (
        simulate_gen_infer(lengths, 2, linear_cost(), limits(bs_max=4, early_models=count), 4) for count in (0, 1)
    )
    assert late.plan.destinations == early.plan.destinations == (0,)
    assert late.generation_seconds == early.generation_seconds
    assert early.total_seconds <= late.total_seconds - 0.1
    assert "swap_in" in kinds_of(late) and "swap_in" not in kinds_of(early)


def test_fused_closed_form():
    """Instance 0 has one long sample, instance 1 ends early, frees itself and scores three; then the long one."""
    lengths = SampleLengths((10, 10, 10, 10), (20, 200, 20, 20))
    line = simulate_gen_infer(lengths, 2, linear_cost(), limits(), 1)
    finish = simulate_gen_infer(lengths, 2, linear_cost(), limits(), 0).sample_seconds
    assert line.plan.destinations == (0,) and line.plan.moves == ()
    assert line.generation_seconds == pytest.approx(finish[1])  # nothing moved, nothing waited
    scored = [line.trigger_seconds + 0.5 + 5e-3 + 60 * 1e-3]  # packs may shrink to a quarter of 256 tokens
    scored.append(scored[0] + 5e-3 + 30 * 1e-3)
    assert line.scored_before_generation_end == 3
    assert [span.kind for span in spans_of(line, 1) if span.kind != "idle"] == ["generate", "swap_in", *["score"] * 3]
    assert [span.end for span in spans_of(line, 1) if span.kind == "score"][:2] == pytest.approx(scored)
    assert line.total_seconds == pytest.approx(finish[1] + 5e-3 + 210 * 1e-3)


def test_a_worker_that_spans_two_instances_waits_for_both():
    """Instance 0 keeps the long sample, so 2 and 3 score all others as one worker; 1 waits with it."""
    lengths = SampleLengths((10,) * 8, (20, 200, 20, 20, 20, 20, 20, 20))
    line = simulate_gen_infer(lengths, 4, linear_cost(), limits(instances_per_worker=2), 1)
    assert line.plan.destinations == (0,) and line.plan.freed == (1, 2, 3) and not line.plan.moves
    kinds = [[span.kind for span in spans_of(line, k) if span.kind not in ("idle", "meet")] for k in range(4)]
    assert kinds[2] == kinds[3] and kinds[2][:3] == ["generate", "swap_in", "score"] and line.generation_seconds > 2
    assert {*kinds[0], *kinds[1]} == {"generate"} and line.scored_before_generation_end == 7
    held = (1, 0, 2, 3)  # the fewest workers: first the one that holds most
    assert most_holding(held, 2, 1) == [3, 2] and most_holding(held, 3, 2) == [3, 2, 0]
    assert most_holding((1, 3, 2, 0), 2, 2) == [1, 0]


def test_a_moved_sample_pays_for_its_keys_and_values():
    lengths = SampleLengths((10, 10, 10, 10), (200, 200, 20, 190))
    line = simulate_gen_infer(lengths, 2, linear_cost(), limits(), 3)
    (move,) = line.plan.moves
    assert (move.sample_id, move.source, move.destination, move.mode) == (3, 1, 0, "kv")
    assert line.migrated_bytes == move.kv_tokens * 100
    assert line.migration_seconds == pytest.approx(1e-3 + line.migrated_bytes * 1e-9)


@examples(60)
@given(lengths_strategy(), st.integers(1, 3), st.integers(1, 3), st.floats(0, 1), st.integers(150, 900))
def test_every_time_line_keeps_the_rules(lengths, workers, spanned, ratio, capacity):
    instances, lim = workers * spanned, tight(capacity, instances_per_worker=spanned)
    threshold = int(ratio * len(lengths))
    line = simulate_gen_infer(lengths, instances, linear_cost(), lim, threshold)
    for instance in range(instances):
        clock = 0.0
        for span in spans_of(line, instance):  # spans tile the time without overlap
            assert span.start == pytest.approx(clock) and span.end > span.start
            clock = span.end
        assert clock == pytest.approx(line.total_seconds)
    tokens = sum(lengths.prompt) + sum(lengths.output)
    for first in range(0, instances, spanned):  # a worker scores once all of its instances are done
        own = [spans_of(line, instance) for instance in range(first, first + spanned)]
        scored = {tuple((span.start, span.end) for span in spans if span.kind == "score") for spans in own}
        assert len(scored) == 1
    scoring = [span for span in line.spans if span.kind == "score" and span.instance % spanned == 0]
    spent = sum(span.end - span.start for span in scoring)
    assert spent == pytest.approx(tokens * 1e-3 + 5e-3 * len(scoring))  # each token is scored exactly once
    assert line.total_seconds >= line.generation_seconds
    assert line == simulate_gen_infer(lengths, instances, linear_cost(), lim, threshold)
    assert not line.plan or len(line.plan.moves) + len(line.plan.stays) <= threshold


def drawn_line(draw: np.random.Generator, pauses: bool, rewards: bool):
    """The time line of a random batch in exact costs: cramped caches, so that samples are preempted, moved and sent."""
    samples, instances = int(draw.integers(1, 25)), int(draw.integers(1, 6))
    prompt, output = (tuple(draw.integers(1, most + 1, samples).tolist()) for most in (60, 80))
    lengths = SampleLengths(prompt, output)
    if pauses:
        lengths = with_turns(lengths, int(draw.integers(1 << 20)), seconds=float(draw.choice([0.01, 0.3, 3.0])))
    models = int(draw.choice([1, 2, 4]))  # in powers of two, which sums and quotients are exact in
    lim = tight(
        int(draw.integers(140, 900)),
        bs_max=int(draw.integers(1, 9)),
        scoring_models=models,
        early_models=int(draw.integers(models)),
        max_sequences=int(draw.integers(1, 9)),
        reward_workers=int(draw.integers(1, 4)),
        active_share=float(draw.choice([1.0, 0.5])),
    )
    swap_in, reward = (1 << int(draw.integers(10, 22)) for _ in range(2))
    costs = exact_costs(swap_in, int(draw.choice([16, 1024, 8192])), reward * rewards, int(draw.integers(1, 4)))
    return simulate_gen_infer(lengths, instances, costs, lim, int(draw.integers(0, samples + 1)))


def told(line) -> str:
    """All that a time line says, of numbers that are exact."""
    spans = [(span.instance, span.kind, span.start, span.end) for span in line.spans]
    seconds = line.sample_seconds, line.total_seconds, line.reward_seconds, line.migrated_bytes
    return repr((str(line.plan), sorted(spans), seconds, line.scored_before_generation_end))


@pytest.mark.parametrize(
    "pauses, rewards, digest",
    [
        (False, False, "e847894fde0ece44"),
        (False, True, "cacd440ccaef09f1"),
        (True, False, "b2477c4a9c1e6161"),
        (True, True, "0cc9ae9a066dd1c6"),
    ],
)
def test_time_lines_are_the_recorded_ones(pauses, rewards, digest):
    """Recorded when each of these lines was equal to one that ran prefill by prefill and step by step."""
    draw, found, moved = np.random.default_rng(0), hashlib.sha256(), 0
    for _ in range(200):
        line = drawn_line(draw, pauses, rewards)
        found.update(told(line).encode())
        moved += line.plan is not None and bool(line.plan.moves)
    assert moved > 40 and found.hexdigest()[:16] == digest


def test_move_cost_reads_linear_costs_exactly():
    cost = linear_cost().move_cost(limits())
    assert (cost.transfer_latency_seconds, cost.transfer_seconds_per_byte) == pytest.approx((1e-3, 1e-9))
    assert (cost.prefill_latency_seconds, cost.prefill_seconds_per_token) == pytest.approx((2e-3, 1e-4))


def test_too_little_room_is_refused():
    with pytest.raises(InputError, match="KV of 299 tokens, fewer than one sample of 100 \\+ 200 = 300"):
        limits(kv_capacity_bytes=29900.0)


def test_a_threshold_beyond_the_batch_is_refused():
    with pytest.raises(InputError, match="R_t = 17: a number from 0 .serial. to the 16 samples"):
        simulate_gen_infer(long_tail(16), 2, linear_cost(), limits(), 17)
