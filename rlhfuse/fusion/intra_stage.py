"""Runs one rank's program of a training step: instruction by instruction, exactly as lowered.

The program says what and in which order; this file only knows how. Serial, time-shared and fused training are
the same executor with another schedule, and since every schedule keeps each stage's forwards and backwards in
micro-batch order, gradients accumulate in the same order and come out as the same bits (paper section 5).

Receives of one channel are posted in program order, a few ahead; sends are asynchronous. When an instruction
fails, a RuntimeError shows the rank's program with the failing line marked, and the cause.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from rlhfuse.fusion.p2p import Channels
from rlhfuse.fusion.stopwatch import Stopwatch
from rlhfuse.models.stage import LossFunction, PackedTokens, TrainingStage
from rlhfuse.schedule.action import Action, Kind
from rlhfuse.schedule.lowering import Instruction, Program

RECEIVES_AHEAD = 3  # per channel; enough to hide the posting, few enough to bound the buffers


@dataclass(frozen=True)
class PipelineWork:
    """What one pipeline computes in one step on this rank: its stage, its micro-batches, its loss."""

    stage: TrainingStage
    batches: tuple[PackedTokens, ...]
    loss: LossFunction
    hidden: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ActionSpan:
    """When a computing instruction ran, in `time.perf_counter` seconds."""

    action: Action
    start_seconds: float
    end_seconds: float


class ProgramExecutor:
    """Executes a program against pipelines. One executor per rank and step."""

    def __init__(self, program: Program, pipelines: Mapping[str, PipelineWork], channels: Channels,
                 progress: Callable[[str], None]) -> None:  # fmt: skip
        self._program = program
        self._pipelines = pipelines
        self._channels = channels
        self._progress = progress
        self._outputs: dict[tuple[str, Kind, int], Tensor] = {}  # computed here, waiting to be sent
        self._inputs: dict[tuple[str, Kind, int], tuple[dist.Work, Tensor]] = {}  # on their way here
        self._unposted: dict[int, deque[Instruction]] = defaultdict(deque)
        self._posted: dict[int, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        self._execute = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.SF: self._send,
            Kind.SB: self._send,
            Kind.RF: self._receive,
            Kind.RB: self._receive,
        }

    def run(self) -> list[ActionSpan]:
        """Run the whole program; returns when everything is computed and sent."""
        for instruction in self._program.instructions:
            if instruction.action.kind in (Kind.RF, Kind.RB):
                self._unposted[instruction.peer].append(instruction)
        for peer in self._unposted:
            self._post_ahead(peer)
        watch, marks = Stopwatch(self._channels.device), []
        for position, instruction in enumerate(self._program.instructions):
            self._progress(f"training instruction {position}: {instruction}")
            try:
                start = watch.mark()
                with record_function(f"fused:{instruction}"):
                    self._execute[instruction.action.kind](instruction)
                if instruction.action.kind in (Kind.F, Kind.B):
                    marks.append((instruction.action, start, watch.mark()))
            except Exception as error:
                where = f"rank {self._program.rank}, instruction {position}:\n{self._marked(position)}"
                raise RuntimeError(f"{type(error).__name__}: {error}\n{where}") from error
        self._channels.drain()
        watch.stop()
        return [ActionSpan(action, watch.seconds(start), watch.seconds(end)) for action, start, end in marks]

    def _forward(self, instruction: Instruction) -> None:
        name, _, _, mb = instruction.action
        work = self._pipelines[name]
        out = work.stage.forward(mb, work.batches[mb], self._input(name, Kind.F, mb), work.loss)
        if out is not None:
            self._outputs[name, Kind.F, mb] = out

    def _backward(self, instruction: Instruction) -> None:
        name, _, _, mb = instruction.action
        gradient = self._pipelines[name].stage.backward(mb, self._input(name, Kind.B, mb))
        if gradient is not None:
            self._outputs[name, Kind.B, mb] = gradient

    def _send(self, instruction: Instruction) -> None:
        name, _, kind, mb = instruction.action
        computed = Kind.F if kind is Kind.SF else Kind.B
        self._channels.send(self._outputs.pop((name, computed, mb)), instruction.peer)

    def _receive(self, instruction: Instruction) -> None:
        # A receive stands where its sender is done, which may be before other work of this rank: it is waited for
        # only where its tensor is used, so the rank never idles with work at hand.
        name, _, kind, mb = instruction.action
        self._inputs[name, Kind.F if kind is Kind.RF else Kind.B, mb] = self._posted[instruction.peer].popleft()
        self._post_ahead(instruction.peer)

    def _input(self, name: str, kind: Kind, mb: int) -> Tensor | None:
        """What was received for this action, waited for; else what a neighbouring stage on this rank computed."""
        if (name, kind, mb) in self._inputs:
            work, buffer = self._inputs.pop((name, kind, mb))
            work.wait()
            return buffer
        return self._outputs.pop((name, kind, mb), None)

    def _post_ahead(self, peer: int) -> None:
        while self._unposted[peer] and len(self._posted[peer]) < RECEIVES_AHEAD:
            name, _, _, mb = self._unposted[peer].popleft().action
            work = self._pipelines[name]
            shape = work.stage.stage.hidden_shape(work.batches[mb])
            self._posted[peer].append(self._channels.post_receive(shape, work.dtype, peer))

    def _marked(self, position: int) -> str:
        first = max(position - 4, 0)
        lines = enumerate(self._program.instructions[first : position + 3], start=first)
        return "\n".join(f"  {i} {line}{'   <-- here' if i == position else ''}" for i, line in lines)
