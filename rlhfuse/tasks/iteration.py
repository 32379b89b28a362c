"""One iteration as a table: who computes what, on which ranks, from what, and in which order.

Tasks stand in blocks of one total order. Every rank walks the blocks that it has tasks in; one executor runs the tasks
of a block at once. A table that `verify` accepts cannot hang: a block waits for earlier blocks alone, and within a
block only workers and meetings wait, for tasks that never wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, groupby, zip_longest

from rlhfuse.base.errors import InputError
from rlhfuse.tasks.placement import worker_ranks
from rlhfuse.tasks.task import DESTINATIONS, TASKS, Kind, ModelTask, Take, Task


@dataclass(frozen=True)
class Block:
    """Tasks that one executor runs at once; a later block finds all that they give complete."""

    name: str
    tasks: tuple[Task, ...]

    @property
    def on_turn(self) -> bool:
        return self.tasks[0].on_turn

    @property
    def kind(self) -> Kind:
        """The kind of its first task, which decides whose executor runs the block."""
        return self.tasks[0].kind

    def __str__(self) -> str:
        return ", ".join(task.name for task in self.tasks)


@dataclass(frozen=True)
class Iteration:
    """The tasks of an iteration in their total order; tasks of one block stand together."""

    tasks: tuple[ModelTask | Task, ...]

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(Block(name, tuple(tasks)) for name, tasks in groupby(self.tasks, key=lambda task: task.block))

    def program(self, rank: int) -> tuple[Block, ...]:
        """The blocks that `rank` walks, in order, each with the tasks that the rank is part of."""
        own = (Block(one.name, tuple(task for task in one.tasks if rank in task.mesh)) for one in self.blocks)
        return tuple(block for block in own if block.tasks)

    def verify(self, world_size: int) -> Iteration:
        """Return this table. Raises InputError, naming the task, where a rank could wait forever or read a field that
        nobody gives."""
        if fault := next(self._faults(world_size), None):
            raise InputError(f"iteration: task {fault[0].name}: {fault[1]}")
        return self

    def _faults(self, world_size: int) -> Iterator[tuple[Task, str]]:
        order = {task.name: number for number, task in enumerate(self.tasks)}
        blocks = {block.name: block for block in reversed(self.blocks)}
        for number, task in enumerate(self.tasks):
            if order[task.name] != number:
                yield task, "another task has this name"
            yield from ((task, fault) for fault in task.faults(world_size))
        for block in self.blocks:
            if blocks[block.name] is not block:
                yield block.tasks[0], f"its block {block.name} is entered twice; let its tasks stand together"
            pairs = combinations(block.tasks, 2)
            yield from ((other, fault) for one, other in pairs if (fault := other.fault_beside(one)))
        for number, task in enumerate(self.tasks):
            pairs = [(take, self._fault_of(number, take, order)) for take in task.takes]
            yield from ((task, f"takes {take.field} of {take.giver}, {fault}") for take, fault in pairs if fault)

    def _fault_of(self, number: int, take: Take, order: Mapping[str, int]) -> str:
        if take.giver not in order:
            return "which is no task"
        task, giver = self.tasks[number], self.tasks[order[take.giver]]
        if take.field not in giver.gives:
            return "which gives no such field"
        if giver.on_turn:
            return "which is left out of some iterations"
        if take.lag < 0 or (not take.lag and order[take.giver] >= number):
            return f"which comes later, with a lag of {take.lag}; move it up or give a lag"
        return task.fault_taking(take, giver) if giver.block == task.block and not take.lag else ""

    def refuse_unless(self, runs: Iteration) -> Iteration:
        """Return this table if it equals `runs`. Raises InputError, naming the first task that differs."""
        if different := next((a or b for a, b in zip_longest(self.tasks, runs.tasks) if a != b), None):
            raise InputError(f"iteration: task {different.name}: not executable yet; only the default table runs")
        return self

    def lines(self) -> tuple[str, ...]:
        """A table for people."""
        rows = []
        for block, task in ((one, task) for one in self.blocks for task in one.tasks):
            takes = "; ".join(map(str, task.takes)) + " (on its turn)" * task.on_turn
            layout = str(task.layout) if isinstance(task, ModelTask) else ""
            name = block.name * (task is block.tasks[0])
            rows.append((name, task.name, task.kind, layout, f"ranks {task.mesh}", takes))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return tuple("  ".join(f"{text:{width}s}" for text, width in zip(row, widths)).rstrip() for row in rows)

    @cached_property
    def models(self) -> tuple[ModelTask, ...]:
        """The tasks of `TASKS`, in the order of an iteration."""
        return tuple(task for task in self.tasks if isinstance(task, ModelTask) and task.name in TASKS)

    @staticmethod
    def of(models: Sequence[ModelTask], calls_function: bool = False) -> Iteration:
        """The iteration that runs: tasks of models (`ModelTask.of`), with a reward function or without.

        Its blocks have the names of the metrics timing_s/*.
        """
        generates = next(task for task in models if task.kind == "generate")
        every, responses = generates.mesh, (Take("responses", generates.name, "sample"),)
        trained = {task.role: task for task in models if task.training}
        moved = {role: Take("weights", f"{role}_move") for role in trained}
        weights = tuple(Take("weights", task.name) for task in trained.values())
        layouts, tasks = {task.name: task.layout for task in models}, list[Task]()
        for role, trains in trained.items():
            block = "reshard" if role == generates.role else "gen_infer"  # there it moves beneath generation
            name, layout, takes = moved[role].giver, layouts[DESTINATIONS[role]], (Take("weights", trains.name, lag=1),)
            tasks.append(ModelTask(name, "move", block, every, 0, takes, ("weights",), role=role, layout=layout))
        takes = moved[generates.role], Take("threshold", "books", lag=1)
        tasks.insert(1, replace(generates, takes=takes, gives=("responses",)))
        for task in (task for task in models if task.kind == "score"):
            takes = *responses, *((moved[task.role],) if task.role in moved else ())
            tasks.append(replace(task, worker=worker_ranks(models), takes=takes, gives=(task.role.field,)))
        if calls_function:
            tp = generates.layout.tp
            row = Task("reward_function", "host", "gen_infer", every, tp, responses, ("score",))
            tasks.append(row)
        sampled = (task for task in tasks if task.block == "gen_infer" and task.kind != "move")
        takes = tuple(Take(task.gives[0], task.name) for task in sampled)
        tasks.append(Task("samples", "meet", "gen_infer", every, takes=takes, gives=("batch",)))
        batch, advantages = Take("batch", "samples"), Take("advantages", "advantages")
        tasks.append(Task("advantages", "host", "adv", every, takes=(batch,), gives=("advantages",)))
        for task in trained.values():
            tasks.append(replace(task, takes=(advantages, Take("weights", task.name, lag=1)), gives=("weights",)))
        tasks.append(Task("books", "meet", "books", every, takes=(batch, *weights), gives=("threshold",)))
        tasks.append(Task("checkpoint", "host", "checkpoint", every, takes=weights, on_turn=True))
        held_out = replace(generates, name="evaluation", block="eval", takes=weights[:1], on_turn=True)
        return Iteration((*tasks, held_out))
