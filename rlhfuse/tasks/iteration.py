"""One iteration as a table: who computes what, on which ranks, from what, and in which order.

Calls stand in blocks of one total order. Every rank walks the blocks that it has calls in; one executor runs the calls
of a block at once. A table that `verify` accepts cannot hang: a block waits for earlier blocks alone, and within a
block only workers and meetings wait, for calls that never wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby, zip_longest
from typing import Literal

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import LayoutText, ParallelLayout
from rlhfuse.tasks.mesh import Mesh, MeshText
from rlhfuse.tasks.task import DESTINATIONS, TASKS

Kind = Literal["generate", "score", "train", "move", "host", "meet"]
Unit = Literal["sample", "group", "minibatch", "batch"]


@dataclass(frozen=True)
class Take:
    """An input of a call: the `field` that the call `giver` gives, `lag` iterations before.

    `unit`: the part that must be complete before the taker begins on it. In the first `lag` iterations the input is
    whatever the run starts with, such as weights from files.
    """

    field: str
    giver: str
    unit: Unit = "batch"
    lag: int = 0

    def __str__(self) -> str:
        unit = f" by {self.unit}" if self.unit != "batch" else ""
        return f"{self.field} of {self.giver}{unit}" + (f", lag {self.lag}" if self.lag else "")


@dataclass(frozen=True)
class Call:
    """One row of an iteration.

    `role`: the model, empty for host work. `layout`: how the model lies on `mesh`. `worker`: 0 where all ranks of the
    mesh enter together; otherwise every `worker` ranks of it, in order, form a worker, which serves once all of them
    are free. `on_turn`: left out of some iterations, on all ranks alike. A `meet` comes last in its block.
    """

    name: str
    kind: Kind
    block: str
    mesh: MeshText
    role: str = ""
    layout: LayoutText | None = None
    worker: int = 0
    takes: tuple[Take, ...] = ()
    gives: tuple[str, ...] = ()
    on_turn: bool = False

    @property
    def phase(self) -> int:
        """Order within the block: 0 for calls that all ranks enter together, 1 for workers, 2 for meetings."""
        return 2 if self.kind == "meet" else 1 if self.worker else 0

    def faults(self, world_size: int) -> Iterator[str]:
        """Faults of the row itself."""
        if self.mesh[0] < 0 or self.mesh[-1] >= world_size:
            yield f"runs on ranks {self.mesh}, but there are ranks 0-{world_size - 1}"
        if self.layout and self.layout.size != len(self.mesh):
            yield f"layout {self.layout} has {self.layout.size} ranks, its mesh {self.mesh} has {len(self.mesh)}"
        if self.worker and (self.worker < 0 or len(self.mesh) % self.worker):
            yield f"workers of {self.worker} ranks do not divide the {len(self.mesh)} ranks of its mesh"
        if self.worker and self.kind in ("generate", "move", "meet"):
            yield f"all ranks of a {self.kind} enter together; drop its workers"
        if len({*self.gives}) < len(self.gives):
            yield "gives a field twice"

    def fault_beside(self, other: Call) -> str:
        """The fault of this row together with an earlier one of its block, or ''."""
        if self.on_turn != other.on_turn:
            return f"runs in other iterations than {other.name} of its block"
        if self.phase != other.phase or {*self.mesh}.isdisjoint(other.mesh):
            return ""
        if self.mesh != other.mesh:  # nothing orders the two: ranks could enter them crosswise
            return f"shares some of its ranks with {other.name} of its block; share all or none"
        widths = sorted((self.worker, other.worker))
        return f"its workers cut across those of {other.name} of its block" if widths[1] % (widths[0] or 1) else ""

    def fault_taking(self, take: Take, giver: Call) -> str:
        """The fault of an input from another call of its block, or ''."""
        if self.phase == 0 or giver.phase == 2:
            return "of its own block, whose end it cannot wait for; put it in a later block"
        if self.phase == 1 and take.unit not in ("sample", "group"):
            return f"of its own block, where a worker waits for samples or groups, not for a {take.unit}"
        streams = giver.kind == "generate" or (giver.phase == 1 and giver.kind != "train")
        return "" if streams or self.phase == 2 else "of its own block, which gives nothing before its end"


@dataclass(frozen=True)
class Block:
    """Calls that one executor runs at once; a later block finds all that they give complete."""

    name: str
    calls: tuple[Call, ...]

    @property
    def kind(self) -> Kind:
        """The kind of its first call, which decides whose executor runs the block."""
        return self.calls[0].kind

    def __str__(self) -> str:
        return ", ".join(call.name for call in self.calls)


@dataclass(frozen=True)
class Iteration:
    """The calls of an iteration in their total order; calls of one block stand together."""

    calls: tuple[Call, ...]

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(Block(name, tuple(calls)) for name, calls in groupby(self.calls, key=lambda call: call.block))

    def program(self, rank: int) -> tuple[Block, ...]:
        """The blocks that `rank` walks, in order, each with the calls that the rank is part of."""
        own = (Block(one.name, tuple(call for call in one.calls if rank in call.mesh)) for one in self.blocks)
        return tuple(block for block in own if block.calls)

    def verify(self, world_size: int) -> Iteration:
        """Return this table. Raises InputError, naming the call, where a rank could wait forever or read a field that
        nobody gives."""
        if fault := next(self._faults(world_size), None):
            raise InputError(f"iteration: call {fault[0].name}: {fault[1]}")
        return self

    def _faults(self, world_size: int) -> Iterator[tuple[Call, str]]:
        order = {call.name: number for number, call in enumerate(self.calls)}
        blocks = {block.name: block for block in reversed(self.blocks)}
        for number, call in enumerate(self.calls):
            if order[call.name] != number:
                yield call, "another call has this name"
            yield from ((call, fault) for fault in call.faults(world_size))
        for block in self.blocks:
            if blocks[block.name] is not block:
                yield block.calls[0], f"its block {block.name} is entered twice; let its calls stand together"
            pairs = combinations(block.calls, 2)
            yield from ((other, fault) for one, other in pairs if (fault := other.fault_beside(one)))
        for number, call in enumerate(self.calls):
            pairs = [(take, self._fault_of(number, take, order)) for take in call.takes]
            yield from ((call, f"takes {take.field} of {take.giver}, {fault}") for take, fault in pairs if fault)

    def _fault_of(self, number: int, take: Take, order: Mapping[str, int]) -> str:
        if take.giver not in order:
            return "which is no call"
        call, giver = self.calls[number], self.calls[order[take.giver]]
        if take.field not in giver.gives:
            return "which gives no such field"
        if giver.on_turn:
            return "which is left out of some iterations"
        if take.lag < 0 or (not take.lag and order[take.giver] >= number):
            return f"which comes later, with a lag of {take.lag}; move it up or give a lag"
        return call.fault_taking(take, giver) if giver.block == call.block and not take.lag else ""

    def refuse_unless(self, runs: Iteration) -> Iteration:
        """Return this table if it equals `runs`. Raises InputError, naming the first call that differs."""
        if different := next((a or b for a, b in zip_longest(self.calls, runs.calls) if a != b), None):
            raise InputError(f"iteration: call {different.name}: not executable yet; only the default table runs")
        return self

    def lines(self) -> tuple[str, ...]:
        """A table for people."""
        rows = []
        for block, call in ((one, call) for one in self.blocks for call in one.calls):
            takes = "; ".join(map(str, call.takes)) + " (on its turn)" * call.on_turn
            name, layout = block.name * (call is block.calls[0]), str(call.layout or "")
            rows.append((name, call.name, call.kind, layout, f"ranks {call.mesh}", takes))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return tuple("  ".join(f"{text:{width}s}" for text, width in zip(row, widths)).rstrip() for row in rows)

    @staticmethod
    def of(layouts: Mapping[str, ParallelLayout], calls_function: bool = False) -> Iteration:
        """The iteration that runs: the tasks of `layouts` (names of TASKS), each on all ranks, with a reward function
        or without. Its blocks have the names of the metrics timing_s/*."""
        tasks = {name: TASKS[name] for name in TASKS if name in layouts}
        name, spread = next((name, layouts[name]) for name, task in tasks.items() if task.kind == "generate")
        policy, every, responses = tasks[name].role, Mesh(range(spread.size)), (Take("responses", name, "sample"),)
        trained = {task.role: name for name, task in tasks.items() if task.kind == "train"}
        moved = {role: Take("weights", f"{role}_move") for role in trained}
        weights = tuple(Take("weights", one) for one in trained.values())
        calls = []
        for role, trains in trained.items():
            there, takes = layouts[DESTINATIONS[role]], (Take("weights", trains, lag=1),)
            calls.append(Call(moved[role].giver, "move", "reshard", every, role, there, 0, takes, ("weights",)))
        takes = moved[policy], Take("threshold", "books", lag=1)
        calls.append(Call(name, "generate", "gen_infer", every, policy, spread, 0, takes, ("responses",)))
        for name, role in ((name, task.role) for name, task in tasks.items() if task.kind == "score"):
            takes, own = (*responses, *((moved[role],) if role in moved else ())), layouts[name]
            calls.append(Call(name, "score", "gen_infer", every, role, own, own.tp * own.pp, takes, (role.field,)))
        if calls_function:
            row = Call("reward_function", "host", "gen_infer", every, "", None, spread.tp, responses, ("score",))
            calls.append(row)
        takes = tuple(Take(call.gives[0], call.name) for call in calls if call.block == "gen_infer")
        calls.append(Call("samples", "meet", "gen_infer", every, takes=takes, gives=("batch",)))
        batch, advantages = Take("batch", "samples"), Take("advantages", "advantages")
        calls.append(Call("advantages", "host", "adv", every, takes=(batch,), gives=("advantages",)))
        for role, name in trained.items():
            takes = advantages, Take("weights", name, lag=1)
            calls.append(Call(name, "train", "train", every, role, layouts[name], 0, takes, ("weights",)))
        calls.append(Call("books", "meet", "books", every, takes=(batch, *weights), gives=("threshold",)))
        calls.append(Call("checkpoint", "host", "checkpoint", every, takes=weights, on_turn=True))
        calls.append(Call("evaluation", "generate", "eval", every, policy, spread, 0, weights[:1], (), True))
        return Iteration(tuple(calls))
