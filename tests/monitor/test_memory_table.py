"""Planned beside measured memory: what is compared with what, by hand."""

import pytest

from rlhfuse.monitor.memory_table import MemoryTable

GB = 10**9
EMPTY = dict(weights=0, optimizer=0, gradients=0, activations=0, kv=0, buckets=0, host=0)
PLAN = {
    "memory": {
        "own_memory": False,
        "process_bytes": GB,
        "microbatch_tokens": 1000.0,
        "phases": [
            {"phase": "moves", **EMPTY, "weights": 2 * GB, "buckets": GB, "host": GB},
            {"phase": "training", **EMPTY, "weights": GB, "activations": 4 * GB, "host": GB},
        ],
    }
}


def line(iteration: int, moves: float, training: float, tokens: int, base: float = 1.25) -> dict:
    peaks = {"base": base, "moves": moves, "training": training}
    named = {f"perf/peak_memory_gb/{phase}": value for phase, value in peaks.items()}
    return {"iteration": iteration, "perf/microbatch_tokens": tokens, **named}


def test_each_phase_shows_its_fullest_iteration_after_warm_up():
    metrics = [line(0, 9.0, 9.0, 900), line(1, 5.0, 4.0, 250), line(2, 4.0, 5.0, 500)]
    process, moves, training = MemoryTable.of(PLAN, metrics).rows
    assert (process.planned, process.expected, process.measured) == (GB, GB, 1.25 * GB)
    assert (moves.planned, moves.expected, moves.measured) == (5 * GB, 5 * GB, 5 * GB) and moves.error == 0
    assert (training.planned, training.expected, training.measured) == (7 * GB, 5 * GB, 5 * GB)  # half the tokens
    table = MemoryTable.of(PLAN, metrics)
    assert table.to_dict()["phases"][0]["error"] == pytest.approx(-0.2)
    assert "training               6.519 GiB 4.657 GiB 4.657 GiB   +0.0%" in table.text()


def test_on_a_gpu_neither_the_process_nor_host_copies_count():
    plan = {"memory": {**PLAN["memory"], "own_memory": True}}
    moves, training = MemoryTable.of(plan, [line(0, 3.0, 5.0, 1000)]).rows
    assert moves.planned == 3 * GB and training.planned == training.expected == 5 * GB


def test_a_run_that_says_nothing_of_memory_has_no_table():
    assert MemoryTable.of(None, [line(0, 1, 1, 1)]) is None
    assert MemoryTable.of({"seconds": {}}, [line(0, 1, 1, 1)]) is None
    assert MemoryTable.of(PLAN, [{"iteration": 0}]) is None
