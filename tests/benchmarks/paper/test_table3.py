"""Table 3's columns that no search makes follow from its settings; printed figures are rounded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper.greedy import paper_greedy
from paper.table3 import PRINTED, SETTINGS, TRACED, one_f_one_b_plus_makespan
from schedule_cases import check, random_problem

from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.rules.builders import serial_makespan, serial_peak_memory


@pytest.mark.parametrize("row", range(12))
def test_table_3_facts_and_rules_agree(row):
    setting, printed, traced = SETTINGS[row], PRINTED[row], TRACED[row]
    problem = setting.problem()
    greedy, serial = evaluate(paper_greedy(problem)), serial_makespan(problem)
    assert (greedy.makespan, greedy.peak_memory) == (traced.greedy, traced.greedy_memory)
    assert (serial, serial_peak_memory(problem)) == (traced.serial, traced.serial_memory)
    assert latency_bound(problem) == traced.lower_bound
    assert serial / one_f_one_b_plus_makespan(setting) == pytest.approx(printed.one_f_one_b_plus, abs=0.01)
    assert serial / greedy.makespan == pytest.approx(printed.greedy, abs=0.01)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_paper_greedy_is_valid_and_starts_at_once(seed):
    problem = random_problem(seed, largest=5)
    schedule = paper_greedy(problem)
    check(problem, schedule.orders)
    assert min(min(row) for row in evaluate(schedule).starts if row) == 0
