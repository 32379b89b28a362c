"""Tools of tests: what they answer is scripted, and when is drawn at random, told, or never."""

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from rlhfuse.fusion.inter.request import Request
from rlhfuse.fusion.inter.tools import Answer
from testkit.inter_stage_case import Case
from testkit.programs import eventually

STOPS = tuple(range(3, 64, 5))
HELD = range(1000, 1020, 3)  # samples whose first answers may come after the barrier alone
TURNS = 5


@dataclass(frozen=True)
class ToolCase(Case):
    slowest: float = 0.0  # seconds of a call, at most
    holds: bool = False
    failing: int = -1  # sample whose second call fails
    silent: int = -1  # sample whose calls never end

    def requests(self) -> list[Request]:
        turns = dict(turns=True, stop_token_ids=STOPS)
        return [replace(one, params=replace(one.params, **turns)) for one in super().requests()]


class ScriptedTools:
    """An answer is a function of the turn and of how many calls its sample has made; when it comes is not."""

    def __init__(self, case: ToolCase, store) -> None:
        self._case, self._store = case, store
        self._pool, self._lock = ThreadPoolExecutor(32), threading.RLock()  # a call that is held holds a thread
        self._clock = random.Random(case.slowest)
        self._calls: dict[int, int] = {}  # the state of each sample: its calls so far
        self._pending: set[int] = set()
        self._gone: dict[int, object] = {}  # sample that left in its pause -> the store
        self._done: dict[int, Answer] = {}
        self._adopted: dict[int, object] = {}
        self.handed_over = self.taken_over = 0

    def asks(self, turn, number) -> bool:
        return number < TURNS and turn[-1] != STOPS[-1]

    def submit(self, sample_id, number, turn, room) -> None:
        with self._lock:
            assert self._calls.get(sample_id, 0) == number and 0 <= room < 256
            self._calls[sample_id] = number + 1
            self._pending.add(sample_id)
            if sample_id == self._case.silent:
                return
            self._pool.submit(self._run, sample_id, number, tuple(turn), self._clock.random() * self._case.slowest)

    def _run(self, sample_id, number, turn, seconds) -> None:
        time.sleep(seconds)
        if self._case.holds and sample_id in HELD and number == 0:
            own = self._store.clone()
            eventually(lambda: own.add("left", 0))
        rng = random.Random(f"{sample_id} {number} {turn}")
        tokens = tuple(rng.randrange(64) for _ in range(rng.choice((1, 2, 5, 12))))
        if failed := (sample_id == self._case.failing and number == 1):
            tokens = ()
        with self._lock:
            self._pending.discard(sample_id)
            self._done[sample_id] = Answer(sample_id, tokens, failed, seconds)
            self._send()

    def _send(self) -> None:
        for sample in self._gone.keys() & self._done.keys():
            answer = self._done.pop(sample)
            said = json.dumps([answer.tokens, answer.failed, answer.seconds])
            self._gone.pop(sample).put(f"answer/{sample}", said.encode())

    def answers(self) -> list[Answer]:
        with self._lock:
            for sample, store in [*self._adopted.items()]:
                if said := store.find(f"answer/{sample}"):
                    tokens, failed, seconds = json.loads(said)
                    self._done[sample] = Answer(sample, tuple(tokens), failed, seconds)
                    self.taken_over += 1
                    del self._adopted[sample]
            return list(self._done.values())

    def delivered(self, sample_ids) -> None:
        with self._lock:
            for sample in sample_ids:
                del self._done[sample]

    def hand_over(self, sample_ids, store) -> None:
        with self._lock:
            own = store.reconnect()
            for sample in sample_ids:
                waits = sample in self._pending or sample in self._done
                store.put(f"state/{sample}", json.dumps([self._calls.pop(sample, 0), waits]).encode())
                if waits:
                    self._gone[sample] = own
                    self.handed_over += 1
            self._send()

    def adopt(self, sample_ids, store) -> None:
        for sample in sample_ids:
            eventually(lambda: store.find(f"state/{sample}"))
            self._calls[sample], waits = json.loads(store.find(f"state/{sample}"))
            if waits:
                self._adopted[sample] = store

    def waiting(self) -> str:
        with self._lock:
            waits = self._pending | self._adopted.keys()
            return f"tool f of sample {min(waits)}" if waits else ""
