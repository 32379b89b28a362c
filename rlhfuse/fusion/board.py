"""What the ranks of one iteration tell each other while they generate and score, through the job's store.

    finished    how many samples of the whole batch are done
    published   samples that ended after the trigger, in order of arrival, with their tokens
    claims      tickets: whoever draws ticket k does the k-th piece of scoring work

Counters only grow and tickets are drawn once, so no lock is needed and no rank waits for one that decodes.
"""

from __future__ import annotations

import time

import torch.distributed as dist

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.001, 0.02


class Board:
    """The store's keys of one iteration. Every call is one round trip."""

    def __init__(self, store: dist.Store, iteration: int, timeout_seconds: float) -> None:
        self._store = store
        self._prefix = f"iteration/{iteration}/"
        self._timeout = timeout_seconds

    def finish(self, count: int) -> int:
        """Add newly finished samples; returns how many of the batch are finished."""
        return self._store.add(self._prefix + "finished", count)

    def publish(self, sample: bytes) -> None:
        """Hand a finished sample to whoever draws its ticket."""
        index = self._store.add(self._prefix + "published", 1) - 1
        self._store.set(f"{self._prefix}sample/{index}", sample)

    def fetch(self, index: int) -> bytes:
        """The index-th published sample; waits until it is there. Raises TimeoutError."""
        key = f"{self._prefix}sample/{index}"
        deadline = time.monotonic() + self._timeout
        # Polled, not waited for: a wait in the store that times out is reported as a warning each time.
        pause = FIRST_PAUSE_SECONDS
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"sample {index} of the long tail was not published in {self._timeout:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)
        return self._store.get(key)

    def claim(self) -> int:
        """Draw the next ticket."""
        return self._store.add(self._prefix + "claims", 1) - 1

    def clear(self, published: int) -> None:
        """Drop the iteration's keys; one rank calls it after everyone is done."""
        for key in ("finished", "published", "claims", *(f"sample/{i}" for i in range(published))):
            self._store.delete_key(self._prefix + key)
