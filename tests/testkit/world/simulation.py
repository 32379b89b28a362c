"""Ranks and their threads as greenlets: each wait hands control to a loop that resumes whoever is due next.

What code waits with is handed to it: a `Clock`, a store, and a `RankPlace` with the collectives. Every message and
sleep takes virtual time that the seed draws, most about as usual and a few very late. The same seed gives the same
order of events, so a life that failed is lived again exactly.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import greenlet
import torch

from rlhfuse.base.clock import Clock
from rlhfuse.fusion.inter.rank_place import RankPlace
from rlhfuse.fusion.inter.tensor_parallel_group import TensorParallelGroup
from rlhfuse.tasks.placement import Placement

MESSAGE_SECONDS = 2e-4
MOST_STEPS = 1_000_000


class Task:
    """One thread of a rank."""

    def __init__(self, rank: int, run: Callable[[], None], hub: greenlet.greenlet) -> None:
        self.rank, self.turn, self.done, self.ended = rank, 0, False, []
        self.let = greenlet.greenlet(run, parent=hub)
        self.let.task = self  # pyright: ignore[reportAttributeAccessIssue]


class Simulation:
    """Owns virtual time, the order of events, and what ranks share."""

    def __init__(self, seed: int, traced: bool = False) -> None:
        self.rng, self.now, self.over, self.steps = random.Random(seed), 0.0, False, 0
        self.values: dict[str, bytes] = {}  # of the store
        self.dead: set[int] = set()  # ranks that are gone: nothing of theirs is resumed
        self.slow: dict[int, float] = {}  # rank -> how many times as long its waits last
        self.waits: defaultdict[int, int] = defaultdict(int)
        self.at_wait: tuple[int, int] | None = None  # (rank, number of its waits) at which it dies
        self.meetings: defaultdict[Any, dict] = defaultdict(dict)
        self.trace: defaultdict[int, deque] | None = defaultdict(lambda: deque(maxlen=20)) if traced else None
        self._due: list[tuple[float, int, Task, int]] = []
        self._hub, self._tasks = greenlet.getcurrent(), []

    def spawn(self, rank: int, function: Callable, *args: Any) -> Task:
        def run() -> None:
            try:
                function(*args)
            finally:
                task.done = True
                self.wake(task.ended)

        task = Task(rank, run, self._hub)
        self._tasks.append(task)
        self._push(task, self.delay(1e-4))
        return task

    def delay(self, usual: float) -> float:
        chance = self.rng.random()
        return usual * (0.3 + 1.4 * chance if chance < 0.95 else 10 if chance < 0.998 else 200)

    def note(self, rank: int, text: str) -> None:
        if self.trace is not None:
            self.trace[rank].append(f"{self.now:9.4f} {text}")

    def pause(self, seconds: float) -> None:
        """Let the others go on for so long."""
        task = self._leave()
        self._push(task, seconds * self.slow.get(task.rank, 1.0))
        self._switch(task)

    def wait(self, signal: list[Task], timeout: float | None = None) -> None:
        """Until somebody wakes the signal, or the time is over."""
        task = self._leave()
        signal.append(task)
        if timeout is not None:
            self._push(task, timeout * self.slow.get(task.rank, 1.0))
        self._switch(task)

    def wake(self, signal: list[Task]) -> None:
        for task in signal:
            self._push(task, self.delay(1e-5))
        signal.clear()

    @torch.no_grad()  # whether torch keeps gradients belongs to the thread, which all greenlets share
    def run(self) -> None:
        """Until nobody has anything to do or somebody calls `stop`. Raises what a task raised."""
        try:
            while self._due and not self.over:
                self.now, _, task, turn = heapq.heappop(self._due)
                if self.steps > MOST_STEPS:
                    raise RuntimeError(f"no end after {self.steps} events")
                if task.turn == turn and task.rank not in self.dead and not task.done:
                    task.let.switch()
        finally:
            self.over = True
            for task in self._tasks:
                while task.let and not task.done:
                    task.let.throw(greenlet.GreenletExit)

    def stop(self) -> None:
        self.over = True

    def meet(self, key: Any, ranks: int, rank: int, value: Any) -> list[Any]:
        """The values of so many ranks, in their order, once all have come: each number of a meeting has one."""
        box = self.meetings[key]
        box[rank] = value
        signal = box.setdefault("signal", [])
        if len(box) == ranks + 1:
            self.wake(signal)
        while len(box) < ranks + 1:
            self.wait(signal)
        return [box[r] for r in sorted(key for key in box if key != "signal")]

    def _leave(self) -> Task:
        if self.over:
            raise greenlet.GreenletExit
        task = greenlet.getcurrent().task  # pyright: ignore[reportAttributeAccessIssue]
        task.turn += 1
        if task.rank >= 0:
            self.waits[task.rank] += 1
            if self.at_wait == (task.rank, self.waits[task.rank]):
                self.dead.add(task.rank)
        return task

    def _push(self, task: Task, seconds: float) -> None:
        self.steps += 1
        heapq.heappush(self._due, (self.now + seconds, self.steps, task, task.turn))

    def _switch(self, task: Task) -> None:
        self._hub.switch()
        if self.over:
            raise greenlet.GreenletExit


def clock_of(simulation: Simulation) -> type[Clock]:
    """The clock of a rank."""

    def late() -> float:
        """Whoever polls may be late for it: fewer polls make a life shorter, and orders more varied."""
        return (1.0, 5.0, 20.0)[int(3 * simulation.rng.random())]

    class Lock:
        """As threading.RLock; a condition too."""

        def __init__(self) -> None:
            self._owner, self._depth, self._free, self._told = None, 0, [], []

        def __enter__(self) -> Lock:
            own = greenlet.getcurrent()
            while self._owner not in (None, own):
                simulation.wait(self._free)
            self._owner, self._depth = own, self._depth + 1
            return self

        def __exit__(self, *_: object) -> None:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                simulation.wake(self._free)

        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> bool:
            self.__exit__()
            if not predicate():
                simulation.wait(self._told, timeout and timeout * late())
            self.__enter__()
            return bool(predicate())

        def notify(self) -> None:
            simulation.wake(self._told)

    class Event:
        def __init__(self) -> None:
            self._set, self._waiting = False, []

        def set(self) -> None:
            self._set = True
            simulation.wake(self._waiting)

        def wait(self) -> None:
            while not self._set:
                simulation.wait(self._waiting)

    class Thread:
        def __init__(self, target: Callable, args: tuple = (), name: str = "", daemon: bool = False) -> None:
            self._target, self._args = target, args

        def start(self) -> None:
            rank = greenlet.getcurrent().task.rank  # pyright: ignore[reportAttributeAccessIssue]
            self._task = simulation.spawn(rank, self._target, *self._args)

        def is_alive(self) -> bool:
            return not self._task.done

        def join(self) -> None:
            while self.is_alive():
                simulation.wait(self._task.ended)

    class VirtualClock(Clock):
        def now(self) -> float:
            return simulation.now

        def sleep(self, seconds: float) -> None:
            simulation.pause(seconds * late())

    VirtualClock.Lock = VirtualClock.Condition = Lock
    VirtualClock.Event, VirtualClock.Thread = Event, Thread
    return VirtualClock


class SimulatedStore:
    """The calls of torch's store that the inter-stage code makes; a request and its answer take their time."""

    def __init__(self, simulation: Simulation, law: Callable[[str], None] = lambda key: None) -> None:
        """`law` is called after each request about a key."""
        self._simulation, self._values, self._law = simulation, simulation.values, law

    def clone(self) -> SimulatedStore:
        return self

    def _at_server(self, key: str, act: Callable[[], Any]) -> Any:
        simulation = self._simulation
        chance = simulation.rng.random()
        if chance < 0.5:  # else nobody acts before it
            simulation.pause(simulation.delay(MESSAGE_SECONDS))
        answer = act()
        self._law(key)
        if 0.4 < chance < 0.6:  # else nobody acts before its answer is there
            simulation.pause(simulation.delay(MESSAGE_SECONDS))
        return answer

    def add(self, key: str, amount: int) -> int:
        def act() -> int:
            self._values[key] = b"%d" % (int(self._values.get(key, b"0")) + amount)
            return int(self._values[key])

        return self._at_server(key, act)

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._at_server(key, lambda: self._values.__setitem__(key, data))

    def get(self, key: str) -> bytes:
        while not self.check([key]):
            self._simulation.pause(self._simulation.delay(1e-2))
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return self._at_server(keys[0], lambda: all(key in self._values for key in keys))

    def compare_set(self, key: str, before: str, wanted: str) -> bytes:
        def act() -> bytes:
            if self._values.get(key, b"") == before.encode():
                self._values[key] = wanted.encode()
            return self._values.get(key, before.encode())

        return self._at_server(key, act)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None


@dataclass
class Broadcast:
    """One under way, on one rank."""

    group: SimulatedGroup
    number: int
    box: dict

    def wait(self) -> None:
        self.group.finish(self.number, self.box)

    def tolist(self) -> list[int]:
        return [*self.box["values"]]


class SimulatedGroup(TensorParallelGroup):
    """Broadcasts of an instance or a worker. A rank that is not part of one at its turn holds up all others."""

    def __init__(self, simulation: Simulation, kind: str, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(ranks, rank, None)
        self._simulation, self._kind, self._rank, self._number, self._gathered = simulation, kind, rank, 0, 0

    def start_broadcast(self, *values: int) -> tuple[Broadcast, Broadcast]:
        number = self._number
        self._number += 1
        box = self._simulation.meetings[self._kind, self._ranks, number]
        signal = box.setdefault("signal", [])
        box[self._rank] = len(values)
        if self.is_leader:
            box["values"] = values
        self._simulation.wake(signal)
        started = Broadcast(self, number, box)
        return started, started

    def finish(self, number: int, box: dict) -> None:
        """Until all have come."""
        while any(rank not in box for rank in self._ranks):
            self._simulation.wait(box["signal"])
        if len({box[rank] for rank in self._ranks}) > 1:
            raise RuntimeError(f"{self._kind} {self._ranks}: broadcast {number} has several sizes")
        self._simulation.pause(self._simulation.delay(MESSAGE_SECONDS))

    def broadcast(self, *values: int) -> tuple[int, ...]:
        if self.size == 1:
            return values
        started, _ = self.start_broadcast(*values)
        started.wait()
        return tuple(started.tolist())

    def gather(self, value: Any) -> list[Any]:
        self._gathered += 1
        key = "gather", self._kind, self._ranks, self._gathered
        everyone = self._simulation.meet(key, self.size, self._rank, value)
        self._simulation.pause(self._simulation.delay(MESSAGE_SECONDS))
        return everyone


class SimulatedPlace:
    """A `RankPlace` whose collectives are those of a simulation; what moves are the samples of stand-in engines."""

    instance, worker, spanned = RankPlace.instance, RankPlace.worker, RankPlace.spanned

    def __init__(
        self, simulation: Simulation, rank: int, placement: Placement, gathered: Callable[[list[Any]], None]
    ) -> None:
        """`gathered` is called with what all ranks have given."""
        self.rank, self.placement, self._simulation, self._note = rank, placement, simulation, gathered
        self.decoders = SimulatedGroup(simulation, "instance", placement.instances[self.instance], rank)
        self.scorers = SimulatedGroup(simulation, "worker", placement.workers[self.worker], rank)
        self._gathered, self._moved = 0, defaultdict(int)

    def gather(self, value: Any) -> list[Any]:
        self._gathered += 1
        ranks = sum(map(len, self.placement.instances))
        everyone = self._simulation.meet(("gather", self._gathered), ranks, self.rank, value)
        self._note(everyone)
        self._simulation.pause(self._simulation.delay(MESSAGE_SECONDS))
        return everyone

    def send(self, transfer: Any, heads: Any, bucket_bytes: int) -> int:
        self._exchange(heads, transfer)
        return 8 * len(transfer)

    def receive(self, engine: Any, heads: Any, bucket_bytes: int) -> list[int]:
        for sample in next(part for part in self._exchange(heads, None) if part is not None):
            engine.take(sample.copy())  # each tensor rank has its own
        return []

    def _exchange(self, heads: Any, value: Any) -> list[Any]:
        """The values of all ranks of both instances."""
        pair = heads.sources, heads.destinations
        self._moved[pair] += 1
        ranks = len(heads.sources) + len(heads.destinations)
        everyone = self._simulation.meet(("move", pair, self._moved[pair]), ranks, self.rank, value)
        self._simulation.pause(self._simulation.delay(1e-3))
        return everyone
