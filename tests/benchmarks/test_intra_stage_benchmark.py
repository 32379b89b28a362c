"""The benchmark of fused training as its users run it, in small: output, figures by hand, bad input."""

import json

import pytest
from benchmark_run import check_refused, run
from intra_stage import line, side_programs  # noqa: E402
from intra_stage_cases import (  # noqa: E402
    FULL,
    FUSED,
    MEGATRON,
    MODELS,
    NO_BARRIER,
    QUICK,
    SERIAL,
    SIDES,
    Case,
    Schedules,
    Times,
    problem_of,
)
from intra_stage_figures import case_figures, cpu_share, goals, markdown, trace_spans  # noqa: E402
from intra_stage_ranks import Action, Round, Run, Spent  # noqa: E402
from rank_processes import Ranks  # noqa: E402

from rlhfuse.monitor.trace import load_trace  # noqa: E402

BOTH = ("predicted", "measured")


@pytest.mark.slow
def test_quick_run_measures_a_case(tmp_path):
    files = {name: tmp_path / name for name in ("trace", "markdown", "out")}
    options = [word for name, file in files.items() for word in (f"--{name}", file)]
    finished = run("intra_stage.py", "--quick", "--sizes", "2.5:1", "--microbatches", 2, *options)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("\n") == 1, "stdout holds one JSON object"
    result = json.loads(finished.stdout)
    assert json.loads(files["out"].read_text()) == result
    assert result["goals"] == [], "a quick run is no measurement"
    (case,) = result["cases"]
    assert case["same_gradients"], "every side, Megatron's own loop included, computes the same bits"
    assert set(case["seconds"]) == set(SIDES) and all(row["median"] > 0 for row in case["seconds"].values())
    assert set(case["speedups"]) == {MEGATRON, SERIAL, NO_BARRIER}
    assert [row["action"] for row in case["actions"]] == [f"{m}:{s}{k}" for m in MODELS for s in (0, 1) for k in "BF"]
    assert case["bound"] >= case["headline"]["predicted"] > 1
    for row in case["ranks"]:
        assert row["peak_live"] == row["peak_live_predicted"]
    assert case["executor"]["instruction_seconds"] > 0 and 0 < case["cpu_share"] < 1.5
    assert files["markdown"].read_text().splitlines()[2].startswith("| 2.5:1 | 2 |")
    spans = load_trace(files["trace"])
    tracks = {(span.group, span.rank) for span in spans}
    assert tracks == {(group, rank) for group in BOTH for rank in (0, 1)}
    for side in (NO_BARRIER, FUSED):
        names = {
            group: sorted(span.name for span in spans if span.args["side"] == side and span.group == group)
            for group in BOTH
        }
        assert names["predicted"] == names["measured"] and len(names["measured"]) == 2 * 2 * 2 * 2


def small_case():
    """Equal stages, two micro-batches: 9 units of 1 ms serially in each model, the textbook's 1.5 fused."""
    case = Case(QUICK[0], 2)
    times = Times({(m, s, k): {"F": 0.001, "B": 0.002}[k] for m in MODELS for s in (0, 1) for k in "FB"})
    return case, times, Schedules.of(problem_of(case, times), seed=1)


def test_prediction_of_equal_models():
    _, _, schedules = small_case()
    assert (schedules.serial_time, schedules.fused_time, schedules.bound) == (18000, 12000, 12000)
    assert schedules.fused_time < schedules.no_barrier_time < schedules.serial_time


def round_of(seconds, busy=0.009, cpu=0.009):
    def rank(number):
        action = Action(number, f"actor:{number}F0", ("actor", number, "F"), 0.0, busy)
        spent = (("F", Spent(4, 0.0, 0.001, 4e-5)), ("SF", Spent(2, 1e-4, 0.0, 1e-5)), ("RF", Spent(1, 2e-5, 0.0, 0.0)))
        return Run(0.0, seconds, cpu, 7, (action,), spent, 0.0, 2)

    return Round.of([rank(0), rank(1)])


def test_figures_by_hand(monkeypatch):
    case, times, schedules = small_case()
    monkeypatch.setattr("intra_stage_figures.action_rows", lambda *_: [])
    seconds = {MEGATRON: (18, 20, 19), SERIAL: (20, 21, 22), NO_BARRIER: (16, 17, 18), FUSED: (12, 16, 10)}
    seconds |= {"serial_step": (30, 30, 30), "fused_step": (20, 20, 20)}
    rounds = {side: [round_of(value / 1000) for value in values] for side, values in seconds.items()}
    figures = case_figures(case, schedules, times, rounds)
    head = figures["headline"]
    assert head["baseline"] == MEGATRON, "the faster of Megatron's loop and ours"
    assert (head["speedup"], head["least"], head["most"]) == pytest.approx((1.5, 1.25, 1.9))
    assert (head["predicted"], head["of_predicted"]) == pytest.approx((1.5, 1.0))
    assert figures["speedups"][SERIAL]["speedup"] == pytest.approx(20 / 12)
    assert figures["with_optimizer_steps"]["speedup"] == pytest.approx(1.5)
    assert figures["executor"]["instruction_seconds"] == pytest.approx(5e-5 / 7)
    assert figures["executor"]["send_seconds"] == pytest.approx(5e-5)
    assert figures["executor"]["receive_seconds"] == pytest.approx(2e-5)
    assert figures["executor"]["share"] == pytest.approx(5e-5 / 0.012)
    assert [row["waiting_seconds"] for row in figures["ranks"]] == [0.001, 0.001]
    assert cpu_share([round_of(0.02, busy=0.01, cpu=0.008)]) == pytest.approx(0.8)
    assert [row["reached"] for row in goals([figures])] == [True, True, True]
    figures["headline"]["of_predicted"] = 0.94
    assert not goals([figures])[0]["reached"]
    assert "**1.50** (1.25-1.90)" in markdown([figures])
    assert "1.500 (1.25-1.90) against megatron_1f1b" in line({**figures, "case": case.name})


def test_trace_lays_runs_side_by_side():
    case, _, schedules = small_case()
    rounds = {side: [round_of(0.02)] for side in (NO_BARRIER, FUSED)}
    spans = trace_spans(case, schedules, rounds, begin=5.0)
    starts = {side: min(s.start_seconds for s in spans if s.args["side"] == side) for side in rounds}
    ends = {side: max(s.end_seconds for s in spans if s.args["side"] == side) for side in rounds}
    assert starts[NO_BARRIER] == 5.0 and ends[NO_BARRIER] < starts[FUSED]
    for side in rounds:
        own = [s for s in spans if s.args["side"] == side]
        first = {group: [s.start_seconds for s in own if s.group == group] for group in BOTH}
        assert min(first["predicted"]) == min(first["measured"]), "a run and its prediction begin together"


def test_sides_run_the_same_instructions():
    _, _, schedules = small_case()
    programs = side_programs(schedules)

    def words(side):
        return sorted(word for phase in programs[side] for text in phase for word in text.split()[2:])

    assert words(SERIAL) == words(NO_BARRIER) == words(FUSED)
    assert words("serial_step") == words("fused_step")
    extra = set(words("fused_step")) - set(words(FUSED))
    assert extra == {f"{m}:{s}{k}" for m in MODELS for s in (0, 1) for k in ("RG", "ST")}
    assert len(programs[SERIAL]) == 2, "a barrier between actor and critic"


def test_models_are_of_the_sizes_they_are_called():
    for sizes in (*FULL, *QUICK):
        actor, critic = (sizes.spec(model).layers for model in MODELS)
        assert actor / critic == float(sizes.name.partition(":")[0])
        assert actor % 2 == critic % 2 == 0 or sizes in QUICK, "two equal stages"


def test_a_rank_that_fails_is_heard():
    with Ranks("intra_stage_worker:TrainingRank", {}) as ranks:
        with pytest.raises(RuntimeError, match="failed in 'run'"):
            ranks.ask("run", "fused")
        processes = list(ranks._processes)
    assert not any(process.is_alive() for process in processes)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--sizes", "3:1"], "'3:1' is unknown; give some of 1:1, 2.5:1"),
        (["--microbatches", "2,1"], "'1' is not a number of at least 2"),
        (["--rounds", "0"], "0 is not at least 1"),
    ],
)
def test_bad_input_exits_2(arguments, message):
    check_refused(message, "intra_stage.py", *arguments)
