"""A long training stays as it began: memory, open files and threads of every rank, time of every iteration.

The ranks are looked at from outside whenever a line of metrics.jsonl is there; the first iterations are left out.
Responses change as the policy learns, so times are fitted by a line at equal tokens.
"""

import json
import statistics
import time

import numpy as np
import psutil
import pytest
from testkit.paths import ROOT
from testkit.programs import finish, ranks_of

RANKS, ITERATIONS, WARM_UP = 4, 300, 20
WINDOW = 5  # iterations of a median: memory depends on where in its iteration a rank is
GROWTH, SLOPE = 1.05, 1.0  # the most of the least memory; % per 100 iterations


def windows(values: list[int], width: int) -> list[int]:
    return [statistics.median_low(values[i : i + width]) for i in range(0, len(values) - width + 1, width)]


def steepest(values: dict[int, float], tokens: dict[int, float]) -> float:
    """The most that values grow at equal tokens, at two standard errors: % of their mean per 100 iterations."""
    x = np.asarray([[1.0, i, tokens[i]] for i in values], dtype=float)
    y = np.asarray(list(values.values()), dtype=float)
    x[:, 1:] -= x[:, 1:].mean(axis=0)
    inverse = np.linalg.pinv(x.T @ x)  # of equal tokens in all iterations too
    fitted = inverse @ x.T @ y
    rest = y - x @ fitted
    error = np.sqrt(rest @ rest / (len(y) - np.linalg.matrix_rank(x)) * inverse[1, 1])
    return float((fitted[1] + 2 * error) * 100 * 100 / y.mean())


def look(launcher: int) -> dict[int, dict[str, float]]:
    """Every rank as it is; one that has just ended is left out."""
    found = {}
    for rank, pid in ranks_of(launcher).items():
        try:
            one = psutil.Process(pid)
            used = one.cpu_times()
            found[rank] = {"memory": one.memory_info().rss, "files": one.num_fds(), "threads": one.num_threads()}
            found[rank]["cpu"] = used.user + used.system
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
def test_a_long_training_stays_as_it_began(programs, tmp_path):
    metrics, looks = tmp_path / "run" / "metrics.jsonl", {}
    settings = f"trainer.iterations={ITERATIONS} trainer.export=false trainer.output_dir={metrics.parent}".split()
    launcher = programs.train(ROOT / "examples" / "quickstart.yaml", *settings, ranks=RANKS)
    while launcher.poll() is None:
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if lines and lines - 1 not in looks:
            looks[lines - 1] = look(launcher.pid)
        time.sleep(0.05)
    finish(launcher)
    whole = {i: seen for i, seen in looks.items() if i >= WARM_UP and len(seen) == RANKS}
    for rank in range(RANKS):
        each = {name: [seen[rank][name] for seen in whole.values()] for name in ("memory", "files", "threads")}
        memory = windows(each["memory"], WINDOW)
        assert max(memory) <= GROWTH * min(memory), (rank, memory)
        for name in ("files", "threads"):  # which come and go within an iteration
            assert len(set(windows(each[name], len(whole) // 2))) == 1, (rank, name, each[name])
    rows = {row["iteration"]: row for row in map(json.loads, metrics.read_text().splitlines())}
    tokens = {i: sum(row["lengths/output"]) for i, row in rows.items()}
    cpu = {i: sum(one["cpu"] for one in seen.values()) for i, seen in whole.items()}
    cpu = {i: used - cpu[i - 1] for i, used in cpu.items() if i - 1 in cpu}
    seconds = {i: row["timing_s/step"] for i, row in rows.items() if i >= WARM_UP}
    assert max(steepest(cpu, tokens), steepest(seconds, tokens)) <= SLOPE


def test_slopes_are_free_of_tokens():
    rng = np.random.default_rng(0)
    tokens = {i: 1000 * 0.98**i + rng.uniform(0, 50) for i in range(100)}
    slower = {i: 1 + 0.002 * count + 0.003 * i for i, count in tokens.items()}
    assert steepest(slower, tokens) == pytest.approx(30 / statistics.mean(slower.values()))
    assert steepest({i: 2.0 + 0.1 * (i % 2) for i in tokens}, tokens) > 0
