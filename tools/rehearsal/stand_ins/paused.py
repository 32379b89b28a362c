"""A sample of each instance that pauses for a tool: parked at the end of a turn, it observes an answer and goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhfuse.fusion.inter.tools import Answer
from rlhfuse.run.sampling.tool_caller import ToolStats

OBSERVED = 5  # tokens of an answer
LONGEST_PAUSE = 3  # step boundaries; each pause is drawn from the sample's id


class DrawnPauses:
    """In the place of a ToolCaller: the first turn of a sample asks, and is answered some step boundaries later."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}  # sample id -> step boundaries until its answer
        self.answered = 0

    def begin(self, iteration: str, prompts: Sequence[Any]) -> None:
        self._left.clear()

    def asks(self, turn: Sequence[int], number: int) -> bool:
        return number == 0

    def submit(self, sample_id: int, number: int, turn: Sequence[int], room: int) -> None:
        self._left[sample_id] = 1 + sample_id % LONGEST_PAUSE

    def answers(self) -> list[Answer]:
        self._left = {sample: left - 1 for sample, left in self._left.items()}
        return [Answer(sample, (1,) * OBSERVED) for sample, left in self._left.items() if left <= 0]

    def delivered(self, sample_ids: Sequence[int]) -> None:
        self.answered += len(sample_ids)
        for sample in sample_ids:
            del self._left[sample]

    def hand_over(self, sample_ids: Sequence[int], store: Any) -> None:
        """Nobody who moves pauses: the trigger waits for those that do."""

    def adopt(self, sample_ids: Sequence[int], store: Any) -> None:
        pass

    def waiting(self) -> str:
        return ""

    def take_stats(self) -> ToolStats:
        return ToolStats()

    def close(self) -> None:
        pass
