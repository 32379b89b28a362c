"""Host cost of a layer of 8B as counts of calls, operators and launches on a null CUDA device; no clock."""

import json

from testkit.paths import ROOT

MOST = {
    **{"forward Python calls": 45, "forward C calls": 48, "forward operators": 20, "forward launches": 9},
    **{"backward Python calls": 69, "backward C calls": 53, "backward operators": 21, "backward launches": 19},
}


def test_a_layer_costs_no_more_calls_operators_and_launches_than_it_did(programs):
    stages = []
    for layers in (2, 4):
        done = programs.python(ROOT / "benchmarks" / "layer_host_side.py", ROOT, str(layers), "--counts")
        assert done.returncode == 0, done.stderr[-4000:]
        stages.append(json.loads(done.stdout.splitlines()[-1]))
    found = {name: (stages[1][name] - count) / 2 for name, count in stages[0].items()}
    assert found.keys() == MOST.keys() and all(found[name] <= most for name, most in MOST.items()), (found, MOST)
    assert all(found[name] > 0.8 * most for name, most in MOST.items()), "less than it was: lower the limits"
