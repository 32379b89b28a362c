"""How the ranks of a job agree on its plan over the launcher's store, before there is a process group.

Every rank posts what it found: its machine, and digests of what must be equal. Rank 0 compares them, plans for the
smallest machine and posts the text of the plan. A rank that fails posts its error, which ends all ranks with one line.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import date
from typing import Any

from torch.distributed.distributed_c10d import Store

from rlhfuse.base.errors import InputError, JointError
from rlhfuse.base.launcher import ranks_per_node
from rlhfuse.costs.machine import Host
from rlhfuse.planning.job import Job
from rlhfuse.planning.plan import Plan
from rlhfuse.planning.planning_process import PlanningProcess
from rlhfuse.run.preflight import Planner

SHOWN = 3  # differences, and ranks that differ, in a message
LOOK_SECONDS = 0.05  # between looks at the store
FAILED, ERROR = "failed", "error"  # of a rank, by which rank 0 ends; of rank 0, by which the others do


class Handshake(Planner):
    """The planner of one rank of a job of several."""

    def __init__(self, store: Store, rank: int, world_size: int, patience_seconds: float) -> None:
        """`patience_seconds`: how long rank 0 waits for the others, and these for a plan."""
        self._store, self._rank, self._world_size = store, rank, world_size
        self._planning = None if rank else PlanningProcess()
        self._patience = patience_seconds

    def day(self) -> str:
        """Rank 0's day, which chat templates of all ranks write."""
        if self._rank == 0:
            self._store.set("day", date.today().isoformat())
        return self._wait(["day"])[0]

    @contextmanager
    def joint(self) -> Iterator[None]:
        """All ranks leave the block, or an InputError of one of them ends all with a line that names the rank.

        Raises JointError where another rank failed.
        """
        try:
            yield
            self._store.set(f"ready/{self._rank}", "")
            if self._rank:
                self._wait(["start"])
            else:
                self._wait([f"ready/{rank}" for rank in range(self._world_size)])
                self._store.set("start", "")
        except InputError as error:
            if self._rank == 0:
                self._store.set(ERROR, str(error))
            elif not isinstance(error, JointError):
                self._store.compare_set(FAILED, "", f"rank {self._rank}: {error}")
                self._wait([ERROR])  # raises it
            raise
        finally:
            if self._planning:
                self._planning.close()

    def check(self, job: Job) -> None:
        if self._planning:
            self._planning.check(job)

    def plan(self, job: Job) -> Plan:
        """Rank 0's plan, on every rank. Raises JointError for ranks that found different inputs."""
        self._store.set(f"found/{self._rank}", json.dumps({"host": asdict(job.host), "facts": facts_of(job)}))
        if self._planning is None:
            return Plan.parse(self._wait(["plan"])[0])
        found = [json.loads(text) for text in self._wait([f"found/{rank}" for rank in range(self._world_size)])]
        if differs := difference([one["facts"] for one in found]):
            raise InputError(differs)
        hosts = [Host(**one["host"]) for one in found]
        least = Host.least(hosts)
        if len({host.gpu if job.device == "cuda" else host for host in hosts}) > 1:
            print(f"machines differ: planning for the smallest of each resource, {least}", flush=True)
        plan = self._planning.plan(replace(job, host=least))
        self._store.set("plan", plan.to_text())
        return plan

    def _wait(self, keys: list[str]) -> list[str]:
        """Values of keys that other ranks set. Raises JointError for a rank's error, or TimeoutError."""
        until, failure = time.monotonic() + self._patience, ERROR if self._rank else FAILED
        while not self._store.check(keys):
            if self._store.check([failure]):
                raise JointError(self._store.get(failure).decode())
            if time.monotonic() > until:
                missing = [key for key in keys if not self._store.check([key])]
                raise TimeoutError(f"waited {self._patience:g} s for {', '.join(missing[:SHOWN])}")
            time.sleep(LOOK_SECONDS)
        if keys == [ERROR]:
            raise JointError(self._store.get(ERROR).decode())
        return [self._store.get(key).decode() for key in keys]


def facts_of(job: Job) -> dict[str, str]:
    """What all ranks must have in common, by name: code, settings, and digests of files."""
    return {
        "the version of rlhfuse": importlib.metadata.version("rlhfuse"),
        "the device": job.device,
        "ranks of a machine": str(ranks_per_node()),
        **{key: str(value) for key, value, _ in job.config.leaves()},
        **{f"the shape of the {role}": _digest(spec) for role, spec in job.specs.items()},
        "tokens of the longest prompt": str(job.longest_prompt),
        "the checkpoint": _digest((job.stored, job.recent)),
    }


def difference(ranks: Sequence[Mapping[str, str]]) -> str:
    """A line on the ranks whose facts differ from those of rank 0; '' where none do."""
    first, others = ranks[0], []
    for rank, facts in enumerate(ranks):
        if other := [name for name in first if facts.get(name) != first[name]]:
            named = ", ".join(f"{name} {facts.get(name)}, not {first[name]}" for name in other[:SHOWN])
            more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
            others.append(f"rank {rank}: {named}{more}")
    if not others:
        return ""
    listed = "; ".join(others[:SHOWN]) + (f"; and {len(others) - SHOWN} more ranks" if len(others) > SHOWN else "")
    return f"inputs differ from those of rank 0: {listed}; start all ranks from the same files"


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
