"""The paper's search against a plain Python reading of Algorithms 1-3, brute force, and the checker."""

import itertools
import math
import random as python_random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper.table3 import PRINTED, SETTINGS, TRACED, one_f_one_b_plus_makespan
from schedule_cases import TABLE_3, Random, check, random_problem, table_3_problem

from rlhfuse.errors import InputError
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.objective import Goal
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.rules.builders import serial_1f1b, serial_makespan, serial_peak_memory
from rlhfuse.schedule.search.paper_chain import (
    Law,
    PaperChain,
    PaperSettings,
    cool,
    new_walk,
    paper_starts,
    replay,
    set_price,
)
from rlhfuse.schedule.search.paper_greedy import paper_greedy
from rlhfuse.schedule.search.search import search
from rlhfuse.schedule.search.sequence import sequence_of, tables_of

QUICK = PaperSettings(t0=5.0, alpha=0.9999, eps=1e-3, memory_t0=5.0)  # frozen after 85,000 iterations


def compute_energy(graph, rows):
    """Algorithm 3: memoised recursion from the last subtask of every node; None on a cycle."""
    intra = {b: a for row in rows for a, b in zip(row, row[1:])}
    memo, open_ = {}, set()

    def finish(o):
        if o in memo:
            return memo[o]
        if o in open_:
            raise RecursionError
        open_.add(o)
        times = [0]
        if o in intra:
            times.append(finish(intra[o]))
        if graph.upstream[o] >= 0:
            times.append(finish(int(graph.upstream[o])) + graph.lag[o])
        memo[o] = max(times) + graph.duration[o]
        return memo[o]

    try:
        return max(finish(row[-1]) for row in rows if row)
    except RecursionError:
        return None


def peaks(graph, rows):
    return [max(itertools.accumulate((graph.memory[o] for o in row), initial=0.0)) for row in rows]


def twin(graph, rows, word, law, draws, temperature):
    """Algorithm 1 with Algorithm 2 inlined. Returns (draws, accepted, temperature, rows, best rows)."""
    random, accepted = Random(word), 0
    current = (compute_energy(graph, rows), max(peaks(graph, rows)), sum(peaks(graph, rows)))
    best, best_rows = current, [list(row) for row in rows]
    for draw in range(draws):
        if temperature <= law.eps or best[1 if law.memory else 0] <= law.target:
            return draw, accepted, temperature, rows, best_rows
        node = int(random() * len(rows))
        if len(rows[node]) < 2:
            continue
        j = int(random() * (len(rows[node]) - 1))
        a, b = rows[node][j : j + 2]
        if graph.lane[a] == graph.lane[b] or graph.upstream[b] == a:
            continue
        neighbour = [list(row) for row in rows]
        neighbour[node][j : j + 2] = b, a
        makespan, memory = compute_energy(graph, neighbour), peaks(graph, neighbour)
        if makespan is None or memory[node] > law.cap[node]:
            continue
        price = (makespan, max(memory), sum(memory))
        if law.memory:
            energy = price[1:]
            cost = price[1] - current[1] or price[2] - current[2]
            allowed = makespan <= max(current[0], law.enough)
            better = allowed and energy < best[1:]
        else:
            cost, allowed, better = makespan - current[0], True, makespan < best[0]
        if better:
            best, best_rows = price, neighbour
        if allowed and (cost <= 0 or math.exp(-cost / temperature) > random()):
            rows, current, accepted = neighbour, price, accepted + 1
        temperature *= law.alpha
    return draws, accepted, temperature, rows, best_rows


def whole_problem(seed, size=12):
    """A random problem in integers, so that sums are exact in any order."""
    problems = (random_problem(seed * 1000 + k) for k in range(1000))
    return next(p for p in problems if isinstance(p.pipelines[0].forward[0], int) and build_graph(p).size > size)


def rows_of(graph, sequence):
    return [[int(o) for o in sequence if graph.node[o] == n] for n in range(graph.problem.nodes)]


@pytest.mark.parametrize("seed", range(15))
def test_kernel_walks_as_the_algorithms_are_written(seed):
    """Same draws, same verdicts, same best; lags, split backwards, caps and nodes visited twice included."""
    problem = whole_problem(seed)
    graph, memory = build_graph(problem), seed % 2 == 1
    schedule = (serial_1f1b if seed % 3 == 0 else paper_greedy)(problem)
    timeline = evaluate(schedule)
    capped = seed % 4 >= 2
    cap = np.array(timeline.node_peak_memory, float) * (1.2 if memory else 1) + 1e-9
    cap = cap if capped else np.full(problem.nodes, np.inf)
    enough = float(timeline.makespan) * (1.2 if seed % 5 == 0 else 0.5)
    law = Law(memory, cap, capped, enough, -1.0, 0.99, 0.05, 1e-7, 1e-7)
    sequence = sequence_of(graph, schedule)
    walk = new_walk(sequence, problem.nodes, 1000 + seed)
    set_price(tables_of(graph), walk)
    draws, accepted, temperature = cool(tables_of(graph), walk, law, 900, 4.0)
    expected = twin(graph, rows_of(graph, sequence), 1000 + seed, law, 900, 4.0)
    assert (draws, accepted) == expected[:2] and temperature == expected[2]
    assert rows_of(graph, walk.sequence) == expected[3]
    assert rows_of(graph, walk.best_sequence) == expected[4]
    assert accepted > 0, "nothing was accepted: the case tests nothing"


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 10**6))
def test_prices_stay_true_and_orders_valid(seed):
    """After many moves of either phase, floats included, the checker agrees with what the walk holds."""
    problem = random_problem(seed, largest=5)
    graph, memory = build_graph(problem), bool(seed % 2)
    walk = new_walk(sequence_of(graph, paper_greedy(problem)), problem.nodes, seed + 1)
    set_price(tables_of(graph), walk)
    started = walk.current.copy()
    law = Law(memory, np.full(problem.nodes, np.inf), False, 0.0, 0.0, 0.9995, 1e-3, 1e-9, 1e-9)
    cool(tables_of(graph), walk, law, 4000, 3.0)
    for sequence, price in ((walk.sequence, walk.current), (walk.best_sequence, walk.best)):
        makespan, node_peaks = check(problem, [[graph.actions[o] for o in row] for row in rows_of(graph, sequence)])
        assert price[0] == pytest.approx(makespan)
        if memory:
            assert price[1] == pytest.approx(max(node_peaks)) and price[2] == pytest.approx(sum(node_peaks))
            assert price[0] <= started[0] + 1e-6, "the memory phase made the schedule slower"
    assert walk.best[1 if memory else 0] <= started[1 if memory else 0] + 1e-9


def test_a_cycle_is_seen():
    problem = table_3_problem(2, 2, 1, 1, 1, 1, 1, 1)
    graph = build_graph(problem)
    first, last = (graph.number[a] for a in paper_greedy(problem).orders[0] if a.pipeline == "actor")
    order = sequence_of(graph, paper_greedy(problem)).tolist()
    i, j = order.index(first), order.index(last)
    order[i], order[j] = last, first  # the backward before its own forward
    assert replay(tables_of(graph), new_walk(np.array(order), 2, 1)) == -1


def tiny(seed):
    rng = python_random.Random(seed)

    def times():
        return (rng.randint(1, 5), rng.randint(1, 5))

    actor = Pipeline("actor", "actor", (0, 1), 2, times(), times(), (2, 2))
    critic = Pipeline("critic", "critic", (1, 0), 1, times(), times(), (1.5, 1.5))
    return FusionProblem(2, (actor, critic), transfer=rng.choice([0, 1]))


def brute_force(problem):
    """Least (makespan, peak memory) over all pairs of node orders that finish."""
    graph, found = build_graph(problem), []
    nodes = [[o for o in range(graph.size) if graph.node[o] == n] for n in range(2)]
    orders = [[row for row in itertools.permutations(ops) if _in_order(graph, row)] for ops in nodes]
    for rows in itertools.product(*orders):
        makespan = compute_energy(graph, rows)
        if makespan is not None:
            found.append((makespan, max(peaks(graph, rows))))
    return min(found)


def _in_order(graph, row):
    """Whether micro-batches of each stage go in order, and a backward never before its forward."""
    for a, b in itertools.combinations([graph.actions[o] for o in row], 2):
        if (a.pipeline, a.stage) == (b.pipeline, b.stage):
            if a.microbatch > b.microbatch if a.kind == b.kind else a.microbatch == b.microbatch and a.kind == "B":
                return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_tiny_problems_are_solved(seed):
    problem = tiny(seed)
    schedule, report = search(problem, iterations=400_000, objective="memory", method="paper", paper=QUICK, seed=seed)
    makespan, node_peaks = check(problem, schedule.orders)
    assert (report.makespan, report.peak_memory) == (makespan, max(node_peaks)) == brute_force(problem)
    assert 0 < report.accepted < report.moves or report.moves == 0  # the start may be proved the best


def test_both_phases_improve_a_row_of_table_3():
    numbers, _, bound, *_ = TABLE_3[2]
    problem = table_3_problem(*numbers)
    start = evaluate(paper_greedy(problem))
    keys = []
    schedule, report = search(
        problem,
        iterations=1_000_000,
        objective="memory",
        method="paper",
        paper=QUICK,
        on_improved=lambda s, r: keys.append((r.makespan, r.peak_memory)),
    )
    assert keys[0] == (start.makespan, start.peak_memory), "the first schedule is the greedy one"
    assert keys == sorted(set(keys), reverse=True)
    assert report.makespan == bound and report.peak_memory < 0.8 * start.peak_memory
    assert check(problem, schedule.orders)[0] == bound


def test_iterations_repeat_and_streams_differ():
    problem = table_3_problem(*TABLE_3[2][0])
    quick = dict(iterations=150_000, method="paper", paper=QUICK)
    texts = [search(problem, seed=seed, **quick)[0].text() for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] != paper_greedy(problem).text()


def test_a_frozen_chain_begins_again_from_its_start():
    problem = table_3_problem(*TABLE_3[0][0])
    goal, starts = Goal(problem), paper_starts(problem)
    settings_ = PaperSettings(t0=1.0, alpha=0.99, eps=0.9)
    chain = PaperChain(build_graph(problem), goal, starts, 1, 0, settings_)
    best, words = starts[0], set()
    for _ in range(3):
        chain.round(best, 1000, 0.0)
        assert chain.temperature <= 0.9
        words.add(int(chain.walk.random[0]))
    assert chain.runs == 3 and len(words) == 3


def test_the_text_starts_at_the_energy_of_its_first_schedule():
    problem = table_3_problem(*TABLE_3[0][0])
    starts = paper_starts(problem)
    chain = PaperChain(build_graph(problem), Goal(problem), starts, 1, 0, PaperSettings(t0=None, alpha=0.5))
    chain.round(starts[0], 1, 0.0)
    assert chain.temperature in (starts[0].timeline.makespan, starts[0].timeline.makespan / 2)


def test_cap_is_kept_when_greedy_breaks_it():
    problem = replace(table_3_problem(*TABLE_3[2][0]), memory_cap=20)
    assert evaluate(paper_greedy(problem)).peak_memory > 20
    schedule, report = search(problem, iterations=200_000, method="paper", paper=QUICK)
    assert max(check(problem, schedule.orders)[1]) <= 20 + 1e-9
    assert report.makespan < min(entry.timeline.makespan for entry in paper_starts(problem) if entry.fits())


def test_start_given_is_s0():
    problem = table_3_problem(*TABLE_3[2][0])
    start = serial_1f1b(problem)
    assert [entry.schedule for entry in paper_starts(problem, start)] == [start, paper_greedy(problem)]


def test_a_problem_without_neighbours_ends():
    problem = FusionProblem(1, (Pipeline("a", "a", (0,), 1, (1,), (2,), (1,)),))
    chain = PaperChain(build_graph(problem), Goal(problem, "memory"), paper_starts(problem), 1, 0)
    assert chain.round(paper_starts(problem)[0], 500, 0.0).found is None


@pytest.mark.parametrize("row", range(12))
def test_table_3_facts_and_rules_agree(row):
    """The paper's greedy, 1F1B+ and serial columns follow from the settings; the printed ones are rounded."""
    setting, printed, traced = SETTINGS[row], PRINTED[row], TRACED[row]
    problem = setting.problem()
    rule, serial = evaluate(paper_greedy(problem)), serial_makespan(problem)
    assert (rule.makespan, rule.peak_memory) == (traced.greedy, traced.greedy_memory)
    assert (serial, serial_peak_memory(problem)) == (traced.serial, traced.serial_memory)
    assert latency_bound(problem) == traced.lower_bound
    assert serial / one_f_one_b_plus_makespan(setting) == pytest.approx(printed.one_f_one_b_plus, abs=0.01)
    assert serial / rule.makespan == pytest.approx(printed.greedy, abs=0.01)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_paper_greedy_is_valid_and_never_waits_for_nothing(seed):
    """On any problem: valid, and at time 0 some node works."""
    problem = random_problem(seed, largest=5)
    schedule = paper_greedy(problem)
    check(problem, schedule.orders)
    assert min(min(row) for row in evaluate(schedule).starts if row) == 0


@pytest.mark.parametrize(
    "values, message",
    [
        ({"alpha": 1.0}, "alpha=1.0 must be between 0 and 1"),
        ({"eps": 0}, "eps=0 must be above 0"),
        ({"t0": 1e-13}, "t0=1e-13 must be above eps"),
        ({"memory_t0": math.nan}, "memory_t0=nan"),
    ],
)
def test_settings_out_of_range_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        PaperSettings(**values)


def test_unknown_method_is_refused():
    with pytest.raises(InputError, match="method='tabu' must be one of default, paper"):
        search(tiny(0), iterations=1, method="tabu")
