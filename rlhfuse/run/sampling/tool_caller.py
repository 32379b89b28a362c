"""The tools of a run as the runtime asks for them: turns in, observed tokens out.

What a turn asks for is a function of its tokens, known on all ranks; an instance's leader has the processes, and the
journal, which comes first: a call that it knows is not made. An environment's state is here, as the bytes of a value.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Thread

from rlhfuse.base.clock import Clock
from rlhfuse.base.errors import InputError, RewardError
from rlhfuse.base.sample_ids import sample_origin
from rlhfuse.config.settings import RunConfig
from rlhfuse.data.call_pool import CallPool
from rlhfuse.data.chat_turns import AskedCall
from rlhfuse.data.prompts import Prompt
from rlhfuse.data.tool_journal import JournalEntry, ToolJournal
from rlhfuse.data.tool_set import ToolCall, ToolSet
from rlhfuse.fusion.inter.iteration_store import LAST_PAUSE_SECONDS, IterationStore
from rlhfuse.fusion.inter.tools import Answer
from rlhfuse.run.run_tools import RunTools

LEFT = "tools/"  # and the id of a sample that left: what is sent after it
TIMEOUT = "rollout.multi_turn.timeout_seconds"


@dataclass
class ToolStats:
    """Calls that a leader had answered in an iteration, by sample, and those of them that failed."""

    calls: dict[int, int] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # tool -> its last error
    answered: set[str] = field(default_factory=set)  # tools


@dataclass(eq=False)
class _Turn:
    """A turn whose calls are under way."""

    sample_id: int
    number: int
    ended: int  # the token that ended it
    asked: Sequence[AskedCall]
    room: int
    began: float
    texts: dict[int, str] = field(default_factory=dict)  # by place among the asked
    begun: int = 0  # of the asked
    failed: bool = False


class ToolCaller:
    """A `Tools` of one rank; only with `leads` its calls may be asked for. To be closed."""

    def __init__(
        self,
        config: RunConfig,
        tools: RunTools,
        rank: int,
        folder: Path,
        leads: bool,
        first: int | None = None,
        clock: Clock = Clock(),
        pool: Callable[..., CallPool] = CallPool,
    ) -> None:
        """`folder`: the run's, for the journal; `first` as the journal has it. Raises InputError where that cannot be
        read or written."""
        self._settings, self._seed = config.rollout.multi_turn, config.trainer.seed
        self._tools, self._chat = tools.tools, tools.turns
        self._pool: CallPool | None = None
        if leads:
            settings = self._settings
            characters = settings.max_tool_response_length * self._chat.longest
            path, limit = (settings.function_tool_path, characters), settings.timeout_seconds
            self._journal = ToolJournal(folder, rank, first, settings.replay)
            self._pool = pool(ToolSet.load, path, settings.workers, limit, TIMEOUT)
        self._clock, self._lock = clock, clock.Lock()  # what follows is the main thread's and the mail's
        self._mail: Thread | None = None
        self._stats = ToolStats()
        self.begin("", ())

    def begin(self, iteration: str, prompts: Sequence[Prompt]) -> None:
        """From now on samples are of these prompts, at their places in the draw; `iteration` names them for the
        journal."""
        if self._mail:
            self._mail.join()
        self._iteration, self._prompts, self._mail = iteration, prompts, None
        self._turns: dict[int, _Turn] = {}  # by sample
        self._under_way: dict[int, tuple[_Turn, ToolCall]] = {}  # calls, by the identity of a call
        self._ready: dict[int, Answer] = {}
        self._states: dict[int, bytes | None] = {}
        self._said: dict[int, list[list[tuple[str, str]]]] = {}  # tool and text of each answer, by turn
        self._handed: set[int] = set()  # samples that left before their answer was there
        self._awaited: set[int] = set()  # samples that came, of which nothing was found yet
        self._store: IterationStore | None = None
        self._looked = 0.0  # when

    # what generation asks ------------------------------------------------------------------------------------------

    def asks(self, turn: Sequence[int], number: int) -> bool:
        """Whether the turn (its drawn tokens) calls tools and may go on."""
        return number + 1 < self._settings.max_assistant_turns and bool(self._chat.asked(turn))

    def submit(self, sample_id: int, number: int, turn: Sequence[int], room: int) -> None:
        """Begin its calls; returns at once. Raises InputError where the journal cannot be written."""
        with self._lock:
            self._look_for([sample_id])
            asked = self._chat.asked(turn)[: self._settings.max_parallel_calls]
            made = self._turns[sample_id] = _Turn(sample_id, number, turn[-1], asked, room, self._clock.now())
            self._go_on(made)

    def answers(self) -> list[Answer]:
        """Those that are there and not delivered."""
        with self._lock:
            self._collect()
            if (now := self._clock.now()) > self._looked + LAST_PAUSE_SECONDS:
                self._looked = now
                self._look_for([*self._awaited])
            return list(self._ready.values())

    def delivered(self, sample_ids: Sequence[int]) -> None:
        """The engine has the answers of these samples."""
        with self._lock:
            for sample in sample_ids:
                self._ready.pop(sample, None)

    def hand_over(self, sample_ids: Sequence[int], store: IterationStore) -> None:
        """Send after each its state, and its answer once that is there."""
        with self._lock:
            self._handed = {sample for sample in sample_ids if sample in self._turns}
            for sample in sample_ids:
                if sample not in self._handed:
                    self._send(store, sample)
            if self._handed:
                mine = store.reconnect()
                self._mail = self._clock.Thread(target=self._send_late, args=(mine,), name="tools-mail", daemon=True)
                self._mail.start()

    def adopt(self, sample_ids: Sequence[int], store: IterationStore) -> None:
        """From now on these samples' states, and answers to calls that others began, are looked for."""
        with self._lock:
            self._awaited |= set(sample_ids)
            self._store = store

    def waiting(self) -> str:
        """The call that is waited for longest; "" if none."""
        with self._lock:
            if oldest := min(self._turns.values(), key=lambda turn: turn.began, default=None):
                left = [call.tool for place, call in enumerate(oldest.asked) if place not in oldest.texts]
                waited = self._clock.now() - oldest.began
                return f"tool {left[0]} of sample {oldest.sample_id}, turn {oldest.number} ({waited:.0f} s)"
            return f"a tool of sample {min(self._awaited)}, called elsewhere" if self._awaited else ""

    # what else a run asks --------------------------------------------------------------------------------------------

    def state(self, sample_id: int) -> bytes | None:
        """State of the environment of a sample that ended here; None for a new one."""
        with self._lock:
            self._look_for([sample_id])
            return self._states.get(sample_id)

    def said(self, sample_id: int) -> list[list[tuple[str, str]]]:
        """Tool and text of each answer, for each turn of a sample that ended here."""
        with self._lock:
            self._look_for([sample_id])
            return self._said.get(sample_id, [])

    def take_stats(self) -> ToolStats:
        """Calls of all rounds since the last time."""
        taken, self._stats = self._stats, ToolStats()
        return taken

    def under_way(self) -> int:
        """Calls that have not ended."""
        return self._pool.under_way() if self._pool else 0

    def close(self) -> None:
        """End the processes."""
        if self._pool:
            self._pool.close()
            self._journal.close()

    # calls -----------------------------------------------------------------------------------------------------------

    def _go_on(self, turn: _Turn) -> None:
        """Begin calls that can be: of an environment one after another, each on the state that the last one left."""
        in_turn = self._tools.environment is not None
        while turn.begun < len(turn.asked) and not turn.failed and (not in_turn or turn.begun == len(turn.texts)):
            turn.begun += 1
            self._begin(turn, turn.begun - 1)
        if self._turns.get(turn.sample_id) is turn and (turn.failed or len(turn.texts) == len(turn.asked)):
            del self._turns[turn.sample_id]
            self._ready[turn.sample_id] = self._answer(turn)

    def _begin(self, turn: _Turn, place: int) -> None:
        """Make a call, unless it cannot be made or the journal knows it."""
        asked, sample = turn.asked[place], turn.sample_id
        if fault := asked.fault or self._tools.fault(asked.tool, asked.arguments):
            turn.texts[place] = fault
            return
        number = turn.number * self._settings.max_parallel_calls + place
        row = self._prompts[sample_origin(sample)[1]].row
        state, source = self._states.get(sample), self._tools.digest
        call = ToolCall(sample, number, asked.tool, asked.arguments, self._seed, row, state, source)
        if known := self._journal.find(self._iteration, call):
            self._take(turn, known)
            return
        assert self._pool, "a leader calls"
        self._under_way[id(call)] = turn, call
        self._pool.submit([call])

    def _collect(self) -> None:
        """Journal what calls came to, then take it in."""
        assert self._pool, "a leader calls"
        for outcome in self._pool.outcomes() if self._under_way else ():
            call: ToolCall = outcome.call
            turn, _ = self._under_way.pop(id(call), (None, None))
            if turn is None:  # of an iteration that did not wait for it
                continue
            if outcome.lost:
                what = f"tool {call.tool} of sample {call.sample_id}"
                raise RewardError(f"{what} was not answered: {outcome.error.removeprefix('Error: ')}")
            state, text = outcome.value if not outcome.error else (call.state, outcome.error)
            text = self._shortened(text.encode(errors="replace").decode())
            entry = JournalEntry.of(self._iteration, call, text, outcome.error, outcome.seconds, state)
            self._journal.append(entry)
            self._take(turn, entry)
            self._go_on(turn)

    def _take(self, turn: _Turn, entry: JournalEntry) -> None:
        sample, stats = turn.sample_id, self._stats
        turn.texts[entry.number - turn.number * self._settings.max_parallel_calls] = entry.answer
        self._states[sample] = entry.state_bytes
        stats.calls[sample] = stats.calls.get(sample, 0) + 1
        if entry.error:
            stats.failures[sample] = stats.failures.get(sample, 0) + 1
            stats.failed[entry.tool] = entry.error
            turn.failed = self._settings.on_tool_failure == "fail"
        else:
            stats.answered.add(entry.tool)

    def _shortened(self, text: str) -> str:
        settings = self._settings
        return self._chat.shortened(text, settings.max_tool_response_length, settings.tool_response_truncate_side)

    def _answer(self, turn: _Turn) -> Answer:
        waited = self._clock.now() - turn.began
        if turn.failed:
            return Answer(turn.sample_id, (), True, waited)
        tools = [call.tool for call in turn.asked]
        texts = [self._shortened(turn.texts[place]) for place in range(len(turn.asked))]
        self._said.setdefault(turn.sample_id, []).append([*zip(tools, texts)])
        tokens = self._chat.observation(turn.ended, tools, texts)
        return Answer(turn.sample_id, tokens if len(tokens) <= turn.room else (), False, waited)

    # samples that move -----------------------------------------------------------------------------------------------

    def _send(self, store: IterationStore, sample: int) -> None:
        state, answer = self._states.get(sample), self._ready.pop(sample, None)
        kept = None if state is None else base64.b64encode(state).decode()
        told = [kept, asdict(answer) if answer else None, self._said.get(sample, [])]
        store.put(LEFT + str(sample), json.dumps(told).encode())

    def _send_late(self, store: IterationStore) -> None:
        """Send the answers of samples that left as they come, in a thread of its own."""
        try:
            while self._handed:
                with self._lock:
                    self._collect()
                    for sample in self._handed & self._ready.keys():
                        self._send(store, sample)
                        self._handed.discard(sample)
                self._clock.sleep(LAST_PAUSE_SECONDS)
        except BaseException as failure:  # raised where they are waited for
            for sample in self._handed:
                store.put(LEFT + str(sample), json.dumps(str(failure)).encode())

    def _look_for(self, samples: Sequence[int]) -> None:
        """Take in what others sent about those of these samples that came."""
        for sample in samples:
            if sample in self._awaited and self._store and (data := self._store.find(LEFT + str(sample))):
                self._awaited.discard(sample)
                if isinstance(said := json.loads(data), str):
                    raise InputError(f"sample {sample}, whose tools were called elsewhere: {said}")
                state, answer, self._said[sample] = said
                self._states[sample] = None if state is None else base64.b64decode(state)
                if answer:
                    self._ready[sample] = Answer(**answer | {"tokens": tuple(answer["tokens"])})
