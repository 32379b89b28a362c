"""A clock that the test moves."""

from rlhfuse.base.clock import Clock


class ManualClock(Clock):
    """Stands still but for what a test adds to `seconds`, and for sleeps, each of which ends `late`."""

    seconds, late = 100.0, 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds + self.late
