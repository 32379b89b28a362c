"""Thousands of random instances against the independent checker, and every damage to a schedule refused twice.

Refused twice: by the checker of schedule_cases.py, and by the package's own reader of schedule.json.
"""

import json
import random
from collections import Counter
from copy import deepcopy
from dataclasses import replace

import pytest
from testkit.profiles import share
from testkit.schedule_cases import (
    capped_greedy,
    plain,
    random_instance,
    random_problem,
    same_layout_problem,
    verdict,
)

from rlhfuse.base.errors import InputError, ScheduleError
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.io import read_schedule, schedule_dict
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.evaluate import evaluate, over_cap
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import greedy, one_at_a_time, serial_1f1b
from rlhfuse.schedule.rules.interleaved import interleaved_1f1b, interleaved_problem
from rlhfuse.schedule.rules.time_sharing import time_sharing
from rlhfuse.schedule.search.search import SearchSettings, search

BUILDERS = {
    "serial 1F1B": serial_1f1b,
    "one at a time": one_at_a_time,
    "eager": lambda p: capped_greedy(p, 99),
    "greedy": greedy,
    "capped greedy": capped_greedy,
    "interleaved 1F1B": lambda p: interleaved_1f1b(interleaved_problem(p, 2)),
    "time-sharing": lambda p: time_sharing(same_layout_problem(p)),
}


def built(problem, turn=None):
    """(builder, schedule) of every builder that takes the problem; what the others say must be one line.

    With `turn` only every third builder has its turn.
    """
    for number, (name, build) in enumerate(BUILDERS.items()):
        if turn is not None and (turn + number) % 3:
            continue
        try:
            yield name, build(problem)
        except InputError as error:
            assert name in list(BUILDERS)[5:] and "\n" not in str(error), f"{name}: {error}"


def as_file(schedule):
    return json.loads(json.dumps(schedule_dict(schedule)))


def capped(problem, caps, static=0):
    return replace(problem, memory_cap=tuple(cap + static for cap in caps), static_memory=static)


@pytest.mark.parametrize("first, count", [(0, 1000), pytest.param(1000, 2000, marks=pytest.mark.slow)])
def test_every_builder_on_random_instances(first, count):
    schedules, large, count = Counter(), 0, share(count)
    for seed in range(first, first + count):
        family, problem = random_instance(seed)
        for name, schedule in built(problem, seed // 10 if family in ("group", "layout") else None):
            found, timeline = verdict(plain(schedule.problem), schedule.orders), evaluate(schedule)
            assert not isinstance(found, str), f"seed {seed}, {name}: {found}"
            assert timeline.makespan == pytest.approx(found[0]), f"seed {seed}, {name}"
            assert timeline.node_peak_memory == pytest.approx(found[1]), f"seed {seed}, {name}"
            if family == "small":
                assert Schedule.parse(schedule.problem, schedule.text()) == schedule
            schedules[name] += 1
        large += problem.nodes > 8 and len(problem.models) >= 2
    assert large >= count / 10 and all(schedules[name] >= count / 30 for name in BUILDERS), schedules


def test_search_on_random_instances():
    """Valid, above the bound, no worse than greedy; half are capped at one micro-batch at a time, plus a little."""
    for seed in range(share(200)):
        problem = random_instance(seed)[1]
        if seed % 2:
            lean = evaluate(one_at_a_time(problem)).node_peak_memory
            problem = capped(problem, [peak * (1 + seed % 3 / 2) for peak in lean], seed % 3)
        schedule, report = search(problem, SearchSettings(iterations=300, seed=seed))
        raw = {**plain(problem), "memory_cap": problem.memory_cap, "static_memory": problem.static_memory}
        claims = {"makespan": report.makespan, "peak_memory": report.peak_memory}
        found = verdict(raw, schedule.orders, claims)
        assert not isinstance(found, str), f"seed {seed}: {found}"
        bound, start = latency_bound(problem), evaluate(greedy(problem))
        assert bound * (1 - 1e-9) <= report.makespan and report.optimal == (report.makespan <= bound * (1 + 1e-9))
        if over_cap(problem, start.node_peak_memory) is None:
            assert report.makespan <= start.makespan * (1 + 1e-9)


def both_refuse(raw, what, rule=""):
    """The checker and the reader refuse `raw`; the checker's reason begins with `rule`."""
    found = verdict(raw["problem"], raw["tasks"], raw)
    assert isinstance(found, str), f"{what}: the checker lets it pass"
    assert found.startswith(rule), f"{what}: the checker says {found}"
    try:
        read_schedule(raw, "file")
    except ScheduleError as error:
        assert str(error).startswith("file: ") and "\n" not in str(error), f"{what}: {error}"
    else:
        pytest.fail(f"{what}: the reader lets it pass ({found})")


def without_times(raw):
    """Only the order: no times and no claims."""
    for row in raw["tasks"]:
        for task in row:
            del task["start"], task["end"]
    return {key: raw[key] for key in ("version", "problem", "tasks")}


def lane(task):
    return task["pipeline"], task["stage"], task["kind"]


def damages(valid, rng):
    """(kind of damage, what the checker must say, damaged file): every one that can be done to `valid`."""

    def fresh(node=0, timed=True):
        raw = deepcopy(valid)
        raw = raw if timed else without_times(raw)
        return raw, raw["tasks"][node]

    nodes = range(len(valid["tasks"]))
    for node in nodes:
        for i, task in enumerate(valid["tasks"][node]):
            yield from task_damages(fresh, node, i, task, rng, nodes)
        yield from order_damages(fresh, node, valid["tasks"][node])
    raw, _ = fresh()
    del raw["tasks"][-1]
    yield "row dropped", "", raw
    peaks = valid["node_peak_memory"]
    for node in (n for n in nodes if peaks[n] > 0):
        raw, _ = fresh()
        raw["problem"] |= {"memory_cap": [p + 1 for p in peaks], "static_memory": [1] * len(peaks)}
        assert not isinstance(verdict(raw["problem"], raw["tasks"], raw), str)
        raw["problem"]["memory_cap"][node] -= 0.01 * peaks[node]
        yield "over the cap", "over the cap", raw


def task_damages(fresh, node, i, task, rng, nodes):
    raw, row = fresh(node)
    del row[i]
    yield "dropped", "missing", raw
    raw, row = fresh(node)
    row.insert(rng.randrange(i, len(row)) + 1, dict(task))
    yield "duplicated", "repeated", raw
    for other in set(nodes) - {node}:
        raw, row = fresh(node)
        target = raw["tasks"][other]
        target.insert(rng.randint(0, len(target)), row.pop(i))
        yield "on the wrong node", "wrong node", raw
    for change in ({"pipeline": "nobody"}, {"stage": task["stage"] + 99}, {"microbatch": -1}, {"microbatch": 99}):
        raw, row = fresh(node)
        row[i] |= change
        yield "foreign", "unknown task", raw


def order_damages(fresh, node, row_before):
    for i, task in enumerate(row_before):
        later = [j for j in range(i + 1, len(row_before)) if lane(row_before[j]) == lane(task)]
        for j in later[:1]:
            for timed in (True, False):
                raw, row = fresh(node, timed)
                row[i]["microbatch"], row[j]["microbatch"] = row[j]["microbatch"], row[i]["microbatch"]
                yield "micro-batches out of order", "micro-batches out of order", raw
        for j in range(i + 1, len(row_before)):  # what needs the output of task i, put before it
            other = row_before[j]
            same = (other["pipeline"], other["microbatch"]) == (task["pipeline"], task["microbatch"])
            first = all(lane(row_before[k]) != lane(other) for k in range(i, j))
            if same and first and needed(task, other):
                raw, row = fresh(node, timed=False)
                row.insert(i, row.pop(j))
                yield "cyclic", "deadlock", raw


def needed(before, after):
    """Whether `after` cannot start until `before`, of the same micro-batch, has ended."""
    one, other = before["stage"], after["stage"]
    rules = {"FF": one < other, "BB": one > other, "FB": True, "FW": True, "BW": one >= other}
    return rules.get(before["kind"] + after["kind"], False)


def test_every_damage_is_refused_by_checker_and_reader():
    counts, rng = Counter(), random.Random(1)
    for seed in range(share(40)):
        problem = random_instance(seed)[1]
        made = [(name, s) for name, s in built(problem) if sum(map(len, s.orders)) <= 36]
        if not made:
            continue
        name, schedule = made[seed % len(made)]
        if seed % 2:
            caps = evaluate(schedule).node_peak_memory
            schedule = replace(schedule, problem=capped(schedule.problem, caps, seed % 3))
        valid = as_file(schedule)
        found = verdict(valid["problem"], valid["tasks"], valid)
        assert not isinstance(found, str), f"seed {seed}, {name}: {found}"
        assert read_schedule(valid, "file") == schedule
        for kind, rule, raw in damages(valid, rng):
            both_refuse(raw, f"seed {seed}, {name}, {kind}", rule)
            counts[kind] += 1
    assert min(counts.values()) >= share(10) and len(counts) == 8, counts


def test_checker_and_package_agree_on_random_orders():
    """Random orders that keep micro-batches in order: many deadlock, and both must say which."""
    outcomes = Counter()
    for seed in range(share(400)):
        problem, rng = random_problem(seed, 4), random.Random(seed)
        orders = [random_order(problem, node, rng, tidy=seed % 3 > 0) for node in range(problem.nodes)]
        found = verdict(plain(problem), orders)
        try:
            timeline = evaluate(Schedule(problem, tuple(map(tuple, orders))))
        except ScheduleError as error:
            assert "deadlocks" in str(error) and found.startswith("deadlock"), f"seed {seed}: {found}, {error}"
            outcomes["deadlock"] += 1
            continue
        assert not isinstance(found, str), f"seed {seed}: {found}"
        assert timeline.makespan == pytest.approx(found[0])
        assert timeline.node_peak_memory == pytest.approx(found[1])
        outcomes["valid"] += 1
    assert min(outcomes["deadlock"], outcomes["valid"]) >= share(20), outcomes


def random_order(problem, node, rng, tidy):
    """The lanes of a node, each with a beginning and a pace of its own; with `tidy` a stage's F, B and W follow."""
    placed = []
    for pipeline in problem.pipelines:
        for stage in (stage for stage, home in enumerate(pipeline.placement) if home == node):
            begins, pace = [rng.random() for _ in "FBW"[: 3 if pipeline.split else 2]], rng.random()
            for kind, begin in zip((Kind.F, Kind.B, Kind.W), sorted(begins) if tidy else begins):
                pace = pace if tidy else rng.random()
                lane = [Action(pipeline.name, stage, kind, m) for m in range(pipeline.microbatches)]
                placed += [(begin + pace * action.microbatch, action) for action in lane]
    return [action for _, action in sorted(placed)]
