"""The best tables of a search with schedules that were annealed, shared out over the ranks of an MPI job.

What is found is kept in the library of schedules, so that a run with such a table begins with it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from mpi_ranks import MpiRanks

from rlhfuse.planning.price import minibatch_seconds, with_schedules
from rlhfuse.planning.search.search import FastestTables, Row
from rlhfuse.planning.search.setting import Setting
from rlhfuse.planning.training.schedule_family import schedule_family
from rlhfuse.planning.training.training_problem import TICK_SECONDS
from rlhfuse.schedule.ir.evaluate import evaluate


def annealed(fastest: FastestTables, setting: Setting, seconds: float, ranks: MpiRanks) -> FastestTables:
    """The tables with schedules that ranks anneal for so many seconds, of those that may become the fastest by it; the
    same on every rank. A line on stderr tells of each."""
    rows = [row for row in fastest.rows if row.bound < fastest.best.seconds]

    def work(row: Row, comm: Any) -> Row:
        made = with_annealed_schedules(row, setting, seconds, comm)
        if comm is None or comm.Get_rank() == 0:
            told = f"table {fastest.rows.index(row) + 1}: {row.seconds:.4g} s by rule, {made.seconds:.4g} s annealed"
            print(told, file=sys.stderr, flush=True)
        return made

    made = {row.table: row for row in ranks.shared(rows, work)}
    every = (made.get(row.table, row) for row in fastest.rows)
    return replace(fastest, rows=tuple(sorted(every, key=lambda row: (row.seconds, row.table.text))))


def with_annealed_schedules(row: Row, setting: Setting, seconds: float, comm: Any = None) -> Row:
    """With the schedules of all mini-batches that are drawn, which share the seconds; never slower than `row`."""
    draft = setting.draft(row.table)
    config, training = draft.run.config, draft.training
    fusion = config.with_(fusion={"search_seconds": seconds}).fusion
    family = fusion, config.trainer.seed, training.problems, training.shares, draft.ranks.shape
    schedules, _ = schedule_family(*family, comm=comm, passing=draft.memory.passing)
    ticks = {rung: float(evaluate(schedule).makespan) for rung, schedule in schedules.items()}
    minibatch = minibatch_seconds(draft, lambda rung: ticks[rung] * TICK_SECONDS)
    held = draft.memory.held_by(*schedules.values())
    found = with_schedules(draft, row.price.generation, row.price.moves, minibatch, held)
    price = min(row.price, found, key=lambda price: price.seconds)
    fullest = draft.memory.fullest(price.activations)
    filled = {"fullest": fullest, "needed_bytes": draft.memory.needed(fullest)}
    return replace(row, price=price, bound=min(row.bound, price.seconds), by_rule=row.seconds, **filled)
