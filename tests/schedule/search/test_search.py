"""The search against bounds, caps and its own seed; tests/schedule/bounds holds it against exact optima."""

from dataclasses import replace
from itertools import count
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.profiles import examples
from testkit.program_cases import fused
from testkit.schedule_cases import TABLE_3, check, random_problem, table_3

from rlhfuse.base.errors import InputError
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.rules.builders import min_memory, one_at_a_time
from rlhfuse.schedule.search.search import FIRST_ROUND_MOVES, ROUND_SECONDS, SearchObserver, SearchSettings, search
from rlhfuse.schedule.search.worker import SearchWorker, load_kernels


@pytest.mark.parametrize("row", range(6))
def test_table_3_reaches_its_latency_bound(row):
    schedule, report = search(table_3(row), SearchSettings(iterations=3_000_000, seed=1))
    assert check(schedule.problem, schedule.orders)[0] == TABLE_3[row][2] == report.makespan and report.optimal


@pytest.mark.parametrize("actor, critic", [(2, 5), (5, 5)], ids=["1:1", "2.5:1"])
def test_coprime_groups_reach_their_latency_bound(actor, critic):
    """Two actor pipelines of 5 stages beside five critic pipelines of 2, ten micro-batches each or their share."""
    problem, _ = fused(("d2t1p5", "d5t1p2"), 10, (actor, critic))
    assert [p.microbatches for p in problem.pipelines] == [10] * 2 + [4] * 5
    assert evaluate(search(problem, SearchSettings(iterations=8_000_000))[0]).makespan == latency_bound(problem)


def test_memory_objective_reaches_the_proved_optimum():
    _, _, bound, _, memory = TABLE_3[2]
    schedule, report = search(table_3(2), SearchSettings(iterations=20_000_000, seed=1, objective="memory"))
    makespan, peaks = check(schedule.problem, schedule.orders)
    assert makespan == bound and max(peaks) == pytest.approx(memory)
    assert report.memory_lower_bound == memory


def test_same_seed_same_schedule():
    made = [SearchSettings(iterations=300_000, seed=seed, objective="memory") for seed in (3, 3, 4)]
    runs = [search(table_3(2), one)[0].orders for one in made]
    assert runs[0] == runs[1] and runs[0] != runs[2]


@examples(25)
@given(st.integers(0, 10**6))
def test_the_smallest_feasible_cap_is_exact(seed):
    problem = random_problem(seed)
    lone = check(problem, one_at_a_time(problem).orders)[1]
    assert lone == pytest.approx(min_memory(problem))
    least, static = max(min_memory(problem)), seed % 3
    capped = replace(problem, memory_cap=least + static, static_memory=static)
    schedule, _ = search(capped, SearchSettings(iterations=500))
    assert max(check(problem, schedule.orders)[1]) <= least * (1 + 1e-9)
    with pytest.raises(InputError, match=r"memory_cap leaves .* needs .*; the smallest feasible cap is") as refused:
        search(replace(capped, memory_cap=least * 0.999 + static), SearchSettings(iterations=500))
    assert float(str(refused.value).split()[-1]) == pytest.approx(least + static)


def test_search_goes_on_from_a_schedule():
    start, first = search(table_3(2), SearchSettings(iterations=300_000, objective="memory"))
    _, second = search(table_3(2), SearchSettings(iterations=1000, seed=9), start=start)
    assert (second.makespan, second.peak_memory) <= (first.makespan, first.peak_memory)


def test_a_signal_ends_the_search_with_what_it_has():
    class Observer(SearchObserver):
        asked = 0

        def stop(self):
            self.asked += 1
            return 15 if self.asked == 4 else 0

    problem, observer = table_3(2, memory_cap=4), Observer()  # never done
    schedule, report = search(problem, SearchSettings(time_limit=3600), observer=observer)
    assert report.signal == 15 and observer.asked == 4
    assert max(check(problem, schedule.orders)[1]) <= 4


def test_every_rank_may_use_up_its_moves():
    """The first round is one move, for the kernels; the last one is cut to what is left."""
    looks = count()  # a look at the clock is later than the one before
    for budget in (1, 2, 30_001):
        _, report = search(table_3(2, memory_cap=4), SearchSettings(iterations=budget), clock=lambda: next(looks))
        assert report.moves == budget
    assert report.kernel_seconds > 0 and report.first_seconds < report.seconds


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, "has no end"),
        ({"time_limit": 0}, "time_limit=0 must be above 0"),
        ({"iterations": -1}, "iterations=-1"),
        ({"iterations": 1, "seed": -1}, "seed=-1"),
        ({"iterations": 1, "objective": "speed"}, "objective='speed'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        search(table_3(2), SearchSettings(**settings))


@pytest.mark.parametrize("move_seconds, compile_seconds", [(1e-5, 0.0), (1e-3, 20.0)])
def test_time_limit_holds_and_rounds_are_short(monkeypatch, move_seconds, compile_seconds):
    """On machines of any pace: time here passes with the moves and with compiling, which does not count."""
    now, rounds, play = [50.0], [], SearchWorker.round

    def compiled():
        load_kernels()
        now[0] += compile_seconds

    def paced(*arguments):
        done = play(*arguments)
        now[0] += move_seconds * done.tried
        return done

    class Observer(SearchObserver):
        def round_ended(self, report):
            rounds.append(report.seconds)

    monkeypatch.setattr(SearchWorker, "round", paced)
    monkeypatch.setattr("rlhfuse.schedule.search.search.load_kernels", compiled)
    settings = SearchSettings(time_limit=3.0)
    _, report = search(table_3(9, memory_cap=12), settings, observer=Observer(), clock=lambda: now[0])
    lengths = [b - a for a, b in zip(rounds, rounds[1:])]
    first = move_seconds * FIRST_ROUND_MOVES
    assert report.kernel_seconds >= compile_seconds
    assert 3.0 <= report.seconds - report.kernel_seconds <= 3.0 + max(first, 2 * ROUND_SECONDS)
    assert median(lengths) == pytest.approx(ROUND_SECONDS, abs=2 * move_seconds)
