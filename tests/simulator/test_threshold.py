"""R_t: the sweep's closed forms, and the contract of threshold.json."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_report.timeline import simulate_gen_infer
from testkit.profiles import examples
from testkit.sim_helpers import equal, lengths_strategy, limits, linear_cost, long_tail

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_json
from rlhfuse.base.json_values import from_json, to_json
from rlhfuse.simulator.threshold import SweepPoint, Threshold, load_threshold, middle_of_best, sweep_threshold


@pytest.mark.parametrize(
    "seconds, chosen",
    [
        ((9, 5, 4, 5, 6), 2),  # a plain minimum
        ((9, 4.02, 4, 4.03, 4.04, 4.01, 6), 3),  # a flat stretch: its middle
        ((9, 4.02, 5, 4, 4.03, 6), 3),  # the near one beyond a ridge is another stretch
        ((4, 4.01, 4.02), 0),  # serial is the fastest
        ((4.01, 4, 4.5), 1),  # serial is near, and not as fast
    ],
)
def test_of_a_flat_stretch_the_middle_is_taken(seconds, chosen):
    points = [SweepPoint(i / 10, i, min(i, 1), value, value, 0.0) for i, value in enumerate(seconds)]
    assert middle_of_best(points).threshold == chosen


def test_zero_is_serial_and_the_fastest_is_taken():
    lengths = long_tail(64)
    found = sweep_threshold(lengths, 4, linear_cost(), limits())
    assert [point.threshold for point in found.sweep[:4]] == [0, 3, 6, 10]
    assert len(found.sweep) == 20 and found.sweep[-1].ratio == 0.95
    serial = simulate_gen_infer(lengths, 4, linear_cost(), limits(), 0)
    assert found.serial_seconds == found.sweep[0].fused_seconds == serial.total_seconds
    assert found.fused_seconds <= min(point.fused_seconds for point in found.sweep) * 1.01
    assert found.speedup > 1.05 and f"R_t = {found.threshold}" in found.explain()


def test_equal_lengths_give_zero():
    """All samples end together, so no R_t changes anything, and the smallest of equal ones is taken."""
    found = sweep_threshold(equal(32, 10, 40), 4, linear_cost(), limits())
    assert found.threshold == 0 and {point.fused_seconds for point in found.sweep} == {found.serial_seconds}
    assert "no threshold is predicted to beat serial" in found.explain()


def test_one_instance_has_only_zero_and_small_batches_sweep_each_count_once():
    for samples, instances, counts in ((16, 1, [0]), (8, 2, list(range(9)))):
        found = sweep_threshold(long_tail(samples), instances, linear_cost(), limits())
        assert [point.threshold for point in found.sweep] == counts and found.threshold in counts


def test_a_slow_reward_function_is_no_slower_for_the_tail():
    """Who began a sample has it rewarded, so the tail's do not stand in line at the few instances that keep it."""
    fast, slow = (sweep_threshold(long_tail(64), 4, linear_cost(reward=r), limits()) for r in (0.01, 0.25))
    assert fast == sweep_threshold(long_tail(64), 4, linear_cost(), limits()), "hidden behind generation"
    ends = [point.fused_seconds for point in slow.sweep]
    assert fast.threshold == 51 and max(ends) - min(ends) < 0.25 < min(ends) - fast.fused_seconds


@examples(25)
@given(lengths_strategy(16), st.integers(2, 5), st.sampled_from([0.5, 5.0]))
def test_never_slower_than_serial_and_reproducible(lengths, instances, swap_in):
    """Nor where freed instances would load weights for longer than the whole tail."""
    found = sweep_threshold(lengths, instances, linear_cost(swap_in), limits())
    assert found.fused_seconds <= found.serial_seconds
    assert found == sweep_threshold(lengths, instances, linear_cost(swap_in), limits())


def test_clipping_is_counted_over_batches_of_one_size():
    batches = [long_tail(32, seed) for seed in range(3)]
    cut = sweep_threshold(batches, 4, linear_cost(), limits(max_output_tokens=30), clipped=7)
    assert cut.lengths.max == 30 and cut.lengths.clipped == 7 + sum(o > 30 for b in batches for o in b.output)
    with pytest.raises(InputError, match="equal sizes"):
        sweep_threshold([long_tail(8), long_tail(9)], 2, linear_cost(), limits())


def test_file_round_trip_and_contract(tmp_path):
    found = sweep_threshold(long_tail(64), 4, linear_cost(), limits())
    write_json(tmp_path / "threshold.json", to_json(found))
    assert load_threshold(tmp_path / "threshold.json") == found
    raw = json.loads((tmp_path / "threshold.json").read_text())
    assert {"threshold", "ratio", "destinations", "instances", "serial_seconds", "fused_seconds"} < raw.keys()
    assert {"p50", "p999", "max", "clipped"} <= raw["lengths"].keys()
    point = {"ratio", "threshold", "destinations", "fused_seconds", "generation_seconds", "migration_seconds"}
    assert raw["sweep"][0].keys() == point
    del raw["samples"], raw["lengths"]["p90"], raw["lengths"]["p99"]  # the least that a file may hold
    assert from_json(Threshold, raw, "t").threshold == found.threshold
    (tmp_path / "t.json").write_text('{"threshold": 1}')
    with pytest.raises(InputError, match="t.json: ratio is missing"):
        load_threshold(tmp_path / "t.json")


def test_least_threshold_migrates_though_serial_is_faster():
    even = (equal(32, 10, 40), 4, linear_cost(), limits())
    free, held = sweep_threshold(*even), sweep_threshold(*even, least=5)
    assert free.threshold == 0 and held.threshold >= 5 and held.sweep == free.sweep
    assert held.fused_seconds >= held.serial_seconds == free.serial_seconds
