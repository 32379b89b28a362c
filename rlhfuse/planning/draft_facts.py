"""What the drafts of a run's ranks must have in common: named facts, so that a rank that plans otherwise is told apart.

Each rank drafts from its own files and machine, and executes its part of the plan that rank 0 makes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from rlhfuse.planning.draft import PlanDraft

SHOWN = 3  # facts of a rank that are told


def draft_facts(draft: PlanDraft) -> dict[str, str]:
    """By name: machine, settings by their keys, and digests of what the files that they name hold."""
    config, hardware, limits = draft.config, draft.inputs.hardware, draft.generation.limits
    return {
        "the device": config.trainer.device,
        "the GPU": draft.run.host.gpu or "none",
        "the hardware planned for": hardware.name,
        "ranks of a machine": str(hardware.devices_per_node),
        "cores of the machine": f"{draft.inputs.cores.count:g}",
        "memory of a rank": f"{draft.memory.limit / 2**30:.6g} GiB",
        **{key: str(value) for key, value, _ in config.leaves()},
        **{f"the shape of the {role}": _digest(repr(spec)) for role, spec in draft.specs.items()},
        "past lengths": _digest(repr(draft.inputs.lengths.samples)),
        "costs": _digest(repr((limits, hardware))),
        "the training problems": _digest(json.dumps([problem.to_dict() for problem in draft.problems.values()])),
    }


def difference(ranks: Sequence[dict[str, str]]) -> str:
    """A line on the ranks that differ from rank 0, by their `draft_facts`; '' where none does."""
    first, others = ranks[0], []
    for rank, facts in enumerate(ranks):
        if other := [name for name in first if facts.get(name) != first[name]]:
            named = ", ".join(f"{name} {facts.get(name)}, not {first[name]}" for name in other[:SHOWN])
            more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
            others.append(f"rank {rank}: {named}{more}")
    if not others:
        return ""
    listed = "; ".join(others[:SHOWN]) + (f"; and {len(others) - SHOWN} more ranks" if len(others) > SHOWN else "")
    return f"ranks plan otherwise than rank 0: {listed}; start all ranks from the same files, on machines of one kind"


def _digest(value: Any) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:8]
