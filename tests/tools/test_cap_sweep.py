"""A sweep over memory caps: ends, bounds, starts from the neighbour, table and picture, and what it refuses."""

import json
from dataclasses import replace

import cap_sweep
import pytest
from cap_sweep import CapPoint, none_slower, sweep, sweep_svg, sweep_table
from testkit.programs import call_tool
from testkit.schedule_cases import check, table_3

from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.rules.builders import greedy, min_memory, one_at_a_time
from rlhfuse.schedule.search.library import Library
from rlhfuse.schedule.search.search import SearchObserver, SearchSettings

SETTINGS = SearchSettings(iterations=20_000)


@pytest.fixture(scope="module")
def points():
    return sweep(table_3(5, static_memory=1), SETTINGS, 4, Library(None))


def test_caps_go_from_the_least_possible_to_the_uncapped_peak_and_more_memory_is_never_slower(points):
    problem = table_3(5)
    assert points[0].cap == pytest.approx(1 + max(min_memory(problem)))
    assert points[-1].makespan == points[-1].bound == latency_bound(problem)
    for point in points:
        makespan, peaks = check(point.schedule.problem, point.schedule.orders)
        assert makespan == point.makespan >= point.bound and max(peaks) == pytest.approx(point.peak_memory)
        assert point.peak_memory + 1 <= point.cap * (1 + 1e-9)
        assert point.bound == latency_bound(replace(problem, memory_cap=point.cap, static_memory=1))
    assert [point.makespan for point in points] == sorted((point.makespan for point in points), reverse=True)


def test_what_fits_a_smaller_cap_stands_for_a_larger_one_where_it_is_faster():
    fast, slow = (
        CapPoint(cap, 1, evaluate(made).makespan, made, evaluate(made).peak_memory)
        for cap, made in ((20, greedy(table_3(2))), (30, one_at_a_time(table_3(2, memory_cap=30))))
    )
    first, second = none_slower([fast, slow])
    assert first == fast and second.cap == 30 and second.makespan == fast.makespan
    assert second.schedule.orders == fast.schedule.orders and second.schedule.problem == slow.schedule.problem


def test_a_search_begins_with_the_schedule_of_the_cap_below_and_a_signal_leaves_out_the_rest(monkeypatch):
    starts = []

    class Observer(SearchObserver):
        def stop(self):
            return 15 if len(starts) == 4 else 0

    whole = cap_sweep.search

    def search(problem, settings, **more):
        starts.append(more.get("start"))
        return whole(problem, settings, **more)

    monkeypatch.setattr(cap_sweep, "search", search)
    points = sweep(table_3(2), SETTINGS, 6, Library(None), observer=Observer())
    assert len(points) == 3 and starts[:2] == [None, None]
    assert [start.problem.memory_cap for start in starts[2:]] == [point.cap for point in points[:2]]


def test_the_table_and_the_picture_have_every_cap(points):
    lines = sweep_table(points).splitlines()
    assert len(lines) == 5 and lines[0].split() == "memory cap makespan bound above bound peak memory".split()
    assert [line.split()[1:3] for line in lines[1:]] == [[f"{p.makespan:g}", f"{p.bound:g}"] for p in points]
    svg = sweep_svg(points)
    assert svg == sweep_svg(points) and svg.startswith("<svg") and "proved bound" in svg


@pytest.mark.parametrize(
    "words, message",
    [
        (["--cap-sweep", "1"], "--cap-sweep 1 shows nothing; give 2 caps or more"),
        (["--cap-sweep", "3", "--memory-cap", "20"], "--memory-cap is of one cap, --cap-sweep of many"),
        (["--cap-sweep", "3", "--resume"], "--resume is of one cap, --cap-sweep of many"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, words, message):
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(table_3(2).to_dict()))
    told = call_tool("search_schedule", "--problem", file, "--out", tmp_path / "s.svg", "--iterations", 9, *words)
    assert told.returncode == 2 and message in told.stderr
