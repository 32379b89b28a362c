"""Roles and tasks are data: outside of the configuration and their tables few lines name one."""

import re
from collections import Counter

from testkit.paths import ROOT

NAMES = re.compile(
    r"""Role\.(ACTOR|CRITIC|REFERENCE|REWARD)|["'](actor|critic|reference|reward)(_train|_inference)?["']"""
)
# file -> lines that name a role or a task, at most, and why
ALLOWED = {
    "rlhfuse/fusion/inter/report.py": (1, "a kind of spans and observations: calls of reward functions"),
    "rlhfuse/ppo/token_rewards.py": (1, "a place of the KL"),
    "rlhfuse/run/python_entry.py": (1, "a key of the configuration"),
    "tools/gpu_checks/bench.py": (1, "the folder of a model"),
    "tools/gpu_checks/programs.py": (3, "keys of the configuration"),
    "tools/run_report/report.py": (1, "a key of the configuration"),
    "tools/run_report/charts.py": (1, "labels of metrics"),
    "tools/placements": (9, "placements of an iteration with these tasks"),
}


def test_few_lines_name_a_role_or_a_task():
    found: Counter[str] = Counter()
    for file in (*ROOT.glob("rlhfuse/**/*.py"), *ROOT.glob("tools/**/*.py")):
        path = str(file.relative_to(ROOT))
        if not path.startswith(("rlhfuse/config/", "rlhfuse/tasks/")):
            place = next((known for known in ALLOWED if path.startswith(known)), path)
            found[place] += sum(NAMES.search(line) is not None for line in file.read_text().splitlines())
    assert sum(found.values()) <= 20
    most = Counter({place: lines for place, (lines, _) in ALLOWED.items()})
    assert not found - most, "more than are allowed"
    assert all(map(NAMES.search, ('"critic"', "'actor_train'"))) and not NAMES.search('"generation" "actors"')
