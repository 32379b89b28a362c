"""An instance's errands to the store, beside its decode steps.

The leader of an instance says what has finished and goes on at once; a thread tells the store, and keeps the count of
all instances at hand. So a step never waits for a round trip, and a count that is read late delays a trigger by a
step and nothing else. The calls into the store leave Python's lock to the engine; a round trip is a few
microseconds of Python.

    engine   step | step | step | step |        finish(2) is a note for the thread, `finished` an attribute
    thread      .add(2)...add(0)...add(0)       every POLL_SECONDS, at once when there is something to tell

Knows nothing of triggers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rlhfuse.fusion.inter.iteration_store import Board

POLL_SECONDS = 0.005


class Courier:
    """Use as a context manager; its end waits until everything is told. Raises what the store raised."""

    def __init__(self, board: Board, poll_seconds: float = POLL_SECONDS) -> None:
        self._board = board.connected_anew()
        self._poll = poll_seconds
        self._changed = threading.Condition()
        self._count, self._samples = 0, []
        self._closing = False
        self._failure: BaseException | None = None
        self._finished = 0
        self._scoring: int | None = None
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)

    @property
    def finished(self) -> int:
        """Samples of the whole batch that were finished when the store was last asked."""
        self._check()
        return self._finished

    @property
    def scoring(self) -> int:
        """Workers that scored or loaded then; 0 before `watch_scoring`."""
        return self._scoring or 0

    def watch_scoring(self) -> None:
        """From now on ask how many workers score."""
        self._scoring = 0

    def finish(self, count: int, samples: Sequence[bytes] = ()) -> None:
        """Have told that `count` more samples are finished, and hand over those that are to be published."""
        self._check()
        with self._changed:
            self._count += count
            self._samples += samples
            self._changed.notify()

    def __enter__(self) -> Courier:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        if kind is None:
            self._check()

    def _run(self) -> None:
        try:
            while not (self._closing and not self._count):
                self._errand()
        except BaseException as failure:  # raised by the thread that asks
            self._failure = failure

    def _errand(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._count or self._closing, self._poll)
            count, samples = self._count, self._samples
            self._count, self._samples = 0, []
        if samples:
            self._board.publish(samples)
        self._finished = self._board.finish(count)  # last: who reads that all are finished finds all published
        if self._scoring is not None:
            self._scoring = self._board.scoring()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
