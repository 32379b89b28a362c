"""What work costs on an instance while the other one is idle, decodes, or scores: rows as measured, and their fit.

Knows nothing of processes or of torch.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from rlhfuse.simulator.cost import NEIGHBOURS
from rlhfuse.simulator.measured import BytesObservation, DecodeObservation, MeasuredCost, TokensObservation

Rows = Mapping[str, Sequence[Sequence[float]]]  # by kind of work


def in_order(item: tuple[tuple[str, str, tuple], Any]) -> tuple:
    kind, neighbour, label = item[0]
    return kind, label, NEIGHBOURS.index(neighbour)


@dataclass(frozen=True)
class Profile:
    """`beside[neighbour]` holds rows [counts ..., seconds]; `migration` rows [bytes, seconds]."""

    beside: Mapping[str, Rows]
    migration: Sequence[Sequence[float]]

    @staticmethod
    def of(answers: Sequence[tuple[str, Rows]], migration: Sequence[Sequence[float]]) -> "Profile":
        """From (neighbour, rows) of each time that a rank was measured."""
        beside: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
        for neighbour, rows in answers:
            for kind, found in rows.items():
                beside[neighbour][kind] += found
        return Profile({neighbour: dict(kinds) for neighbour, kinds in beside.items()}, migration)

    def fit(self) -> MeasuredCost:
        def rows(kind: str) -> list[tuple[str, Sequence[float]]]:
            return [(neighbour, row) for neighbour, kinds in self.beside.items() for row in kinds[kind]]

        return MeasuredCost.fit(
            decode=[DecodeObservation(int(b), int(c), s, neighbour) for neighbour, (b, c, s) in rows("decode")],
            prefill=[TokensObservation(int(t), int(n), s, neighbour) for neighbour, (t, n, s) in rows("prefill")],
            score=[TokensObservation(int(t), int(n), s, neighbour) for neighbour, (t, n, s) in rows("score")],
            migration=[BytesObservation(int(b), s) for b, s in self.migration],
            swap_in=[row[0] for _, row in rows("load")],
        )

    def table(self, costs: MeasuredCost) -> list[dict[str, Any]]:
        """Each piece of work: its counts, the neighbour, median seconds and what the fit says."""
        found: dict[tuple, list[tuple[Sequence[float], float]]] = defaultdict(list)
        for neighbour, kinds in self.beside.items():
            for kind in ("decode", "prefill", "score"):
                for *counts, seconds in kinds[kind]:
                    # the context grows from step to step: those of one batch and nearly one context are one row
                    label = (counts[0], round(counts[1] / counts[0] / 64)) if kind == "decode" else tuple(counts)
                    found[kind, neighbour, label].append((counts, seconds))
        rows = []
        for (kind, neighbour, _), measured in sorted(found.items(), key=in_order):
            counts = [statistics.mean(values) for values in zip(*(counts for counts, _ in measured))]
            line = getattr(costs, kind).beside(neighbour)
            seconds = statistics.median(seconds for _, seconds in measured)
            rows.append({"work": kind, "beside": neighbour, "counts": counts, "seconds": seconds, "fit": line(*counts)})
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
