"""Samples between two turns: their calls begin as turns end, and answers come in while others decode.

The leader that saw a turn end runs its calls. Answers reach all tensor ranks at one step boundary: the leader announces
how many numbers they are with its other decisions, and they follow where the announcement is in force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhfuse.base.clock import Clock
from rlhfuse.fusion.inter.iteration_store import IterationStore
from rlhfuse.fusion.inter.report import RankEvents
from rlhfuse.fusion.inter.tensor_parallel_group import TensorParallelGroup
from rlhfuse.gen.core.sequence import GenerationResult
from rlhfuse.gen.engine import Engine
from rlhfuse.monitor.heartbeat import Waiting, WaitingOutside


@dataclass(frozen=True)
class Answer:
    """What a sample's calls gave, as tokens; none where they failed or had no room: the sample ends."""

    sample_id: int
    tokens: tuple[int, ...]
    failed: bool = False  # the sample keeps its place, and counts nowhere
    seconds: float = 0.0  # from the turn's end to the answer


class Tools(Protocol):
    """What happens between two turns of a sample. `asks` is called on all ranks, the rest on instances' leaders."""

    def asks(self, turn: Sequence[int], number: int) -> bool:
        """Whether the turn, its drawn tokens, calls tools and may go on; False: the sample is finished.

        A pure function of these and the settings. `number`: of the turn in its sample, from 0.
        """
        ...

    def submit(self, sample_id: int, number: int, turn: Sequence[int], room: int) -> None:
        """Begin the turn's calls; returns at once. `room`: tokens that an observation may have."""

    def answers(self) -> list[Answer]:
        """Those that are there and not delivered, of adopted samples too; returns at once."""
        ...

    def delivered(self, sample_ids: Sequence[int]) -> None:
        """The answers of these samples have been taken, or nobody wants them any more."""

    def hand_over(self, sample_ids: Sequence[int], store: IterationStore) -> None:
        """These samples leave: their states, and answers as they come, go into the store."""

    def adopt(self, sample_ids: Sequence[int], store: IterationStore) -> None:
        """These samples have come: what others handed over is taken from the store as it comes."""

    def waiting(self) -> str:
        """The call of a sample here, adopted ones too, that is under way for the longest time; "" if there is none.

        As "tool f of sample s, turn 3 (12 s)".
        """
        ...


class Pauses:
    """The paused samples of one instance, on one of its ranks."""

    def __init__(
        self,
        tools: Tools,
        engine: Engine,
        group: TensorParallelGroup,
        events: RankEvents,
        clock: Clock,
    ) -> None:
        self._tools, self._engine, self._group, self._events, self._clock = tools, engine, group, events, clock
        self._begin = clock.now()
        self._ready: list[Answer] = []  # announced, the leader's
        self.failed: set[int] = set()  # ids of samples that end because their calls failed

    def finished(self, results: Sequence[GenerationResult]) -> list[GenerationResult]:
        """Those of an engine's results that are final; of the others the calls are now under way."""
        ended = []
        for result in results:
            turn, number = result.tokens[result.turn_start :], len(result.observed)
            if result.finish_reason != "turn":
                ended.append(result)
            elif not self._tools.asks(turn, number):
                ended.append(self._engine.close(result.sample_id))
            elif self._group.is_leader:
                self._tools.submit(result.sample_id, number, turn, self._engine.parked[result.sample_id].room)
        if self._group.is_leader:
            self._events.ended |= dict.fromkeys((r.sample_id for r in ended), self._clock.now() - self._begin)
        return ended

    def announce(self) -> int:
        """How many numbers the leader will send where this is in force; all ranks pass it on, others' are not heard."""
        if self._ready or not self._group.is_leader:
            return 0  # one announcement at a time
        answers = self._tools.answers()
        self._ready = [answer for answer in answers if answer.sample_id in self._engine.parked]
        if unwanted := [answer.sample_id for answer in answers if answer.sample_id not in self._engine.parked]:
            self._tools.delivered(unwanted)  # of samples that were dropped with their group
        return sum(3 + len(answer.tokens) for answer in self._ready)

    def deliver(self, count: int) -> None:
        """Let samples go on whose answers were announced as so many numbers; a collective, if there are any."""
        if not count:
            return
        flat = [n for one in self._ready for n in (one.sample_id, one.failed, len(one.tokens), *one.tokens)]
        numbers, at = self._group.broadcast(*(flat or [0] * count)), 0
        for answer in self._ready:
            self._note(answer)
        while at < count:
            sample, failed, length = numbers[at : at + 3]
            at += 3 + length
            if sample not in self._engine.parked:
                continue  # dropped since the announcement
            if failed:
                self.failed.add(sample)
            self._engine.observe(sample, () if failed else numbers[at - length : at])
        if self._ready:
            self._tools.delivered([answer.sample_id for answer in self._ready])
            self._ready = []

    def stop(self) -> None:
        """What was announced is not delivered here: it goes where its samples go, or is announced again."""
        self._ready = []

    def waiting(self, where: str) -> Waiting:
        """What this rank does while all samples here wait; at the leader with the words of the tools."""
        told = f"{where}: {len(self._engine.parked)} samples wait for tools"
        call = self._tools.waiting() if self._group.is_leader else ""
        return WaitingOutside(f"{told}, the first for {call}") if call else Waiting(told)

    def _note(self, answer: Answer) -> None:
        """Write down what the leader is about to deliver."""
        if seq := self._engine.parked.get(answer.sample_id):
            number, now = len(seq.observed), self._clock.now()
            self._events.pauses[answer.sample_id, number] = answer.seconds
            self._clock.observe("pause", answer.seconds, len(answer.tokens))
            self._clock.span("call", now - answer.seconds, now, sample=answer.sample_id, turn=number)
