"""What the inter-stage code of a simulated rank uses: an engine, models, and the processes of rewards and tools.

Everything that they give is a function of a sample's id and the life's seed (`Script`), so that the serial run can be
written down without running it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch

from rlhfuse.base.sample_ids import sample_origin
from rlhfuse.data.call_pool import Outcome
from rlhfuse.data.chat_turns import AskedCall
from rlhfuse.gen.core.sequence import GenerationResult
from rlhfuse.parallel.background import Background
from rlhfuse.tasks.migration import UnfinishedSample
from testkit.world.simulation import SimulatedGroup, Simulation

END, CALL = 1, 2  # the token that ends a sample, and one that ends a turn and calls a tool


@dataclass(frozen=True)
class Script:
    """What samples say, and what is said of them."""

    seed: int
    mean: int  # tokens of a turn
    turns: int  # at most
    equal: float  # part of the groups whose scores are equal
    failing: float = 0.0  # part of tool calls that fail
    fails: bool = False  # the sample of such a call, which else is told
    _turns: dict = field(default_factory=dict, compare=False, repr=False)

    def number(self, *key: Any) -> int:
        return crc32(repr((self.seed, *key)).encode())

    def turn(self, sample: int, number: int) -> tuple[int, ...]:
        if (sample, number) not in self._turns:
            self._turns[sample, number] = self._turn(sample, number)
        return self._turns[sample, number]

    def _turn(self, sample: int, number: int) -> tuple[int, ...]:
        drawn = 1 + self.number("length", sample, number) % (2 * self.mean)
        last = number + 1 >= 1 + self.number("turns", sample) % self.turns
        return (*(3 + self.number(sample, number, i) % 50 for i in range(drawn - 1)), END if last else CALL)

    def answer(self, sample: int, number: int) -> tuple[str, str]:
        """The text that a tool gives, or why it fails."""
        if self.number("fails", sample, number) % 1000 < 1000 * self.failing:
            return "", f"tool of {sample}.{number} failed"
        return f"{self.number('answer', sample, number) % 97}", ""

    def response(self, sample: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], bool]:
        """All tokens, runs of them that were observed, and whether the sample failed."""
        tokens, observed, number = self.turn(sample, 0), (), 0
        while tokens[-1] == CALL:
            text, error = self.answer(sample, number)
            if error and self.fails:
                return tokens, observed, True
            seen, number = observation([text or error]), number + 1
            observed += ((len(tokens), len(tokens) + len(seen)),)
            tokens += seen + self.turn(sample, number)
        return tokens, observed, False

    def score(self, sample: int) -> float:
        """The function's."""
        _, place, copy = sample_origin(sample)
        equal = self.number("equal", place) % 1000 < 1000 * self.equal
        return 0.5 if equal else float(copy % 3) + len(self.response(sample)[0]) % 2


def observation(texts: Sequence[str]) -> tuple[int, ...]:
    return tuple(60 + crc32(text.encode()) % 40 for text in texts for _ in range(2))


class Chat:
    """How turns call tools and how answers are written."""

    longest = 8  # characters of a token

    def asked(self, turn: Sequence[int]) -> list[AskedCall]:
        return [AskedCall("f", {"n": int(turn[0])})] if turn[-1] == CALL else []

    def shortened(self, text: str, most: int, side: str) -> str:
        return text

    def observation(self, ended: int, names: Sequence[str], texts: Sequence[str]) -> tuple[int, ...]:
        return observation(texts)

    def messages(self, turns: Sequence[Any], said: Sequence[Any]) -> list[Any]:
        assert len(said) >= len(turns) - 1, "the answers of a sample have not followed it"
        return [text for turn in said for _, text in turn]


@dataclass(eq=False)
class Sample:
    sample_id: int
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    observed: list[tuple[int, int]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)  # of the turn
    room: int = 1000

    def result(self, reason: Any) -> GenerationResult:
        facts = tuple(self.tokens), tuple(0.1 * i for i in range(len(self.tokens))), reason
        return GenerationResult(self.sample_id, self.prompt, *facts, observed=tuple(self.observed))

    def copy(self) -> Sample:
        return Sample(self.sample_id, self.prompt, [*self.tokens], [*self.observed], [*self.left])


class StandInEngine:
    """Draws what the script says, a token a step for as many samples as have rows; a step of several tensor ranks is a
    collective, and they must have the same samples."""

    def __init__(
        self, simulation: Simulation, script: Script, group: SimulatedGroup, rows: int, seconds: float
    ) -> None:
        self._simulation, self._script, self._group, self._seconds = simulation, script, group, seconds
        self._samples: dict[int, Sample] = {}
        self.parked: dict[int, Sample] = {}
        self._ended: list[GenerationResult] = []
        self._flight: list[GenerationResult] | None = None  # of a step that is launched ahead
        self.options = SimpleNamespace(max_sequences=rows, block_tokens=4)
        self.spec = SimpleNamespace(kv_bytes_per_token=lambda _: 8, kv_heads=2)
        self.dtype, self.free_blocks, self.paused = torch.float32, 1000, False
        self.forward = SimpleNamespace(recorded_shapes=0, recording_seconds=0.0)
        self.last_step = SimpleNamespace(batch=0)

    @property
    def scheduler(self) -> Any:
        return SimpleNamespace(waiting=[*self._running][self.options.max_sequences :])

    @property
    def _running(self) -> list[Sample]:
        return [sample for number, sample in self._samples.items() if number not in self.parked]

    samples = property(lambda self: len(self._samples))
    sample_ids = property(lambda self: tuple(self._samples))

    def has_unfinished(self) -> bool:
        return len(self._samples) > len(self.parked) or bool(self._ended)

    def add(self, sample_id: int, prompt: Sequence[int], params: Any) -> None:
        assert sample_id not in self._samples and not self.paused
        self._samples[sample_id] = Sample(sample_id, tuple(prompt), left=[*self._script.turn(sample_id, 0)])

    def take(self, sample: Sample) -> None:
        assert sample.sample_id not in self._samples
        self._samples[sample.sample_id] = sample
        if not sample.left:
            self.parked[sample.sample_id] = sample

    def abort(self, sample_id: int) -> None:
        del self._samples[sample_id]
        self.parked.pop(sample_id, None)

    def settle(self) -> list[GenerationResult]:
        ended, self._ended = self._ended, []
        return ended

    def step(self) -> list[GenerationResult]:
        running = [sample.sample_id for sample in self._running][: self.options.max_sequences]
        state = crc32(repr((running, [len(self._samples[n].tokens) for n in running], [*self.parked])).encode())
        if self._group.size > 1:
            (leader,) = self._group.broadcast(state)
            assert leader == state, "tensor ranks have not taken the same steps"
        self._simulation.pause(self._simulation.delay(self._seconds))
        ended = self.settle()
        for sample in (self._samples[number] for number in running):
            sample.tokens.append(sample.left.pop(0))
            if sample.left:
                continue
            if sample.tokens[-1] == CALL:
                self.parked[sample.sample_id] = sample
                ended.append(sample.result("turn"))
            else:
                del self._samples[sample.sample_id]
                ended.append(sample.result("stop"))
        return ended

    def close(self, sample_id: int, reason: Any = "stop") -> GenerationResult:
        del self.parked[sample_id]
        return self._samples.pop(sample_id).result(reason)

    def observe(self, sample_id: int, tokens: Sequence[int]) -> None:
        if not tokens:
            self._ended.append(self.close(sample_id, "length"))
            return
        sample = self.parked.pop(sample_id)
        sample.observed.append((len(sample.tokens), len(sample.tokens) + len(tokens)))
        sample.tokens += tokens
        sample.left = [*self._script.turn(sample_id, len(sample.observed))]

    def unfinished(self, instance: int = 0) -> list[UnfinishedSample]:
        return [UnfinishedSample(n, instance, len(s.tokens) + 1, len(s.tokens)) for n, s in self._samples.items()]

    @contextmanager
    def export_sequences(self, sample_ids: Sequence[int], modes: Any) -> Iterator[list[Sample]]:
        yield [self._samples[number] for number in sample_ids]
        for number in sample_ids:
            self.abort(number)

    def pause(self) -> None:
        assert not self._samples, "a rank that has samples cannot leave generation"
        self.paused = True

    def resume(self) -> None:
        self.paused = False


class StandInModel:
    """A critic or reward model and its offloaded weights: a token's output is its number."""

    tp_group = None

    def __init__(self, simulation: Simulation, fails: bool = False, arrival: Background | None = None) -> None:
        """`arrival`: brings the weights to the host meanwhile."""
        self._simulation, self._fails, self._loaded, self._arrival = simulation, fails, 0, arrival
        self.stage = self.offloaded = self

    def forward(self, packed: Any, mask: Any) -> torch.Tensor:
        assert self._loaded == 2, "the weights are not there"
        self._simulation.pause(self._simulation.delay(2e-3))
        return packed.tokens.float()

    def allocate(self) -> None:
        assert not self._loaded
        self._loaded = 1

    def await_values(self) -> None:
        if self._arrival:
            self._arrival.wait()

    def copy_in(self) -> None:
        assert not self._arrival or self._arrival.done, "the weights have not arrived"
        self._simulation.pause(self._simulation.delay(2e-2))
        if self._fails:
            raise OSError("weights cannot be read")
        self._loaded = 2

    def release(self) -> None:
        self._loaded = 0


class StandInPool:
    """Processes that make calls, at once and in any order. `value` says what a call comes to: its value, and what
    failed."""

    at_once = 1

    def __init__(self, simulation: Simulation, seconds: float, value: Any) -> None:
        self._simulation, self._seconds, self._value = simulation, seconds, value
        self._due: list[tuple[float, Any]] = []

    def submit(self, calls: Sequence[Any]) -> None:
        now, delay = self._simulation.now, self._simulation.delay
        self._due += [(now + delay(self._seconds), call) for call in calls]

    def outcomes(self, seconds: float = 0.0) -> list[Outcome]:
        if seconds:
            first = min((due for due, _ in self._due), default=self._simulation.now + seconds)
            self._simulation.pause(max(1e-4, first - self._simulation.now))
        now = self._simulation.now
        ready = [call for due, call in self._due if due <= now]
        self._due = [(due, call) for due, call in self._due if due > now]
        return [Outcome(call, *self._value(call), 1e-3) for call in ready]

    def under_way(self) -> int:
        return len(self._due)

    def close(self) -> None:
        self._due.clear()
