"""R_t: the sweep's closed forms, the contract of threshold.json, and the published shape of the curve."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_helpers import lengths_strategy, limits, linear_cost, long_tail

from rlhfuse.errors import InputError
from rlhfuse.simulator.cost import AnalyticCost, JobCost
from rlhfuse.simulator.generation import InstanceLimits
from rlhfuse.simulator.hardware import hardware_by_name
from rlhfuse.simulator.iteration import simulate_gen_infer
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.threshold import Threshold, load_threshold, save_threshold, sweep_threshold
from rlhfuse.spec import ModelSpec, ParallelLayout


def test_zero_is_serial_and_the_fastest_is_taken():
    lengths = long_tail(64)
    found = sweep_threshold(lengths, 4, linear_cost(), limits())
    assert [point.threshold for point in found.sweep[:4]] == [0, 3, 6, 10]
    assert len(found.sweep) == 20 and found.sweep[-1].ratio == 0.95
    serial = simulate_gen_infer(lengths, 4, linear_cost(), limits(), ())
    assert found.serial_seconds == found.sweep[0].fused_seconds == serial.total_seconds
    assert found.fused_seconds == min(point.fused_seconds for point in found.sweep)
    assert found.speedup > 1.05 and f"R_t = {found.threshold}" in found.explain()
    assert found.table().count("<") == 1


def test_equal_lengths_give_zero():
    """All samples end together, so no R_t changes anything, and the smallest of equal ones is taken."""
    found = sweep_threshold(SampleLengths((10,) * 32, (40,) * 32), 4, linear_cost(), limits())
    assert found.threshold == 0 and {point.fused_seconds for point in found.sweep} == {found.serial_seconds}
    assert "no threshold is predicted to beat serial" in found.explain()


def test_one_instance_has_only_zero():
    found = sweep_threshold(long_tail(16), 1, linear_cost(), limits())
    assert [point.threshold for point in found.sweep] == [0] and found.threshold == 0


def test_a_ruinous_swap_in_keeps_it_serial():
    """Freed instances would load weights for longer than the whole tail: fusion must not be chosen."""
    found = sweep_threshold(
        SampleLengths((10,) * 8, (40, 40, 40, 40, 40, 40, 40, 41)), 4, linear_cost(swap_in=5.0), limits()
    )
    assert found.fused_seconds <= found.serial_seconds


def test_small_batches_sweep_each_count_once():
    found = sweep_threshold(long_tail(8), 2, linear_cost(), limits())
    counts = [point.threshold for point in found.sweep]
    assert counts == sorted(set(counts)) == list(range(9))


@settings(derandomize=True, deadline=None, max_examples=25)
@given(lengths_strategy(16), st.integers(2, 5))
def test_never_slower_than_serial_and_reproducible(lengths, instances):
    found = sweep_threshold(lengths, instances, linear_cost(), limits())
    assert found.fused_seconds <= found.serial_seconds
    assert found == sweep_threshold(lengths, instances, linear_cost(), limits())


def test_batches_are_averaged_and_clipping_is_counted():
    batches = [long_tail(32, seed) for seed in range(3)]
    found = sweep_threshold(batches, 4, linear_cost(), limits())
    alone = [sweep_threshold(batch, 4, linear_cost(), limits()).sweep[5].fused_seconds for batch in batches]
    assert found.sweep[5].fused_seconds == pytest.approx(np.mean(alone))
    cut = sweep_threshold(batches, 4, linear_cost(), limits(max_output_tokens=30), clipped=7)
    assert cut.lengths.max == 30 and cut.lengths.clipped == 7 + sum(o > 30 for b in batches for o in b.output)
    with pytest.raises(InputError, match="equal sizes"):
        sweep_threshold([long_tail(8), long_tail(9)], 2, linear_cost(), limits())


def test_file_round_trip_and_contract(tmp_path):
    found = sweep_threshold(long_tail(64), 4, linear_cost(), limits())
    save_threshold(found, tmp_path / "threshold.json")
    assert load_threshold(tmp_path / "threshold.json") == found
    raw = json.loads((tmp_path / "threshold.json").read_text())
    assert {"threshold", "ratio", "destinations", "instances", "serial_seconds", "fused_seconds"} < raw.keys()
    assert {"p50", "p999", "max", "clipped"} <= raw["lengths"].keys()
    point = {"ratio", "threshold", "destinations", "fused_seconds", "generation_seconds", "migration_seconds"}
    assert raw["sweep"][0].keys() == point
    del raw["samples"], raw["lengths"]["p90"], raw["lengths"]["p99"]  # the least that a file may hold
    assert Threshold.from_dict(raw).threshold == found.threshold


@pytest.mark.parametrize(
    "text, message",
    [("{", "not valid JSON"), ("[]", "an object is needed"), ('{"threshold": 1}', "no threshold.json: 'sweep'")],
)
def test_bad_files_are_refused(tmp_path, text, message):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InputError, match=message):
        load_threshold(tmp_path / "t.json")
    with pytest.raises(InputError, match="cannot read"):
        load_threshold(tmp_path / "none.json")


def llama(layers: int, hidden: int, heads: int, mlp: int) -> ModelSpec:
    return ModelSpec("llama", layers, hidden, heads, heads, hidden // heads, mlp, 32000, 8192)


@functools.lru_cache(maxsize=None)
def published_curve(actor_name: str, critic_name: str) -> tuple[float, dict[float, float]]:
    """(serial, ratio -> fused seconds): 32 instances of TP8, 512 samples of at most 1024, scoring padded, BS_max 16."""
    specs = {
        "13B": llama(40, 5120, 40, 13824),
        "33B": llama(60, 6656, 52, 17920),
        "65B": llama(80, 8192, 64, 22016),
    }
    layout, h800 = ParallelLayout(1, 8, 1), hardware_by_name("h800")
    actor = AnalyticCost(specs[actor_name], layout, h800, 2)
    critic = AnalyticCost(specs[critic_name], layout, h800, 2, scalar_head=True)
    generator = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        output = np.clip(np.exp(generator.normal(np.log(100), 1.0, 512)), 1, 1024).astype(int)
        prompt = np.clip(np.exp(generator.normal(np.log(150), 0.8, 512)), 1, 1024).astype(int)
        batches.append(SampleLengths(tuple(map(int, prompt)), tuple(map(int, output))))
    lim = InstanceLimits(256, 300e9, specs[actor_name].kv_bytes_per_token(2), 16, 16, 1024, 1024, 8192, 2048)
    found = sweep_threshold(batches, 32, JobCost(actor, (actor, critic, critic), cross_node=True), lim)
    return found.serial_seconds, {point.ratio: point.fused_seconds for point in found.sweep}


PAIRS = (("13B", "33B"), ("33B", "13B"), ("33B", "65B"), ("65B", "33B"))


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_published_gain_of_fusing_generation_and_inference(pair):
    """Paper 7.2: 1.2-1.6 over serial. The lengths are lognormal stand-ins; the paper's are not published."""
    serial, curve = published_curve(*pair)
    assert 1.2 < serial / curve[0.2] <= serial / min(curve.values()) < 1.6


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_published_shape_of_the_threshold_curve(pair):
    """Paper Figure 9: U-shaped, best near 20% of the batch: within 5% of the optimum there, worse at both ends."""
    _, curve = published_curve(*pair)
    best = min(curve, key=curve.__getitem__)
    assert 0.1 <= best <= 0.5 and curve[0.2] <= 1.05 * curve[best]
    assert curve[0.0] > curve[0.05] > curve[0.2]
    assert min(seconds for ratio, seconds in curve.items() if ratio >= 0.65) > curve[0.2]
    assert curve[0.95] > curve[0.8] > curve[0.65]
