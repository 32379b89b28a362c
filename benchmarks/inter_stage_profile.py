"""What work costs on an instance while the other one is idle, decodes, or scores: rows as measured, and costs.

Knows nothing of processes or of torch.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inter_stage_cases import BLOCK_TOKENS

from rlhfuse.costs.analytic import NEIGHBOURS
from rlhfuse.costs.grid import Grid
from rlhfuse.costs.profiled import ProfiledCost

SCORERS = "scorers"  # all models that score together: they are measured as one

Rows = Mapping[str, Sequence[Sequence[float]]]  # by kind of work


def nearest_context(batch: float, context_tokens: float) -> int:
    """Tokens of one sequence, rounded to blocks: the steps of one measurement count as one point."""
    return BLOCK_TOKENS * round(context_tokens / batch / BLOCK_TOKENS)


def grid_of(rows: Sequence[Sequence[float]]) -> Grid:
    """From rows [count, seconds] or [count, count, seconds]."""
    found: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for *counts, seconds in rows:
        found[tuple(counts)].append(seconds)
    axes = [sorted(set(values)) for values in zip(*found)]
    return Grid.of(axes, {counts: statistics.median(seconds) for counts, seconds in found.items()})


def in_order(item: tuple[tuple[str, str, tuple], Any]) -> tuple:
    kind, neighbour, label = item[0]
    return kind, label, NEIGHBOURS.index(neighbour)


@dataclass(frozen=True)
class Profile:
    """`beside[neighbour]` holds rows [counts ..., seconds]; `migration` rows [bytes, seconds]."""

    beside: Mapping[str, Rows]
    migration: Sequence[Sequence[float]]

    @staticmethod
    def of(answers: Sequence[tuple[str, Rows]], migration: Sequence[Sequence[float]]) -> Profile:
        """From (neighbour, rows) of each time that a rank was measured."""
        beside: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
        for neighbour, rows in answers:
            for kind, found in rows.items():
                beside[neighbour][kind] += found
        return Profile({neighbour: dict(kinds) for neighbour, kinds in beside.items()}, migration)

    def fit(self) -> ProfiledCost:
        """Medians of what was measured at the same counts, and what lies between them."""
        by_context = {name: [(b, nearest_context(b, c), s) for b, c, s in rows] for name, rows in self._rows("decode")}
        return ProfiledCost(
            made_for={f"{SCORERS}_inference_tp": 1, "generation_tp": 1},
            decode={name: grid_of(rows) for name, rows in by_context.items()},
            prefill={name: grid_of(rows) for name, rows in self._rows("prefill")},
            score={SCORERS: {name: grid_of(rows) for name, rows in self._rows("score")}},
            swap_in=statistics.median(row[0] for _, rows in self._rows("load") for row in rows),
            move=grid_of(self.migration),
            all_reduce=None,
            training={},
        )

    def _rows(self, kind: str) -> list[tuple[str, Sequence[Sequence[float]]]]:
        return [(neighbour, kinds[kind]) for neighbour, kinds in self.beside.items()]

    def table(self, costs: ProfiledCost) -> list[dict[str, Any]]:
        """Each piece of work: its counts, the neighbour, median seconds and what the fit says."""
        found: dict[tuple, list[tuple[Sequence[float], float]]] = defaultdict(list)
        for neighbour, kinds in self.beside.items():
            for kind in ("decode", "prefill", "score"):
                for *counts, seconds in kinds[kind]:
                    # the context grows from step to step: those of one batch and nearly one context are one row
                    label = (counts[0], nearest_context(*counts)) if kind == "decode" else tuple(counts)
                    found[kind, neighbour, label].append((counts, seconds))
        rows = []
        for (kind, neighbour, _), measured in sorted(found.items(), key=in_order):
            counts = [statistics.mean(values) for values in zip(*(counts for counts, _ in measured))]
            beside = costs.beside(neighbour)
            price = {
                "decode": beside.decode_step_seconds,
                "prefill": beside.prefill_seconds,
                "score": beside.score_seconds,
            }[kind]
            seconds = statistics.median(seconds for _, seconds in measured)
            row = {"work": kind, "beside": neighbour, "counts": counts, "seconds": seconds}
            rows.append(row | {"fit": price(*counts)})
        return rows

    def step_ratio(self, batch: int) -> dict[str, float]:
        """A decode step of `batch` sequences over one of a single sequence, both at their shortest context."""
        return {
            neighbour: self._step(kinds["decode"], batch) / self._step(kinds["decode"], 1)
            for neighbour, kinds in self.beside.items()
        }

    @staticmethod
    def _step(rows: Sequence[Sequence[float]], batch: int) -> float:
        contexts = [context for size, context, _ in rows if size == batch]
        near = [s for size, context, s in rows if size == batch and context <= 2 * min(contexts)]
        return statistics.median(near)
