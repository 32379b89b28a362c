"""Runs one rank's program of a training step, instruction by instruction, exactly as lowered (paper section 5).

Serial, time-shared and fused training are this executor with another schedule. Every schedule keeps each stage's
forwards and backwards in micro-batch order, so gradients accumulate in one order and come out as the same bits.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from rlhfuse.base.clock import Clock, Piece, Span
from rlhfuse.base.errors import InputError
from rlhfuse.fusion.intra.p2p import Channels
from rlhfuse.fusion.intra.step_report import StepReport, Stopwatch
from rlhfuse.models.stage import LossFunction, PackedTokens, TrainingStage
from rlhfuse.monitor.heartbeat import Waiting
from rlhfuse.parallel.optimizer import ModelOptimizer, StepResult
from rlhfuse.schedule.ir.action import RECEIVES, SENDS, Action, Kind
from rlhfuse.schedule.program.program import Instruction, Program
from rlhfuse.schedule.program.receive_slots import receive_slots

Key = tuple[str, Kind, int, int]  # (pipeline, F or B, stage that computes, micro-batch)


@dataclass(frozen=True)
class PipelineParts:
    """What a pipeline has on this rank for the whole run: its stages by number, and what steps their weights."""

    model: str
    stages: Mapping[int, TrainingStage]
    optimizer: ModelOptimizer
    dtype: torch.dtype


@dataclass(frozen=True)
class PipelineWork:
    """What a pipeline computes in one step: micro-batches, loss of its last stage, learning rate (None: no step)."""

    rows: tuple[int, ...]  # packed tokens of each micro-batch
    packed: Callable[[int], PackedTokens]  # a micro-batch by its number, which may be cut when it is asked for
    loss: LossFunction
    lr: float | None


@dataclass(frozen=True, slots=True)
class PreparedInstruction:
    """One instruction with everything that the loop would otherwise look up or format each time."""

    run: Callable[[ProgramRun, PreparedInstruction], None]
    action: Action
    peer: int  # the other rank of a send or receive, -1 in all other kinds
    parts: PipelineParts
    stage: TrainingStage
    microbatch: int  # -1 in TE, RG and ST
    source: Key  # under this the adjacent stage's output waits, where it is on this rank
    target: Key  # under this the stage's own output waits, or its input arrives
    receive: Instruction | None  # what an F or B has its input from
    slot: int  # buffer in the channel's ring that a receive goes into, where there are rings
    frees: tuple[tuple[int, int], ...]  # (sender, buffer) in rings that nobody reads after this instruction
    text: str
    waiting_text: str
    profiler_label: str


class ProgramExecutor:
    """Executes one program again and again. Raises InputError when the program asks for a stage that is not here.

    `pipelines` are this rank's, by the name that the program calls them. `progress` is told the instruction that
    runs, and what it waits for.
    """

    def __init__(
        self,
        program: Program,
        pipelines: Mapping[str, PipelineParts],
        channels: Channels,
        progress: Callable[[str], None],
        clock: Clock = Clock(),
    ) -> None:
        self.program = program
        self.clock = clock
        self.pipelines = pipelines
        self.channels = channels
        self.progress = progress
        by_action = {instruction.action: instruction for instruction in program.instructions}
        self._slots = None if channels.ahead else receive_slots(program)
        self.split_backwards()
        self.steps = [self._prepare(n, instruction, by_action) for n, instruction in enumerate(program.instructions)]
        self.sends = [step for step in self.steps if step.action.kind in SENDS]
        self.receives: dict[int, list[PreparedInstruction]] = {}
        for step in self.steps:
            if step.action.kind in RECEIVES:
                self.receives.setdefault(step.peer, []).append(step)
        if self._slots:
            channels.add_rings(self._slots.counts)

    def run(self, work: Mapping[str, PipelineWork]) -> StepReport:
        """Run the whole program; returns when everything is computed and sent, and the models have stepped.

        A rank that sees NaN or infinity in what a stage gives out (hidden state, loss, gradient) makes the gradients
        whose reduction it has not started NaN: the gradient norm then stops these models' steps on all their ranks,
        and models that would step later do not step. See `StepReport.steps` and `faults`.

        Raises RuntimeError with the program around the failing instruction when one raises.
        """
        self.split_backwards()
        return ProgramRun(self, work).execute()

    def split_backwards(self) -> None:
        """Let the stages split the backwards that the program splits, and no others."""
        actions = [instruction.action for instruction in self.program.instructions]
        split = {action.pipeline for action in actions if action.kind is Kind.W}
        for name, parts in self.pipelines.items():
            for stage in parts.stages.values():
                stage.split_backward(name in split)

    def _prepare(
        self, index: int, instruction: Instruction, by_action: Mapping[Action, Instruction]
    ) -> PreparedInstruction:
        action = instruction.action
        pipeline, number, kind, _ = action
        microbatch = -1 if action.microbatch is None else action.microbatch
        parts = self.pipelines.get(pipeline)
        if parts is None or number not in parts.stages:
            held = ", ".join(f"{name}:{sorted(part.stages)}" for name, part in self.pipelines.items()) or "none"
            raise InputError(
                f"rank {self.program.rank}, instruction {index}: {instruction} needs stage {number} of {pipeline}, "
                f"but this rank holds {held}; lower the schedule for the layouts that were built"
            )
        backward = kind in (Kind.B, Kind.SB, Kind.RB)
        computed = Kind.B if backward else Kind.F
        receive = by_action.get(Action(pipeline, number, Kind.RB if backward else Kind.RF, action.microbatch))
        text = f"training instruction {index}: {instruction}"
        return PreparedInstruction(
            run=(_RUN_IN_RINGS if self._slots else _RUN)[kind],
            action=action,
            peer=-1 if instruction.peer is None else instruction.peer,
            parts=parts,
            stage=parts.stages[number],
            microbatch=microbatch,
            source=(pipeline, computed, number + (1 if backward else -1), microbatch),
            target=(pipeline, computed, number, microbatch),
            receive=receive,
            slot=self._slots.of.get(action, -1) if self._slots else -1,
            frees=self._slots.freed.get(action, ()) if self._slots else (),
            text=text,
            waiting_text=Waiting(f"{text} waits for {receive or f'the gradient reduction of {pipeline}'}"),
            profiler_label=f"fused:{instruction}",
        )


class ProgramRun:
    """One execution of a program:

    F B W     compute on a stage, waiting for the input only here
    SF SB     start a send; its buffer belongs to the transfer until the end of the step
    RF RB     hand on a receive that was posted up to `Channels.ahead` receives ago, and post the next one; where none
              is posted ahead, post it here, into a ring
    TE RG ST  sum tied embeddings; start a stage's gradient reduction; wait for a model's reductions and step

    Nothing of one model waits for another: a reduction is started and left alone until the same model's step.
    """

    def __init__(self, executor: ProgramExecutor, work: Mapping[str, PipelineWork]) -> None:
        self._executor = executor
        self._channels = executor.channels
        self._progress = executor.progress
        self._clock = executor.clock
        self._work = work
        self._outputs: dict[Key, Tensor] = {}  # computed here, waiting for a send or for an adjacent stage here
        self._inputs: dict[Key, tuple[dist.Work, Tensor]] = {}  # on their way here
        self._unposted = {peer: deque(steps) for peer, steps in executor.receives.items()}
        self._posted: dict[int, deque[tuple[dist.Work, Tensor]]] = {peer: deque() for peer in executor.receives}
        self._checks: list[tuple[Action, Tensor]] = []  # whether what an action gave out is finite
        self._losses: dict[Action, Tensor] = {}
        self._results: dict[str, StepResult] = {}
        self._live = self._peak_live = 0
        self._inside_seconds = self._overhead_seconds = 0.0  # of the loop: in what it calls, and of its own
        self._stopwatch = Stopwatch(self._channels.device, self._clock)
        self._marks: list[tuple[PreparedInstruction, Any, Any]] = []

    def execute(self) -> StepReport:
        """All instructions, then the sends that nobody has received yet."""
        whole = self._clock.begin()
        if self._channels.ahead:
            for peer in self._unposted:
                self._post_ahead(peer)
        else:
            for peer, steps in self._executor.receives.items():
                most = max(math.prod(self._shape(step)) * step.parts.dtype.itemsize for step in steps)
                self._channels.rings[peer].fit(most)
        self._loop()
        sends = self._executor.sends
        self._channels.drain(
            lambda number: self._progress(Waiting(f"{sends[-number].text} waits until it is received"))
        )
        self._stopwatch.stop()
        return self._report(whole.seconds)

    def _loop(self) -> None:
        profiled = torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]  # no public way
        progress, quiet = self._progress, contextlib.nullcontext()
        index, loop = 0, self._clock.begin()
        try:
            for index, step in enumerate(self._executor.steps):
                progress(step.text)
                with record_function(step.profiler_label) if profiled else quiet:
                    step.run(self, step)
        except Exception as error:
            program = self._executor.program
            lines = list(enumerate(program.instructions))[max(index - 4, 0) : index + 3]
            marked = "\n".join(f"  {n} {line}{'   <-- here' if n == index else ''}" for n, line in lines)
            where = f"rank {program.rank}, instruction {index}:\n{marked}"
            raise RuntimeError(f"{type(error).__name__}: {error}\n{where}") from error
        self._overhead_seconds = loop.seconds - self._inside_seconds

    def forward(self, step: PreparedInstruction) -> None:
        work = self._work[step.action.pipeline]
        batch = work.packed(step.microbatch)  # before the wait
        hidden = self._take_input(step)

        def loss(output: Tensor, microbatch: int) -> Tensor:
            value = work.loss(output, microbatch)
            self._losses[step.action] = value.detach()
            self._check(step, value)
            return value

        with self._computing(step):
            out = step.stage.forward(step.microbatch, batch, hidden, loss)
            if out is not None:
                self._outputs[step.target] = out
                self._check(step, out)
            self._live += 1
            self._peak_live = max(self._peak_live, self._live)

    def backward(self, step: PreparedInstruction) -> None:
        gradient = self._take_input(step)
        with self._computing(step):
            out = step.stage.backward(step.microbatch, gradient)
            if out is not None:
                self._outputs[step.target] = out
                self._check(step, out)
            self._live -= not step.stage.splits

    def add_weight_gradients(self, step: PreparedInstruction) -> None:
        with self._computing(step):
            step.stage.backward_weight(step.microbatch)
            self._live -= 1

    def _take_input(self, step: PreparedInstruction) -> Tensor | None:
        """What was received for this action, waited for; else what an adjacent stage on this rank computed."""
        if step.receive is None:
            return self._outputs.pop(step.source, None)
        work, buffer = self._inputs.pop(step.target)
        with self._inside():
            if not work.is_completed():  # gloo never says so before the wait; its transfers are waited for by name
                self._progress(step.waiting_text)
            work.wait()
            self._progress(step.text)
        return buffer

    def _check(self, step: PreparedInstruction, value: Tensor) -> None:
        # one number instead of one per element: NaN and infinity survive summing
        self._checks.append((step.action, torch.isfinite(value.detach().sum())))

    @contextlib.contextmanager
    def _inside(self) -> Iterator[Piece]:
        """The block is none of the executor's own time."""
        with self._clock.work() as piece:
            yield piece
        self._inside_seconds += piece.seconds

    @contextlib.contextmanager
    def _computing(self, step: PreparedInstruction) -> Iterator[None]:
        """The block is what the instruction computes; in a paced run it lasts as long as that is priced."""
        tokens = 0 if step.microbatch < 0 else self._work[step.action.pipeline].rows[step.microbatch]
        with self._inside() as piece:
            mark = self._stopwatch.mark()
            yield
            # a step begins when all ranks of the model have come to it, which its norm has waited for
            begun = self._clock.now() if step.action.kind is Kind.ST else piece.start
            self._clock.hold(begun, "action", step.parts.model, step.action, tokens)
            self._marks.append((step, mark, self._stopwatch.mark()))
        for sender, slot in step.frees:
            self._channels.rings[sender].free(slot)

    def send(self, step: PreparedInstruction) -> None:
        with self._inside():
            self._channels.send(self._outputs.pop(step.target), step.peer)

    def receive(self, step: PreparedInstruction) -> None:
        # A receive stands where its sender is done, which may be before other work of this rank: it is waited for
        # only where its tensor is used, so the rank never idles with work at hand.
        self._inputs[step.target] = self._posted[step.peer].popleft()
        with self._inside():
            self._post_ahead(step.peer)

    def _post_ahead(self, peer: int) -> None:
        unposted, posted = self._unposted[peer], self._posted[peer]
        while unposted and len(posted) < self._channels.ahead:
            step = unposted.popleft()
            posted.append(self._channels.post_receive(self._shape(step), step.parts.dtype, peer))

    def _shape(self, step: PreparedInstruction) -> tuple[int, int, int]:
        """Shape of what a receive brings."""
        return step.stage.stage.hidden_shape(self._work[step.action.pipeline].rows[step.microbatch])

    def receive_in_ring(self, step: PreparedInstruction) -> None:
        with self._inside():
            posted = self._channels.post_in_ring(self._shape(step), step.parts.dtype, step.peer, step.slot)
            self._inputs[step.target] = posted

    def sum_tied(self, step: PreparedInstruction) -> None:
        with self._computing(step):
            step.parts.optimizer.sum_tied_gradients()

    def reduce(self, step: PreparedInstruction) -> None:
        with self._computing(step):
            # All models' checks so far: whatever this rank knows to be wrong stops this model's step too.
            finite = torch.stack([finite for _, finite in self._checks]).all() if self._checks else None
            step.parts.optimizer.start_reduction(step.action.stage, finite)

    def optimize(self, step: PreparedInstruction) -> None:
        optimizer = step.parts.optimizer
        with self._inside():
            for stage in step.parts.stages:
                if not optimizer.reduction_done(stage):
                    self._progress(step.waiting_text)
                optimizer.finish_reduction(stage)
            self._progress(step.text)
        with self._computing(step):
            pipeline = step.action.pipeline
            if all(result.finite for result in self._results.values()):  # alike on all ranks: nobody waits in the step
                self._results[pipeline] = optimizer.step(self._work[pipeline].lr)

    def _report(self, seconds: float) -> StepReport:
        at = self._stopwatch.seconds
        # one reading each, for on a GPU every one waits for the device
        losses = torch.stack([loss.double() for loss in self._losses.values()]).tolist() if self._losses else []
        finite = torch.stack([finite for _, finite in self._checks]).tolist() if self._checks else []
        rank = self._executor.program.rank
        return StepReport(
            spans=tuple(
                Span(str(step.action), f"{step.parts.model} {step.action.kind}", rank, at(start), at(stop))
                for step, start, stop in self._marks
            ),
            losses=dict(zip(self._losses, losses)),
            steps=self._results,
            faults=tuple(action for (action, _), good in zip(self._checks, finite) if not good),
            peak_live=self._peak_live,
            seconds=seconds,
            instructions=len(self._executor.steps),
            overhead_seconds=self._overhead_seconds,
        )


_RUN = {
    Kind.F: ProgramRun.forward,
    Kind.B: ProgramRun.backward,
    Kind.W: ProgramRun.add_weight_gradients,
    Kind.SF: ProgramRun.send,
    Kind.SB: ProgramRun.send,
    Kind.RF: ProgramRun.receive,
    Kind.RB: ProgramRun.receive,
    Kind.TE: ProgramRun.sum_tied,
    Kind.RG: ProgramRun.reduce,
    Kind.ST: ProgramRun.optimize,
}
_RUN_IN_RINGS = _RUN | {Kind.RF: ProgramRun.receive_in_ring, Kind.RB: ProgramRun.receive_in_ring}
