"""The signals that ask a search to end: Ctrl-C, SIGTERM, and SIGUSR1 as batch systems send it beforehand.

The first one is remembered and nothing is interrupted: whoever works asks `received` between two steps.
A second Ctrl-C acts as it did before; the others may well come twice, from the batch system and from
mpirun, and change nothing more. A signal that is ignored (a shell's background job ignores Ctrl-C) stays
ignored.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Signals:
    """Listens while it is entered; `received` is the number of the first signal, 0 for none."""

    def __init__(self) -> None:
        self.received = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in ASKING:
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
