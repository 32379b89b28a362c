"""One search of layouts in a process of its own: `planner_speed_search.py CONFIG RANKS` prints what it found.

It does what every rank of a job with `parallel: auto` does before there is a process group, and no more.
"""

from __future__ import annotations

import json
import sys

from rlhfuse.base.errors import run_program
from rlhfuse.config.load import load_config
from rlhfuse.planning.draft import read_specs
from rlhfuse.planning.search.resolve import resolve_layouts


def main() -> None:
    config = load_config(sys.argv[1])
    made = resolve_layouts(config, read_specs(config), int(sys.argv[2]))
    found = made.found
    assert found is not None, "layouts of the configuration are auto"
    rows = [[row.table.text, row.seconds, dict(row.price.parts)] for row in found.rows]
    texts = [*made.lines[:1], *str(found).splitlines()]
    tables = found.training_rows * found.generation_rows
    counts = {"tables": tables, "drafted": found.drafted, "priced": found.priced, "bound": found.bound}
    print(json.dumps({**counts, "refused": found.refused, "rows": rows, "lines": texts}, indent=1))


if __name__ == "__main__":
    run_program(main)
