"""What the ranks of one iteration tell each other while they generate and score, through the job's store.

    finished      how many samples of the whole batch are done
    published     how many samples ended after the first trigger, and each of them with its tokens
    note/K/I      what instance I brought to meeting K: its unfinished samples, none if it has nothing left to decode
    claims        tickets for the packs known at the first meeting: whoever draws ticket k scores pack k
    taken         how many of the published samples have been taken to be scored, and by whom last
    scoring       workers that load or score; waiting: workers for which there is no work yet

Counters only grow, but for the last two, which are hints. Whoever takes something does so in one atomic operation,
so no lock is needed and no rank waits for one that decodes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.001, 0.02


class Board:
    """The store's keys of one iteration. A call is one round trip, or two."""

    def __init__(self, store: dist.Store, iteration: int, timeout_seconds: float) -> None:
        self._store = store
        self._iteration = iteration
        self._prefix = f"iteration/{iteration}/"
        self._timeout = timeout_seconds

    def connected_anew(self) -> Board:
        """The same board over a connection of its own, for another thread."""
        return Board(self._store.clone(), self._iteration, self._timeout)

    # finished samples -----------------------------------------------------------------------------------------

    def finish(self, count: int) -> int:
        """Add newly finished samples; returns how many of the batch are finished."""
        return self._add("finished", count)

    def publish(self, samples: Sequence[bytes]) -> None:
        """Hand finished samples to the workers, announced at once so that those who wait can share them fairly."""
        first = self._add("published", len(samples)) - len(samples)
        for index, sample in enumerate(samples, start=first):
            self._store.set(f"{self._prefix}sample/{index}", sample)

    def published(self) -> int:
        return self._add("published", 0)

    def fetch(self, index: int) -> bytes:
        """The index-th published sample. Raises TimeoutError if it does not follow its announcement."""
        return self._wait_for(f"sample/{index}", f"sample {index} of the long tail was announced but not sent")

    # later meetings -------------------------------------------------------------------------------------------

    def bring(self, meeting: int, instance: int, note: bytes) -> None:
        self._store.set(f"{self._prefix}note/{meeting}/{instance}", note)

    def notes(self, meeting: int, instances: Sequence[int]) -> dict[int, bytes]:
        """What these instances brought; waits for all. Raises TimeoutError naming the one that did not come."""
        late = f"of {len(instances)} instances did not come to meeting {meeting}"
        return {i: self._wait_for(f"note/{meeting}/{i}", f"instance {i} {late}") for i in instances}

    # scoring work ---------------------------------------------------------------------------------------------

    def claim(self) -> int:
        """Draw the next ticket."""
        return self._add("claims", 1) - 1

    def taken(self) -> int:
        """How many of the published samples somebody has taken."""
        return self._read_taken()[1]

    def take(self, first: int, count: int, worker: int) -> bool:
        """Take the published samples from `first` on; False if another worker was quicker, and nothing is taken."""
        before, taken = self._read_taken()
        if taken != first:
            return False
        # The worker's name makes the value its own: who did not write it cannot take it for its own success.
        wanted = f"{first + count} {worker}"
        return self._store.compare_set(self._prefix + "taken", before, wanted).decode() == wanted

    def note_scoring(self, change: int) -> None:
        """One worker more, or less, that loads or scores."""
        self._add("scoring", change)

    def scoring(self) -> int:
        return self._add("scoring", 0)

    def note_waiting(self, change: int) -> int:
        """One worker more, or less, that waits for work; returns how many do."""
        return self._add("waiting", change)

    # the end --------------------------------------------------------------------------------------------------

    def clear(self, meetings: int, instances: int) -> None:
        """Drop the iteration's keys; one rank calls it after everyone is done."""
        samples = [f"sample/{i}" for i in range(self.published())]
        notes = [f"note/{k}/{i}" for k in range(meetings) for i in range(instances)]
        for key in ("finished", "published", "claims", "taken", "scoring", "waiting", *samples, *notes):
            self._store.delete_key(self._prefix + key)

    def _add(self, key: str, amount: int) -> int:
        return self._store.add(self._prefix + key, amount)

    def _read_taken(self) -> tuple[str, int]:
        key = self._prefix + "taken"
        if not self._store.check([key]):
            return "", 0  # an absent key is compared as an empty value
        text = self._store.get(key).decode()
        return text, int(text.split()[0])

    def _wait_for(self, name: str, late: str) -> bytes:
        key = self._prefix + name
        deadline = time.monotonic() + self._timeout
        # Polled, not waited for: a wait in the store that times out is reported as a warning each time.
        pause = FIRST_PAUSE_SECONDS
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{late} in {self._timeout:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)
        return self._store.get(key)
