"""One search of layouts in a process of its own: `planner_speed_search.py CONFIG RANKS` prints what it found.

It does what every rank of a job with `parallel: auto` does before there is a process group, and no more.
"""

from __future__ import annotations

import json
import sys

from rlhfuse.config.load import load_config, read_specs
from rlhfuse.planning.job import Job
from rlhfuse.planning.search.search import Ranking
from rlhfuse.planning.search.setting import Setting
from rlhfuse.planning.settle import settle_but_layouts
from rlhfuse.tools.program import run_program


def main() -> None:
    config = load_config(sys.argv[1])
    run = settle_but_layouts(Job(config, read_specs(config), int(sys.argv[2])))
    found = Ranking(Setting.of(run)).fastest(1)
    rows = [[row.table.text, row.seconds, dict(row.price.parts)] for row in found.rows]
    texts = str(found).splitlines()
    tables = found.training_rows * found.generation_rows
    counts = {"tables": tables, "drafted": found.drafted, "priced": found.priced}
    counts |= {"bound": found.bound, "reached": found.reached}
    print(json.dumps({**counts, "refused": found.refused, "rows": rows, "lines": texts}, indent=1))


if __name__ == "__main__":
    run_program(main)
