"""The signals that end a search whose best schedule is on file when it ends."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1: batch systems send it beforehand


class StopSignals:
    """Listens to STOP_SIGNALS while it is entered; `received` is the number of the first one, 0 for none.

    Nothing is interrupted. A second Ctrl-C acts as it did before; the others may come twice, from the batch system and
    from mpirun, and change nothing more. What was ignored (a shell's background job ignores Ctrl-C) stays ignored.
    """

    def __init__(self) -> None:
        self.received = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if number == signal.SIGINT:
            signal.signal(number, self.before[number])

    @staticmethod
    def name(number: int) -> str:
        """What people call it."""
        return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
