"""Actions, problems and schedules as text and JSON; peaks of memory by the clock."""

import json
import math
import random
from dataclasses import replace

import pytest
from testkit.profiles import share
from testkit.program_cases import random_schedule
from testkit.schedule_cases import capped_greedy, random_group, random_problem, table_3, table_3_problem, with_facts

from rlhfuse.base.errors import InputError, ScheduleError
from rlhfuse.schedule.io import load_family, load_schedule, save_schedule
from rlhfuse.schedule.ir.action import Action, Kind
from rlhfuse.schedule.ir.evaluate import evaluate, memory_profile
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import greedy, serial_1f1b


def two_by_two():
    facts = 1, (1, 1), (1, 1), (1, 1)
    return FusionProblem(2, (Pipeline("actor", "actor", (0, 1), *facts), Pipeline("critic", "critic", (1, 0), *facts)))


@pytest.mark.parametrize("text", ["actor:0F0", "critic.0:2F5", "actor:12B31", "a:0W1", "a:1SF2", "a:1RB2"])
def test_action_text_parses_back(text):
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "0F0", "actor:F0", "actor:0f0", "actor:0F", "actor:0X1", "a b:0F0", "a:-1F0"])
def test_other_action_text_is_refused(text):
    with pytest.raises(InputError, match="action"):
        Action.parse(text)


def test_schedule_text_parses_back_and_is_the_docstrings():
    text = "node 0: actor:0F0 critic:1F0 critic:1B0 actor:0B0\nnode 1: critic:0F0 actor:1F0 actor:1B0 critic:0B0"
    schedule = Schedule.parse(two_by_two(), text)
    assert schedule.text() == text
    timeline = evaluate(schedule)
    assert timeline.makespan == 4 and timeline.node_peak_memory == (2, 2)
    assert timeline.starts == ((0, 1, 2, 3), (0, 1, 2, 3))
    assert greedy(two_by_two()) == schedule


def test_serial_orders_are_1f1b():
    problem = FusionProblem(3, (Pipeline("a", "a", (0, 1, 2), 4, (1,) * 3, (2,) * 3, (1,) * 3),))
    assert serial_1f1b(problem).text().splitlines() == [
        "node 0: a:0F0 a:0F1 a:0F2 a:0B0 a:0F3 a:0B1 a:0B2 a:0B3",
        "node 1: a:1F0 a:1F1 a:1B0 a:1F2 a:1B1 a:1F3 a:1B2 a:1B3",
        "node 2: a:2F0 a:2B0 a:2F1 a:2B1 a:2F2 a:2B2 a:2F3 a:2B3",
    ]
    assert capped_greedy(problem, 9).text().splitlines()[2] == "node 2: a:2F0 a:2F1 a:2F2 a:2F3 a:2B0 a:2B1 a:2B2 a:2B3"


@pytest.mark.parametrize(
    "orders, message",
    [
        ("node 0: actor:0F0 critic:1F0 critic:1B0\nnode 1: critic:0F0 actor:1F0 actor:1B0", "0B0 is missing"),
        ("node 0: actor:1F0", "belongs on node 1"),
        ("node 0: actor:0F0 actor:0F0", "out of micro-batch order"),
        ("node 0: actor:0F0 actor:0F7", "not in the problem"),
        ("node 0: actor:0SF0", "not in the problem"),
        ("node 1: actor:0F0", "must begin with 'node 0:'"),
        ("node 0:", "has 1 nodes"),
    ],
)
def test_broken_orders_are_refused(orders, message):
    text = orders if "\n" in orders or "has 1" in message else orders + "\nnode 1:"
    with pytest.raises(InputError, match=message):
        Schedule.parse(two_by_two(), text)


def test_deadlock_names_its_cycle():
    text = "node 0: critic:1F0 actor:0F0 critic:1B0 actor:0B0\nnode 1: actor:1F0 critic:0F0 actor:1B0 critic:0B0"
    with pytest.raises(ScheduleError, match="node 0 at critic:1F0 waits for critic:0F0; node 1 at actor:1F0") as caught:
        evaluate(Schedule.parse(two_by_two(), text))
    assert "node 0: critic:1F0 <-- ERROR HERE" in caught.value.grid


def test_contract_problem_reads_and_writes_back():
    actor = dict(name="actor", model="actor", placement=[0, 1], microbatches=3)
    actor |= dict(forward=[1, 2], backward=2, activation=1.95)
    critic = dict(name="critic", model="critic", placement=[1, 0], microbatches=3)
    critic |= dict(forward=1, backward=1, activation=0, weight_gradient=1, weight_activation=[0.5, 0])
    raw = dict(version=1, nodes=2, memory_cap=[9, 8.5], static_memory=1, transfer=0.5, pipelines=[actor, critic])
    problem = FusionProblem.from_dict(raw)
    assert problem.to_dict() == raw and problem.node_cap(1) == 7.5
    assert problem.pipeline("actor").forward == (1, 2) and problem.pipeline("critic").split


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 2}, "version is 2; must be 1"),
        ({"transfer": -1}, "transfer is -1"),
        ({"memory_cap": [1]}, "memory_cap has 1 entries for 2 nodes"),
        ({"pipelines": []}, r"pipelines is \[\]; list should have at least 1"),
        ({"speed": 1}, "unknown key 'speed'"),
        # of the first pipeline
        ({"placement": [0, 2]}, "placement names node 2"),
        ({"placement": []}, "placement is empty"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"forward": [1]}, "forward has 1 entries for 2 stages"),
        ({"forward": "5"}, r'forward\[0\] is "5"; must be a finite number'),
        ({"backward": float("nan")}, r"backward\[0\] is NaN"),
        ({"activation": -1}, "activation is -1"),
        ({"weight_activation": 1}, "weight_activation is held for W; give weight_gradient as well"),
        ({"name": "critic"}, "name 'critic' is used 2 times"),
    ],
)
def test_bad_problems_name_the_place(change, message):
    raw = two_by_two().to_dict()
    of_all = {"version", "nodes", "transfer", "memory_cap", "pipelines", "speed"}
    (raw if change.keys() <= of_all else raw["pipelines"][0]).update(change)
    with pytest.raises(InputError, match=f"problem.json: .*{message}"):
        FusionProblem.from_dict(raw, "problem.json")


def test_schedule_file_round_trip_and_contract(tmp_path):
    schedule = greedy(table_3(2))
    path = tmp_path / "schedule.json"
    save_schedule(path, schedule, {"seed": 1})
    assert load_schedule(path, schedule.problem) == schedule
    raw = json.loads(path.read_text())
    keys = "version problem tasks search makespan lower_bound latency_gap optimal serial_makespan peak_memory"
    keys += " node_peak_memory memory_lower_bound memory_gap memory_optimal serial_peak_memory"
    assert set(raw) == set(keys.split())
    assert raw["tasks"][0][0] == {"pipeline": "actor", "kind": "F", "microbatch": 0, "stage": 0, "start": 0, "end": 5}
    assert raw["makespan"] == max(task["end"] for row in raw["tasks"] for task in row)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("seed", range(share(40)))
def test_without_its_last_microbatches_a_schedule_is_one_of_fewer(seed):
    """Any valid schedule of any problem, split backwards and nodes that are visited twice too: nothing is later or
    held longer than it was, so that a cap that was kept is kept."""
    rng = random.Random(seed)
    problem = random_group(rng) if seed % 2 else random_problem(seed)
    counts = [pipeline.microbatches for pipeline in problem.pipelines]
    units = math.gcd(*counts)
    problem, first = problem.with_microbatches(3 * counts[0]), counts[0] // units
    whole = random_schedule(problem, rng)
    before = evaluate(whole)
    for rung in range(first, 3 * counts[0], first * max(1, units)):
        fewer = whole.of_fewer(problem.with_microbatches(rung))
        after = evaluate(fewer)
        assert after.makespan <= before.makespan and fewer.problem.pipelines[0].microbatches == rung
        assert all(a <= b for a, b in zip(after.node_peak_memory, before.node_peak_memory))
        assert {str(action) for order in fewer.orders for action in order} < {str(a) for o in whole.orders for a in o}
    assert whole.of_fewer(problem) == whole


def test_a_file_holds_a_family(tmp_path):
    file, problem = tmp_path / "schedule.json", table_3_problem(*(8, 4, 32, 16, 5, 4, 1.95, 2))
    most = greedy(problem)
    family = [most.of_fewer(problem.with_microbatches(count)) for count in (8, 16)]
    save_schedule(file, most, {"source": "here"}, family)
    assert load_schedule(file) == most
    assert load_family(file) == {8: family[0], 16: family[1], 32: most}
    save_schedule(file, most)
    assert load_family(file) == {32: most} and "others" not in json.loads(file.read_text())
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"others": [{"microbatches": 16, "orders": family[0].text().splitlines()}]}))
    with pytest.raises(ScheduleError, match="schedule.json: 16 micro-batches: .* is missing"):
        load_family(file)


def test_schedule_file_for_another_run_is_refused(tmp_path):
    problem, path = table_3(2), tmp_path / "schedule.json"
    save_schedule(path, greedy(problem))
    slower = with_facts(problem, lambda times: [7] * len(times), ["forward"])
    assert load_schedule(path, slower).problem == problem  # an order stays executable when times change
    for other, message in [
        (table_3_problem(16, 8, 8, 4, 5, 4, 1.95, 2), "is for 8 nodes, this run has 16"),
        (table_3_problem(8, 8, 8, 8, 5, 4, 1.95, 2), "critic.0, critic.1, this run has actor, critic"),
        (table_3(1), "microbatches 8, this run has 16"),
    ]:
        with pytest.raises(InputError, match=message):
            load_schedule(path, other)


@pytest.mark.parametrize("damage", ["not json", "[]", '{"version": 1}', "an unknown kind"])
def test_damaged_schedule_files_are_refused(tmp_path, damage):
    path = tmp_path / "schedule.json"
    save_schedule(path, greedy(two_by_two()))
    unknown = path.read_text().replace('"kind": "B"', '"kind": "Q"', 1)
    path.write_text(unknown if damage == "an unknown kind" else damage)
    with pytest.raises(InputError, match="schedule.json"):
        load_schedule(path)


def test_whole_activations_are_multiplied():
    """Eight times 1.95 is 15.6, B or no B between."""
    split = Pipeline("a", "a", (0,), 8, (1,), (1,), (1.95,), (1,))
    last = [Action("a", 0, Kind.W, m) for m in range(8)]
    orders = [[Action("a", 0, kind, m) for kind in (Kind.F, Kind.B) for m in range(8)] + last]
    for held, peak in ((None, 15.6), ((1.95,), 15.6), ((0.65,), 15.6), ((2.05,), 16.4)):
        problem = FusionProblem(1, (replace(split, weight_activation=held),))
        profile = memory_profile(Schedule(problem, tuple(map(tuple, orders))), 0)
        assert max(profile) == peak and profile[-1] == 0
