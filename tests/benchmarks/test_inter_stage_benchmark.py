"""The benchmark of fused generation and inference as its users run it, in small: output, figures by hand, bad input."""

import json

import pytest
from benchmark_run import check_refused, run
from inter_stage_cases import (  # noqa: E402
    BLOCK_TOKENS,
    FULL,
    QUICK,
    ROLES,
    batch_lengths,
    context_batches,
    packs,
    scaled,
    thresholds,
)
from inter_stage_figures import Point, figures, goals, ideal_seconds, trace_spans, work_seconds  # noqa: E402
from inter_stage_profile import Profile  # noqa: E402
from inter_stage_runs import RankRun, Run  # noqa: E402
from inter_stage_tables import line, markdown  # noqa: E402

from rlhfuse.costs.analytic import NEIGHBOURS  # noqa: E402
from rlhfuse.monitor.trace import load_trace  # noqa: E402
from rlhfuse.simulator.instances import InstanceLimits  # noqa: E402
from rlhfuse.simulator.iteration import simulate_gen_infer  # noqa: E402
from rlhfuse.simulator.lengths import SampleLengths  # noqa: E402

BOTH = ("predicted", "measured")
TAIL = (2, 3, 2, 4, 2, 3, 40, 2, 5, 2, 3, 2)  # output tokens of 12 requests


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    file = tmp_path_factory.mktemp("trace") / "trace.csv"
    rows = [f"{20 + 7 * i},{output}" for i, output in enumerate(TAIL)]
    file.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
    return file


def test_quick_run_measures_a_case(tmp_path, trace):
    files = {name: tmp_path / name for name in ("trace", "markdown", "out")}
    options = [word for name, file in files.items() for word in (f"--{name}", file)]
    finished = run("inter_stage.py", "--quick", "--sizes", "1:2", "--lengths", trace, *options)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("\n") == 1, "stdout holds one JSON object"
    result = json.loads(finished.stdout)
    assert json.loads(files["out"].read_text()) == result
    assert result["goals"] == [], "a quick run is no measurement"
    (case,) = result["cases"]
    assert case["same_bits"], "serial and every R_t give the same tokens, log-probabilities, values and rewards"
    assert case["lengths"]["max"] == QUICK[0].max_output
    fused = [point for point in case["points"] if point["threshold"]]
    assert case["points"][0]["threshold"] == 0 and case["points"][0]["early"] == 0
    assert any(point["migration"] > 0 for point in fused), "somebody met, moved and went on"
    assert {row["beside"] for row in case["profile"]} == set(NEIGHBOURS)
    assert set(case["step_of_8_over_1"]) == set(NEIGHBOURS) and set(case["parameters"]) == set(ROLES)
    assert 0 <= case["agreement_share"] < 1 and case["cpu_share"] > 0
    if case["chosen"]:
        assert case["migrated_bytes"] == case["needed_bytes"], "nothing travels that need not"
    assert f"| {case['case']} | 12 |" in files["markdown"].read_text()
    spans = load_trace(files["trace"])
    assert {(span.group, span.rank) for span in spans} == {(g, r) for g in BOTH for r in (0, 1)}


# figures by hand: two instances, decode steps of 10 ms, scoring of 1 ms a token, nothing else costs anything

LENGTHS = SampleLengths((1,) * 4, (5, 5, 5, 25))
LIMITS = InstanceLimits(4, 1000.0, 1.0, 1, 4, 1, 25, 100)


def profile(steps=None):
    """`steps`: seconds of a decode step beside each neighbour."""
    steps = steps or dict.fromkeys(NEIGHBOURS, 0.01)
    rows = {"prefill": [[4, 4, 0.0]], "load": [[0.0]]}
    rows["score"] = [[tokens, count, 0.001 * tokens] for tokens, count in ((10, 1), (20, 3), (40, 4), (80, 7)) * 3]
    counts = [(batch, context) for batch in (1, 2, 8) for context in (10, 30, 90)]
    beside = {
        name: {**rows, "decode": [[batch, context, seconds] for batch, context in counts]}
        for name, seconds in steps.items()
    }
    return Profile(beside, [[100, 0.0]])


def point(threshold, *seconds):
    costs = profile().fit()
    timeline = simulate_gen_infer(LENGTHS, 2, costs, LIMITS, (threshold,) if threshold else ())
    return Point(threshold, timeline, timeline, tuple(run_of(one, timeline) for one in seconds))


def run_of(seconds, timeline):
    plans = tuple(map(str, timeline.plans))

    def rank(number):
        spans = [("generate", 100.0, 100.1), ("migrate", 100.1, 100.11 + 0.01 * number)]
        spans += [("generate", 100.13, 100.3)] if plans and number in timeline.plans[0].destinations else []
        observed = {"decode": 0.3, "prefill": 0.0, "score": 0.1}
        return RankRun(100.0, seconds, 0.25, tuple(spans), plans, 1, 64, 64, 3, observed, 0.19, 0.004, 0.03, "digest")

    return Run.of([rank(0), rank(1)])


def test_ideal_by_hand():
    serial, fused = point(0, 0.4), point(1, 0.3)
    # 25 tokens: one by the prefill, 24 steps; 44 tokens are scored, 22 on each instance
    assert serial.predicted.generation_seconds == pytest.approx(0.24)
    work = work_seconds(serial.predicted)
    assert work == pytest.approx(0.044)
    assert ideal_seconds(serial, work) == pytest.approx(0.24 + 0.022)
    # the freed instance scores from step 4 on: what is ready there has room before generation ends
    assert fused.predicted.trigger_seconds == (pytest.approx(0.04),)
    assert ideal_seconds(fused, work) == pytest.approx(0.24)
    # four times the work: 40 ms of the one, 240 ms of the other instance come before
    assert ideal_seconds(fused, 0.4) == pytest.approx((0.24 + 0.04 + 0.4) / 2)


def test_choice_against_the_best_by_hand():
    points = [point(0, 0.40), point(1, 0.30), point(2, 0.20)]
    later = {1: points[1].runs * 3, 2: tuple(run_of(one, points[2].predicted) for one in (0.25, 0.30, 0.40))}
    found = figures(points, 1, later, same_bits=True)
    assert found["best_threshold"] == 2 and found["chosen_over_best_of_sweep"] == pytest.approx(0.5)
    assert found["chosen_over_best"] == pytest.approx(0.0), "the median of 1.2, 1.0 and 0.75"


def test_figures_by_hand():
    points = [point(0, 0.40, 0.44, 0.36), point(1, 0.20, 0.20, 0.30)]
    found = figures(points, 1, {}, same_bits=True)
    assert found["speedup"] == pytest.approx({"median": 2.0, "least": 1.2, "most": 2.2})
    assert found["inference_over_generation"] == pytest.approx(0.15 / 0.25) and found["bound"] == pytest.approx(1.6)
    assert found["best_threshold"] == 1 and found["chosen_over_best"] == pytest.approx(0.0)
    predicted = [one.predicted.total_seconds for one in points]
    assert found["mean_error"] == pytest.approx((abs(predicted[0] / 0.4 - 1) + abs(predicted[1] / 0.2 - 1)) / 2)
    assert found["agreement_share"] == pytest.approx(0.004 / 0.25) and found["pause_seconds"] == 0.03
    assert found["migration_share"] == pytest.approx(0.03 / 0.20), "from the last step before to the first behind it"
    assert found["cpu_share"] == pytest.approx(0.38 / 0.4)
    assert [row["threshold"] for row in found["points"]] == [0, 1] and len(found["points"][0]["raw"]) == 3
    case = {
        **found,
        "case": "1:2",
        "samples": 4,
        "lengths": LENGTHS.percentiles(),
        "profile": profile().table(profile().fit()),
    }
    assert [goal["reached"] for goal in goals("1:2", found)] == [True, True, False, False, True]
    assert "2.000 times as fast (1.20-2.20)" in line(case)
    text = markdown([case])
    assert "**2.00** (1.20-2.20)" in text and "| 1 (chosen) | 0.20 s |" in text
    assert "| decode step, batch 1, contexts of 10 tokens | 10.0 ms | 10.0 ms | 10.0 ms |" in text
    spans = trace_spans(points, 1, 5.0, "1:2")
    for threshold in (0, 1):
        drawn = [s for s in spans if s.args["R_t"] == threshold]
        predicted, measured = (min(s.start_seconds for s in drawn if s.group == group) for group in BOTH)
        assert predicted == pytest.approx(measured), "a run and its prediction begin together"
    assert min(s.start_seconds for s in spans) == 5.0 and len({s.args["R_t"] for s in spans}) == 2


def test_profile_tells_neighbours_apart():
    steps = {"idle": 0.01, "decoding": 0.012, "scoring": 0.02}
    costs = profile(steps).fit()
    for neighbour, seconds in steps.items():
        assert costs.beside(neighbour).decode_step_seconds(1, 10) == pytest.approx(seconds)
    assert profile(steps).step_ratio(8) == pytest.approx(dict.fromkeys(NEIGHBOURS, 1.0))
    assert costs.migration_seconds(500) == 0.0 and costs.swap_in_seconds() == 0.0
    row = next(row for row in profile(steps).table(costs) if (row["work"], row["beside"]) == ("decode", "scoring"))
    assert (row["seconds"], row["fit"]) == pytest.approx((0.02, 0.02))


def test_lengths_keep_the_shape_of_the_trace(trace):
    lengths = batch_lengths(trace, QUICK[0], seed=1)
    assert len(lengths) == QUICK[0].samples
    assert max(lengths.output) == QUICK[0].max_output and max(lengths.prompt) == QUICK[0].max_prompt
    assert lengths == batch_lengths(trace, QUICK[0], seed=1) != batch_lengths(trace, QUICK[0], seed=2)
    assert scaled((1, 5, 10), 20) == (2, 10, 20) and scaled((1, 1000), 10) == (1, 10)


def test_work_of_the_profile_covers_the_batch():
    for sizes in (*FULL, *QUICK):
        assert {batch for batch, _ in context_batches(sizes)} >= {1, 8}
        blocks = max(batch * -(-(context + 8) // BLOCK_TOKENS) for batch, context in context_batches(sizes))
        assert blocks <= sizes.blocks, "no sample of the profile is preempted"
        assert max(n * tokens for n, tokens in packs(sizes)) == sizes.score_tokens
        factor = sizes.scorer_layers / sizes.layers
        assert sizes.name == (f"1:{factor:g}" if factor >= 1 else f"{1 / factor:g}:1")
    assert thresholds(32, (0, 5, 10, 95)) == (0, 2, 3, 30) and thresholds(4, (0, 5, 10, 95)) == (0, 4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--sizes", "3:1"], "'3:1' is unknown; give some of 1:2, 2:1"),
        (["--lengths", "nowhere.csv"], "lengths file nowhere.csv does not exist"),
        (["--rounds", "0"], "0 is not at least 1"),
    ],
)
def test_bad_input_exits_2(arguments, message):
    check_refused(message, "inter_stage.py", *arguments)
