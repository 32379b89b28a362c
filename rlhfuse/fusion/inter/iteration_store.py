"""What the ranks of one iteration share through the job's store while they generate and score.

Counters only grow, but for `ready`, which is a hint. Whoever takes something does so in one atomic
operation, so no lock is needed and no rank waits for one that decodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # torch's __all__ lacks it

from rlhfuse.base.clock import Clock

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.001, 0.02
POLL_SECONDS = 0.005
SCORES = "scores"


class IterationStore:
    """The store's keys of one iteration. A call is one round trip, or two.

    finished      samples of the whole batch that are done
    published     samples that ended after the trigger; sample/J is the J-th of them with its tokens
    tickets       drawn for the packs known at the barrier: whoever draws ticket k scores pack k
    taken         published samples that have been taken to be scored, and by whom last
    workers       workers that load, score or wait for work; ready: those that wait and have their models
    free/W        instances of worker W that decode no more, where it spans several
    mail/I        letters to the leader of instance I about samples that began there; mail/I/J is the J-th of them
    mail/scores   letters to all leaders about groups that are filtered; places: groups begun beside the first ones
    put/NAME      what was left under a name; put/J is the J-th name, puts how many there are
    """

    def __init__(self, store: Store, iteration: int | str, timeout_seconds: float, clock: Clock | None = None) -> None:
        self._store, self.clock = store, clock or Clock()
        self._iteration = iteration
        self._prefix = f"iteration/{iteration}/"
        self._timeout = timeout_seconds

    def reconnect(self) -> IterationStore:
        """The same keys over a connection of its own, for another thread."""
        clone = self._store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # the stub lacks it
        return IterationStore(clone, self._iteration, self._timeout, self.clock)

    def add_finished(self, count: int) -> int:
        """Add newly finished samples; returns how many of the batch are finished."""
        return self._add("finished", count)

    def publish(self, samples: Sequence[bytes]) -> None:
        """Hand finished samples to the workers, announced at once so that those who wait can share them fairly."""
        first = self._add("published", len(samples)) - len(samples)
        for index, sample in enumerate(samples, start=first):
            key = f"{self._prefix}sample/{index}"
            self._store.set(key, sample)  # pyright: ignore[reportArgumentType]  # the stub knows text only

    def published(self) -> int:
        return self._add("published", 0)

    def fetch(self, index: int) -> bytes:
        """The index-th published sample. Raises TimeoutError if it does not follow its announcement."""
        key, deadline = f"{self._prefix}sample/{index}", self.clock.now() + self._timeout
        # Polled, not waited for: a wait in the store that times out is reported as a warning each time.
        pause = FIRST_PAUSE_SECONDS
        while not self._store.check([key]):
            if self.clock.now() > deadline:
                late = f"sample {index} of the long tail was announced but not sent"
                raise TimeoutError(f"{late} in {self._timeout:.0f} s")
            self.clock.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)
        return self._store.get(key)

    def next_ticket(self) -> int:
        return self._add("tickets", 1) - 1

    def taken(self) -> int:
        """How many of the published samples somebody has taken."""
        return self._read_taken()[1]

    def try_take(self, first: int, count: int, worker: int) -> bool:
        """Take the published samples from `first` on; False if another worker was quicker, and nothing is taken."""
        before, taken = self._read_taken()
        if taken != first:
            return False
        # The worker's name makes the value its own: who did not write it cannot take it for its own success.
        wanted = f"{first + count} {worker}"
        return self._store.compare_set(self._prefix + "taken", before, wanted).decode() == wanted

    def add_workers(self, count: int) -> int:
        """So many workers more that want work; returns how many do."""
        return self._add("workers", count)

    def add_free(self, worker: int, count: int) -> int:
        """Count `count` more instances of a worker that have stopped decoding; returns their number."""
        return self._add(f"free/{worker}", count)

    def add_ready(self, change: int) -> int:
        """So many workers more, or fewer, that wait for work with their models loaded; returns how many do."""
        return self._add("ready", change)

    def begin_places(self, count: int) -> int:
        """Begin so many groups more; returns how many were begun beside the first ones."""
        return self._add("places", count)

    def send(self, instance: int | str, text: str) -> None:
        """Leave a letter to the leader of `instance`, or in another box."""
        index = self._add(f"mail/{instance}", 1) - 1
        self._store.set(f"{self._prefix}mail/{instance}/{index}", text)

    def letters(self, instance: int | str, seen: int = 0) -> list[str]:
        """Letters to `instance` after the first `seen`; waits for one that is announced and not there yet."""
        indices = range(seen, self._add(f"mail/{instance}", 0))
        return [self._store.get(f"{self._prefix}mail/{instance}/{i}").decode() for i in indices]

    def put(self, name: str, data: bytes) -> None:
        """Leave something under a name that nobody has used, not a number; afterwards anybody finds it."""
        self._store.set(f"{self._prefix}put/{name}", data)  # pyright: ignore[reportArgumentType]  # knows text only
        index = self._add("puts", 1) - 1  # its answer comes when what was set before is there
        self._store.set(f"{self._prefix}put/{index}", name)

    def find(self, name: str) -> bytes | None:
        """What was left under a name; None as long as there is nothing."""
        key = f"{self._prefix}put/{name}"
        return self._store.get(key) if self._store.check([key]) else None

    def clear(self, instances: int = 0) -> None:
        """Drop the iteration's keys, those of so many instances too; one rank calls it after everyone is done."""
        samples = [f"sample/{i}" for i in range(self.published())] + [f"free/{i}" for i in range(instances)]
        for mail in (f"mail/{box}" for box in (*range(instances), SCORES)):
            samples += [mail, *(f"{mail}/{i}" for i in range(self._add(mail, 0)))]
        for index in range(self._add("puts", 0)):
            named = self.find(str(index))
            samples += [f"put/{index}", *([f"put/{named.decode()}"] if named else [])]
        for key in ("finished", "published", "tickets", "taken", "workers", "ready", "places", "puts", *samples):
            self._store.delete_key(self._prefix + key)

    def _add(self, key: str, amount: int) -> int:
        return self._store.add(self._prefix + key, amount)

    def _read_taken(self) -> tuple[str, int]:
        key = self._prefix + "taken"
        if not self._store.check([key]):
            return "", 0  # an absent key is compared as an empty value
        text = self._store.get(key).decode()
        return text, int(text.split()[0])


class StoreReporter:
    """Background thread of an instance's leader that reports finished samples to the store and polls the counts.

    A count that is read late delays a trigger by a step and nothing else. A context manager, whose end waits until
    everything is reported. Raises what the store raised.
    """

    def __init__(self, store: IterationStore, scores: bool = False) -> None:
        """`scores`: letters of all leaders about scores are passed on as well."""
        self._store = store.reconnect()
        self._changed = store.clock.Condition()
        self._count = 0
        self._samples: list[bytes] = []
        self._passes_scores, self._to_send, self._letters = scores, [], []
        self._seen = self._places = 0  # letters, and groups
        self._closing = False
        self._failure: BaseException | None = None
        self._finished = 0
        self._thread = store.clock.Thread(target=self._run, name="store-reporter", daemon=True)

    @property
    def finished(self) -> int:
        """Samples of the whole batch that were finished when the store was last asked."""
        self._check()
        return self._finished

    @property
    def places(self) -> int:
        """Groups begun beside the first ones; no fewer than when `finished` was read."""
        return self._places

    def send_scores(self, text: str) -> None:
        """Leave a letter for all leaders; returns at once."""
        with self._changed:
            self._to_send.append(text)
            self._changed.notify()

    def take_scores(self) -> list[str]:
        """Letters of all leaders since the last time, in one order for all."""
        with self._changed:
            taken, self._letters = self._letters, []
        return taken

    def report(self, count: int, samples: Sequence[bytes] = ()) -> None:
        """`count` more samples are finished; `samples` are to be published. Returns at once."""
        self._check()
        with self._changed:
            self._count += count
            self._samples += samples
            self._changed.notify()

    def __enter__(self) -> StoreReporter:
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
            while not (self._closing and not self._count and not self._to_send):
                self._exchange()
        except BaseException as failure:  # raised by the thread that asks
            self._failure = failure

    def _exchange(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._count or self._to_send or self._closing, POLL_SECONDS)
            count, samples, letters = self._count, self._samples, self._to_send
            self._count, self._samples, self._to_send = 0, [], []
        if samples:
            self._store.publish(samples)
        for text in letters:
            self._store.send(SCORES, text)
        finished = self._store.add_finished(count)  # last: who reads that all are finished finds all published
        if self._passes_scores:
            news = self._store.letters(SCORES, self._seen)
            self._seen += len(news)
            self._places = self._store.begin_places(0)
            with self._changed:
                self._letters += news
        self._finished = finished

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
