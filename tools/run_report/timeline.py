"""The time line of generation and inference of one batch: who does what from when to when, and the migration plan.

Block rounding, prefill chunks mixed with decode steps, what copies of one prompt share, and the store's round trips
are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfuse.costs.table import CostTable
from rlhfuse.fusion.inter.report import CALLS
from rlhfuse.simulator.instance_kernel import State
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.simulation import Simulation
from rlhfuse.tasks.instance_limits import InstanceLimits
from rlhfuse.tasks.migration import MigrationPlan, SampleMove

KINDS = ("generate", "meet", "migrate", "swap_in", "score")  # as the kernel counts them


@dataclass(frozen=True)
class InstanceSpan:
    """What one instance does from `start` to `end`, in seconds of the iteration."""

    instance: int
    kind: str  # one of KINDS, reward or idle
    start: float
    end: float


@dataclass(frozen=True)
class GenInferTimeline:
    """One batch simulated; `spans` tile [0, total_seconds] of every instance."""

    spans: tuple[InstanceSpan, ...]
    sample_seconds: tuple[float, ...]  # when each sample is finished
    total_seconds: float
    migration_seconds: float = 0.0  # from the trigger until every destination decodes again
    trigger_seconds: float | None = None  # when the plan was agreed on
    plan: MigrationPlan | None = None  # None where it stayed serial
    migrated_bytes: float = 0.0
    scored_before_generation_end: int = 0
    reward_seconds: float = 0.0  # from the last score until the reward function is done too

    @property
    def generation_seconds(self) -> float:
        """Until the last sample is finished."""
        return max(self.sample_seconds)


def simulate_gen_infer(
    lengths: SampleLengths, instances: int, costs: CostTable, limits: InstanceLimits, threshold: int
) -> GenInferTimeline:
    """One batch that migrates when `threshold` samples remain; 0, one instance, no tail: serial. Raises InputError."""
    outcome, state, rows = Simulation([lengths], instances, costs, limits).trace(threshold)
    generation, total = float(outcome["generation"]), float(outcome["total"])
    plan = _plan(state) if state.samples["tail"].any() else None
    scored = rows[(rows["end"] <= generation) & (rows["instance"] % limits.instances_per_worker == 0)]
    spans = [
        InstanceSpan(int(row["instance"]), KINDS[row["kind"]], float(row["start"]), float(row["end"])) for row in rows
    ]
    for instance, end in enumerate(state.instances["rewarded"].tolist()):
        own = max(span.end for span in spans if span.instance == instance)
        spans.append(InstanceSpan(instance, CALLS, max(own, generation), end))
    return GenInferTimeline(
        spans=_tile(spans, instances, total),
        sample_seconds=tuple(state.samples["ended"].tolist()),
        total_seconds=total,
        migration_seconds=float(outcome["migration"]),
        trigger_seconds=float(outcome["agreed"]) if plan else None,
        plan=plan,
        migrated_bytes=int(state.samples["kv_tokens"].sum()) * limits.kv_bytes_per_token,
        scored_before_generation_end=int(scored["samples"].sum()) if plan else 0,
        reward_seconds=total - float(outcome["scored"]),
    )


def _plan(state: State) -> MigrationPlan:
    """What was decided at the migration."""
    places, moves, stays = state.instances["place"], [], []
    for i in np.flatnonzero(state.samples["tail"]).tolist():
        home, at, kv_tokens = (int(state.samples[i][name]) for name in ("home", "at", "kv_tokens"))
        if home == at:
            stays.append(i)
        else:
            moves.append(SampleMove(i, home, at, "kv" if kv_tokens else "tokens", kv_tokens))
    return MigrationPlan(
        destinations=tuple(np.flatnonzero(places >= 0).tolist()),
        freed=tuple(np.flatnonzero(places < 0).tolist()),
        moves=tuple(sorted(moves, key=lambda move: (move.destination, move.source, move.sample_id))),
        stays=tuple(stays),
    )


def _tile(spans: Sequence[InstanceSpan], instances: int, total: float) -> tuple[InstanceSpan, ...]:
    """Spans by instance and time, gaps filled with idle, empty ones left out."""
    by_instance: list[list[InstanceSpan]] = [[] for _ in range(instances)]
    for span in spans:
        if span.end > span.start:
            by_instance[span.instance].append(span)
    tiled = []
    for instance, own in enumerate(by_instance):
        clock = 0.0
        for span in sorted(own, key=lambda s: s.start):
            if span.start > clock:
                tiled.append(InstanceSpan(instance, "idle", clock, span.start))
            tiled.append(span)
            clock = span.end
        if clock < total:
            tiled.append(InstanceSpan(instance, "idle", clock, total))
    return tuple(tiled)
