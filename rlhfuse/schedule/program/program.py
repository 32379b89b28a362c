"""What every rank does in one fused training step, as a value that prints one line per rank and parses back.

    model actor layout d1t1p2
    rank 0: critic:1RF0<1 actor:0F0 actor:0SF0>1 ... actor:0RB0<1 actor:0B0 actor:0RG actor:0ST

An instruction is an action with its peer: `actor:0SF3>1` sends to rank 1, `actor:1RF3<0` receives from rank 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlhfuse.base.errors import InputError
from rlhfuse.schedule.ir.action import RECEIVES, SENDS, Action
from rlhfuse.schedule.ir.schedule import grid

_INSTRUCTION = re.compile(r"([^<>]+)(?:([<>])(\d+))?")


@dataclass(frozen=True)
class Instruction:
    """One action of a rank. `peer` is the other global rank of a send or receive, None in all other kinds."""

    action: Action
    peer: int | None = None

    def __str__(self) -> str:
        if self.peer is None:
            return str(self.action)
        return f"{self.action}{'>' if self.action.kind in SENDS else '<'}{self.peer}"

    @staticmethod
    def parse(text: str) -> Instruction:
        """Inverse of `str`. Raises InputError on any other text."""
        match = _INSTRUCTION.fullmatch(text.strip())
        if not match:
            raise InputError(f"instruction {text!r} is not of the form actor:0F3, actor:0SF3>1 or actor:1RF3<0")
        action = Action.parse(match[1])
        mark = ">" if action.kind in SENDS else "<" if action.kind in RECEIVES else None
        if match[2] != mark:
            raise InputError(f"instruction {text!r}: kind {action.kind} takes {mark + 'RANK' if mark else 'no peer'}")
        return Instruction(action, int(match[3]) if mark else None)


@dataclass(frozen=True)
class Program:
    """What one global rank does in one fused training step, in order."""

    rank: int
    instructions: tuple[Instruction, ...]

    def text(self) -> str:
        """One line; `parse` is the inverse."""
        return grid({self.rank: self.instructions}, name="rank")

    @staticmethod
    def parse(text: str) -> Program:
        """Read what `text` wrote. Raises InputError on a malformed line."""
        match = re.fullmatch(r"rank (\d+):(.*)", text.strip())
        if not match:
            raise InputError(f"program {text!r} must begin with 'rank N:'")
        return Program(int(match[1]), tuple(Instruction.parse(word) for word in match[2].split()))


@dataclass(frozen=True)
class Programs(Mapping[int, Program]):
    """The programs of all ranks, a mapping from global rank to Program; `layouts` has the layout of each model."""

    layouts: Mapping[str, str]
    by_rank: Mapping[int, Program]

    def __getitem__(self, rank: int) -> Program:
        return self.by_rank[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self.by_rank)

    def __len__(self) -> int:
        return len(self.by_rank)

    def text(self) -> str:
        """All of it, a line for each model and each rank."""
        lines = [f"model {model} layout {layout}" for model, layout in self.layouts.items()]
        return "\n".join(lines + [program.text() for program in self.by_rank.values()])

    def grid(self, rank: int | None = None, position: int = 0) -> str:
        """One line per rank; the instruction at `position` of `rank` is pointed out."""
        rows = {number: program.instructions for number, program in sorted(self.by_rank.items())}
        return grid(rows, None if rank is None else (rank, position), "rank")
