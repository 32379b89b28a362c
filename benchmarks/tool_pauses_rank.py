"""One rank of the benchmark of tools: that of inter_stage.py, with a tool whose seconds and answers are scripted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from inter_stage_rank import FIRST_TOKEN, FusionRank

from rlhfuse.base.clock import Clock
from rlhfuse.decisions.instance_limits import InstanceLimits
from rlhfuse.fusion.inter.iteration_store import IterationStore
from rlhfuse.fusion.inter.tools import Answer
from rlhfuse.gen.engine import Engine
from rlhfuse.simulator.lengths import SampleLengths

CLOCK = Clock()
TURN_TOKENS = 24  # of a turn, mean: as many tokens end one as that takes
ANSWER_TOKENS = 4, 16
PAUSE_SECONDS = 0.05, 0.35


class Call(NamedTuple):
    number: int
    until: float  # by the clock
    room: int


class ScriptedTool:
    """Takes seconds and gives tokens by sample and turn alone; where all wait for all, no answer comes sooner."""

    def __init__(self, engine: Engine, vocab: int, seed: int) -> None:
        self._engine, self._vocab, self._seed = engine, vocab, seed
        self._calls: dict[int, Call] = {}  # by sample
        self._store: IterationStore | None = None  # of the calls of samples that have come
        self.in_rounds = False

    def _draws(self, sample_id: int, number: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, sample_id, number))

    def _seconds(self, sample_id: int, number: int) -> float:
        return float(self._draws(sample_id, number).uniform(*PAUSE_SECONDS))

    def asks(self, turn: Sequence[int], number: int) -> bool:
        return True

    def submit(self, sample_id: int, number: int, turn: Sequence[int], room: int) -> None:
        self._calls[sample_id] = Call(number, CLOCK.now() + self._seconds(sample_id, number), room)

    def answers(self) -> list[Answer]:
        if self._store:
            for sample_id in self._engine.parked.keys() - self._calls.keys():
                if found := self._store.find(f"call {sample_id}"):
                    self._calls[sample_id] = Call(*json.loads(found))
        now = CLOCK.now()
        if self.in_rounds and (self._engine.has_unfinished() or any(call.until > now for call in self._calls.values())):
            return []
        return [self._answer(sample_id, call) for sample_id, call in self._calls.items() if call.until <= now]

    def _answer(self, sample_id: int, call: Call) -> Answer:
        draws, least = self._draws(sample_id, call.number), FIRST_TOKEN
        seconds = float(draws.uniform(*PAUSE_SECONDS))
        tokens = tuple(draws.integers(least, self._vocab, int(draws.integers(*ANSWER_TOKENS, endpoint=True))).tolist())
        return Answer(sample_id, tokens if len(tokens) <= call.room else (), seconds=seconds)

    def delivered(self, sample_ids: Sequence[int]) -> None:
        for sample_id in sample_ids:
            self._calls.pop(sample_id, None)

    def hand_over(self, sample_ids: Sequence[int], store: IterationStore) -> None:
        for sample_id in sample_ids:
            if call := self._calls.pop(sample_id, None):
                store.put(f"call {sample_id}", json.dumps(call).encode())

    def adopt(self, sample_ids: Sequence[int], store: IterationStore) -> None:
        self._store = store

    def waiting(self) -> str:
        return "the scripted tool" if self._calls else ""

    def begin(self, in_rounds: bool) -> None:
        """Nothing is under way."""
        self._calls, self._store, self.in_rounds = {}, None, in_rounds


class ToolRank(FusionRank):
    """The models of one size on this rank, whose samples call the tool."""

    def __init__(self, rank: int, sizes: dict[str, Any], seed: int) -> None:
        super().__init__(rank, sizes, seed)
        self.tool = ScriptedTool(self.engine, self.sizes.vocab, seed)
        self.inter_stage = replace(self.inter_stage, tools=self.tool)

    def load(self, lengths: SampleLengths, seed: int) -> None:
        """Take a batch: random prompts, responses as long, what they observe included; some tokens end a turn."""
        super().load(lengths, seed)
        ends = tuple(range(FIRST_TOKEN, FIRST_TOKEN + max(1, self.sizes.vocab // TURN_TOKENS)))
        self.requests = [
            replace(request, params=replace(request.params, stop_token_ids=ends, turns=True))
            for request in self.requests
        ]

    def run(self, threshold: int, limits: InstanceLimits, in_rounds: bool = False) -> dict[str, Any]:
        self.tool.begin(in_rounds)
        return super().run(threshold, limits)
