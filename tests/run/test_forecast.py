"""What an iteration is expected to take: by hand, from the iterations before it alone; and the table of a run."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfuse.config.spec import ParallelLayout
from rlhfuse.errors import InputError
from rlhfuse.fusion.inter.placement import Placement
from rlhfuse.monitor.report.forecast_table import PARTS, PHASES, ForecastTable, forecast_key, read_metrics
from rlhfuse.run.forecast import Batch, Forecaster, Measured
from rlhfuse.run.timeline import StageTimes
from rlhfuse.schedule.ir.problem import StageCosts, fused_problem
from rlhfuse.schedule.ir.ranks import rank_map
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.times import makespan
from rlhfuse.schedule.rules.builders import greedy
from rlhfuse.simulator.iteration import GenInferTimeline


def forecaster():
    layouts = dict.fromkeys(("actor", "critic"), ParallelLayout.parse("d1t1p2"))
    costs = {model: StageCosts((1, 1), (2, 2), (1, 1)) for model in layouts}
    ranks = rank_map(layouts)
    return Forecaster(lower(greedy(fused_problem(layouts, 2, costs)), ranks), ranks)


def stage_times(forward, step=0.5):
    rows = []
    for model in ("actor", "critic"):
        for stage in (0, 1):
            rows += [[model, stage, "F", 2 * forward, 2], [model, stage, "B", 4 * forward, 2]]
            rows += [[model, stage, "RG", 0.0, 1], [model, stage, "ST", step, 1]]
    return StageTimes.from_list(rows)


def measured(tokens, forward, between=0.25, **seconds):
    times = stage_times(forward)
    helper = forecaster()
    train = 2 * makespan(times.step_times(helper._programs, helper._ranks)) + between
    found = {"reshard": 0.1, "gen": 3.0, "infer": 1.0, "adv": tokens / 1000, "train": train, **seconds}
    return Measured({**found, "step": sum(found[part] for part in PARTS) + 0.05}, tokens, 2, times)


def batch(gen, total, tokens):
    return Batch(GenInferTimeline((), total, gen, 0.0, (), (), 0.0, 0), tokens)


def test_phases_follow_the_tokens_of_the_batch():
    maker = forecaster()
    assert not maker.ready
    for tokens in (100, 200, 300):
        maker.observe(measured(tokens, tokens / 100))
    found = maker.forecast(batch(2.0, 2.5, 400), [batch(1.0, 1.0, 300), batch(3.0, 4.0, 500)])
    want = measured(400, 4.0)
    assert found.known["gen"] == 2.0 and found.known["infer"] == 0.5
    for phase in ("reshard", "adv", "train"):
        assert found.known[phase] == pytest.approx(want.seconds[phase]), phase
    assert found.known["step"] == pytest.approx(sum(found.known[part] for part in PARTS) + 0.05)
    assert found.blind["gen"] == 2.0 and found.blind["train"] == pytest.approx(want.seconds["train"])
    assert makespan(found.step_times) * 2 + 0.25 == pytest.approx(found.known["train"])
    spans = found.spans(Placement(((0,), (1,)), ((0,), (1,))), 2, 7.0, [0.0, 1.0])
    assert min(span.start_seconds for span in spans) == 7.0 and {span.group for span in spans} == {"predicted"}
    first = min(span.start_seconds for span in spans if span.kind == "actor F")
    assert first == pytest.approx(7.0 + found.known["reshard"] + 2.5 + found.known["adv"]), "one phase after the other"
    assert set(found.metrics()) == {forecast_key(phase, blind) for phase in PHASES for blind in (False, True)}


def test_what_lies_around_the_time_line_counts_as_inference_beyond_it():
    maker = forecaster()
    for start, gather in ((0.1, 0.4), (0.2, 0.3), (0.6, 0.2)):
        maker.observe(replace(measured(100, 1.0), start=start, gather=gather))
    found = maker.forecast(batch(2.0, 2.5, 100), [batch(2.0, 2.5, 100)])
    assert found.known["infer"] == pytest.approx(0.5 + 0.4 + 0.25), "medians, without the run's first iteration"
    spans = found.spans(Placement(((0,), (1,)), ((0,), (1,))), 2, 0.0, [0.0, 1.0])
    advantages = next(span for span in spans if span.kind == "adv")
    assert advantages.start_seconds == pytest.approx(sum(found.known[part] for part in ("reshard", "gen", "infer")))


@settings(derandomize=True, deadline=None, max_examples=8)
@given(
    st.lists(
        st.tuples(st.integers(50, 900), st.floats(0.01, 9), st.floats(0, 2), st.floats(0, 2)), min_size=1, max_size=9
    ),
    st.floats(0, 50),
    st.floats(0, 50),
    st.integers(1, 999),
)
def test_the_parts_add_up(seen, generation, scoring, tokens):
    """An iteration is the sum of its phases and of the 0.05 s that lie between them in every one that was seen."""
    maker = forecaster()
    for count, forward, start, gather in seen:
        maker.observe(replace(measured(count, forward), start=start, gather=gather))
    one = batch(generation, generation + scoring, tokens)
    found = maker.forecast(one, [one, batch(1.0, 2.0, 100)])
    for seconds in (found.known, found.blind):
        assert seconds["step"] == pytest.approx(sum(seconds[part] for part in PARTS) + 0.05)
    assert found.known["gen"] + found.known["infer"] == pytest.approx(generation + scoring + found.start + found.gather)
    assert all(value >= 0 for value in found.known.values())


def test_the_first_iteration_counts_while_there_is_no_other():
    maker = forecaster()
    maker.observe(measured(100, 50.0, reshard=9.0))
    assert maker.ready and maker.forecast(batch(1, 1, 100), [batch(1, 1, 100)]).known["reshard"] == 9.0
    maker.observe(measured(100, 1.0, reshard=0.2))
    found = maker.forecast(batch(1, 1, 100), [batch(1, 1, 100)])
    assert found.known["reshard"] == 0.2
    assert found.known["train"] == pytest.approx(measured(100, 1.0).seconds["train"])


def test_an_iteration_without_a_phase_is_refused():
    with pytest.raises(InputError, match="without seconds of step"):
        forecaster().observe(Measured(dict.fromkeys(PARTS, 1.0), 1, 1, stage_times(1.0)))


def row(iteration, seconds, predicted=None, blind=None):
    """All phases alike."""
    line = {"iteration": iteration} | {f"timing_s/{phase}": seconds for phase in PHASES}
    for side, value in ((False, predicted), (True, blind)):
        if value is not None:
            line |= {forecast_key(phase, side): value for phase in PHASES}
    return line


def test_table_by_hand(tmp_path):
    lines = [row(0, 9.0), row(1, 1.0, 5.0, 5.0), row(2, 2.0, 1.5, 4.0), row(3, 2.0, 2.5, 2.0)]
    table = ForecastTable.of(lines, skip=2)
    assert table.iterations == (2, 3)
    assert table.rows[0].error == pytest.approx(0.25), "errors of both signs do not cancel"
    assert (table.mean_error, table.blind_mean_error) == pytest.approx((0.25, 0.5))
    assert "weights moved          2.000 s   2.000 s   25.0%" in table.text()
    assert "mean error 25.0% with the iteration's lengths known, 50.0% without, over 2 iterations" in table.text()
    assert "| mean over the phases | | | **25.0%** | | 50.0% |" in table.markdown()
    assert [one["phase"] for one in table.to_dict()["phases"]] == list(PHASES)
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert ForecastTable.of(read_metrics(tmp_path)).iterations == (1, 2, 3)


def test_nothing_to_show_is_said(tmp_path):
    with pytest.raises(InputError, match="no iteration holds a forecast"):
        ForecastTable.of([row(0, 1.0)])
    with pytest.raises(InputError, match="cannot read .*metrics.jsonl: No such file"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{\n")
    with pytest.raises(InputError, match="not valid JSON"):
        read_metrics(tmp_path)
