"""Runs one rank's program of a training step: instruction by instruction, exactly as lowered.

The program says what and in which order; this file only knows how. Serial, time-shared and fused training are
the same executor with another schedule, and since every schedule keeps each stage's forwards and backwards in
micro-batch order, gradients accumulate in the same order and come out as the same bits (paper section 5).

    F B       compute on a stage, waiting for the input only here
    SF SB     start a send; its buffer belongs to the transfer until the end of the step
    RF RB     hand on a receive that was posted up to RECEIVES_AHEAD receives ago, and post the next one
    TE RG ST  sum tied embeddings; start a stage's gradient reduction; wait for a model's reductions and step

Nothing of one model waits for another: a reduction is started and left alone until the same model's step. What a
stage gives out (hidden state, loss, gradient) is checked: a rank that sees NaN or infinity notes where and makes
its own gradient NaN, so that the gradient norm stops that model's step on all its ranks; later models don't step
then, and earlier steps of the same program are taken back.

When an instruction fails, a RuntimeError shows the rank's program with the failing line marked, and the cause.
Knows nothing of rewards, batches of samples or other ranks' programs.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter as clock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from rlhfuse.errors import InputError
from rlhfuse.fusion.intra.p2p import Channels
from rlhfuse.fusion.intra.report import ActionSpan, Meter, StepReport
from rlhfuse.fusion.intra.stopwatch import Stopwatch
from rlhfuse.models.stage import LossFunction, PackedTokens, TrainingStage
from rlhfuse.parallel.optimizer import ModelOptimizer, StepResult
from rlhfuse.schedule.ir.action import SENDS, Action, Kind
from rlhfuse.schedule.program.program import Program

RECEIVES_AHEAD = 3  # per channel; enough to hide the posting, few enough to bound the buffers
Key = tuple[str, Kind, int, int]  # (pipeline, F or B, stage that computes, micro-batch)


@dataclass(frozen=True)
class PipelineParts:
    """What a pipeline has on this rank for the whole run: its stages by number, and what steps their weights."""

    stages: Mapping[int, TrainingStage]
    optimizer: ModelOptimizer
    dtype: torch.dtype


@dataclass(frozen=True)
class PipelineWork:
    """What a pipeline computes in one step: its micro-batches, the loss of its last stage, its learning rate."""

    batches: tuple[PackedTokens, ...]
    loss: LossFunction
    lr: float


class _Step:
    """One instruction made ready: everything that the loop would otherwise look up or format each time."""

    __slots__ = (
        "run",
        "meter",
        "instruction",
        "action",
        "parts",
        "stage",
        "pipeline",
        "microbatch",
        "source",
        "target",
        "peer",
        "received",
        "remembers",
        "text",
        "waits",
        "label",
    )


class ProgramExecutor:
    """Executes one program again and again; built once, before the first step.

    `pipelines` are this rank's, by the name that the program calls them. `progress` is told the instruction that
    runs, and what it waits for. Raises InputError when the program asks for a stage that is not here.
    """

    def __init__(
        self,
        program: Program,
        pipelines: Mapping[str, PipelineParts],
        channels: Channels,
        progress: Callable[[str], None],
    ) -> None:
        self._program = program
        self._pipelines = pipelines
        self._channels = channels
        self._progress = progress
        execute = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.SF: self._send,
            Kind.SB: self._send,
            Kind.RF: self._receive,
            Kind.RB: self._receive,
            Kind.TE: self._sum_tied,
            Kind.RG: self._reduce,
            Kind.ST: self._optimize,
        }
        self._meters = {kind: Meter() for kind in execute}
        self._by_action = {instruction.action: instruction for instruction in program.instructions}
        self._last_step = max((i.action.kind is Kind.ST) * n for n, i in enumerate(program.instructions, 1))
        self._steps = [self._prepare(place, execute) for place in range(len(program.instructions))]
        self._sends = [step for step in self._steps if step.action.kind in SENDS]
        self._receives: dict[int, list[_Step]] = {}
        for step in self._steps:
            if step.action.kind in (Kind.RF, Kind.RB):
                self._receives.setdefault(step.peer, []).append(step)

    def _prepare(self, place: int, execute: Mapping[Kind, Callable[[_Step], None]]) -> _Step:
        instruction = self._program.instructions[place]
        action = instruction.action
        name, number, kind, microbatch = action
        if kind not in execute:
            raise InputError(f"{instruction}: split weight gradients cannot be executed; schedule whole backwards")
        parts = self._pipelines.get(name)
        if parts is None or number not in parts.stages:
            held = ", ".join(f"{p}:{sorted(part.stages)}" for p, part in self._pipelines.items()) or "none"
            raise InputError(
                f"rank {self._program.rank}, instruction {place}: {instruction} needs stage {number} of {name}, but "
                f"this rank holds {held}; lower the schedule for the layouts that were built"
            )
        step = _Step()
        step.run, step.meter = execute[kind], self._meters[kind]
        step.instruction, step.action, step.peer = instruction, action, instruction.peer
        step.parts, step.stage, step.pipeline, step.microbatch = parts, parts.stages[number], name, microbatch
        backward = kind in (Kind.B, Kind.SB, Kind.RB)
        computed = Kind.B if backward else Kind.F
        step.target = (name, computed, number, microbatch)  # under this a stage's output waits, or its input arrives
        step.source = (name, computed, number + (1 if backward else -1), microbatch)  # a neighbour on this rank
        step.received = self._by_action.get(Action(name, number, Kind.RB if backward else Kind.RF, microbatch))
        step.remembers = place + 1 < self._last_step  # another model steps later and may make this one's step void
        step.text = f"training instruction {place}: {instruction}"
        step.label = f"fused:{instruction}"
        step.waits = f"{step.text} waits for {step.received or f'the gradient reduction of {name}'}"
        return step

    def run(self, work: Mapping[str, PipelineWork]) -> StepReport:
        """Run the whole program; returns when everything is computed and sent, and the models have stepped."""
        self._work = work
        self._outputs: dict[Key, Tensor] = {}  # computed here, waiting for a send or for a neighbour on this rank
        self._inputs: dict[Key, tuple[dist.Work, Tensor]] = {}  # on their way here
        self._unposted = {peer: deque(steps) for peer, steps in self._receives.items()}
        self._posted: dict[int, deque[tuple[dist.Work, Tensor]]] = {peer: deque() for peer in self._receives}
        self._checks: dict[tuple[str, int], list[tuple[Action, Tensor]]] = {}
        self._losses: dict[Action, Tensor] = {}
        self._waits: dict[Action, float] = {}
        self._results: dict[str, StepResult] = {}
        self._live = self._peak_live = 0
        self._watch, self._marks = Stopwatch(self._channels.device), []
        for meter in self._meters.values():
            meter.reset()
        begin = clock()
        for peer in self._receives:
            self._post_ahead(peer)
        self._loop()
        drained = clock()
        self._channels.drain(lambda number: self._progress(f"{self._sends[-number].text} waits until it is received"))
        self._watch.stop()
        return self._report(begin, drained, clock())

    def _loop(self) -> None:
        named = record_function if torch.autograd._profiler_enabled() else None
        progress, quiet = self._progress, contextlib.nullcontext()
        place = 0
        before = clock()
        try:
            for place, step in enumerate(self._steps):
                progress(step.text)
                with named(step.label) if named else quiet:
                    step.run(step)
                now = clock()
                meter = step.meter
                meter.count += 1
                meter.total += now - before
                before = now
        except Exception as error:
            where = f"rank {self._program.rank}, instruction {place}:\n{self._marked(place)}"
            raise RuntimeError(f"{type(error).__name__}: {error}\n{where}") from error

    # computing ------------------------------------------------------------------------------------------------

    def _forward(self, step: _Step) -> None:
        work = self._work[step.pipeline]
        hidden = self._take_input(step)
        start, mark = clock(), self._watch.mark()

        def loss(output: Tensor, microbatch: int) -> Tensor:
            value = work.loss(output, microbatch)
            self._losses[step.action] = value.detach()
            self._check(step, value)
            return value

        out = step.stage.forward(step.microbatch, work.batches[step.microbatch], hidden, loss)
        if out is not None:
            self._outputs[step.target] = out
            self._check(step, out)
        self._live += 1
        self._peak_live = max(self._peak_live, self._live)
        self._computed(step, start, mark)

    def _backward(self, step: _Step) -> None:
        gradient = self._take_input(step)
        start, mark = clock(), self._watch.mark()
        out = step.stage.backward(step.microbatch, gradient)
        if out is not None:
            self._outputs[step.target] = out
            self._check(step, out)
        self._live -= 1
        self._computed(step, start, mark)

    def _take_input(self, step: _Step) -> Tensor | None:
        """What was received for this action, waited for; else what a neighbouring stage on this rank computed."""
        if step.received is None:
            return self._outputs.pop(step.source, None)
        work, buffer = self._inputs.pop(step.target)
        start = clock()
        if not work.is_completed():  # gloo never says so before the wait; its transfers are always waited for by name
            self._progress(step.waits)
        self._channels.finish_receive(work, buffer)
        self._progress(step.text)
        seconds = clock() - start
        self._waits[step.action] = seconds
        step.meter.waiting += seconds
        return buffer

    def _check(self, step: _Step, value: Tensor) -> None:
        # one number instead of one per element: NaN and infinity survive summing
        finite = torch.isfinite(value.detach().sum())
        self._checks.setdefault((step.pipeline, step.action.stage), []).append((step.action, finite))

    def _computed(self, step: _Step, start: float, mark: object) -> None:
        self._marks.append((step.action, mark, self._watch.mark()))
        step.meter.stage += clock() - start

    # transport ------------------------------------------------------------------------------------------------

    def _send(self, step: _Step) -> None:
        tensor = self._outputs.pop(step.target)
        start = clock()
        self._channels.send(tensor, step.peer)
        step.meter.transport += clock() - start

    def _receive(self, step: _Step) -> None:
        # A receive stands where its sender is done, which may be before other work of this rank: it is waited for
        # only where its tensor is used, so the rank never idles with work at hand.
        self._inputs[step.target] = self._posted[step.peer].popleft()
        start = clock()
        self._post_ahead(step.peer)
        step.meter.transport += clock() - start

    def _post_ahead(self, peer: int) -> None:
        unposted, posted = self._unposted[peer], self._posted[peer]
        while unposted and len(posted) < RECEIVES_AHEAD:
            step = unposted.popleft()
            shape = step.stage.stage.hidden_shape(self._work[step.pipeline].batches[step.microbatch])
            posted.append(self._channels.post_receive(shape, step.parts.dtype, peer))

    # gradients and weights ------------------------------------------------------------------------------------

    def _sum_tied(self, step: _Step) -> None:
        start, mark = clock(), self._watch.mark()
        step.parts.optimizer.sum_tied_gradients()
        self._computed(step, start, mark)

    def _reduce(self, step: _Step) -> None:
        start, mark = clock(), self._watch.mark()
        checks = self._checks.get((step.pipeline, step.action.stage), [])
        finite = torch.stack([finite for _, finite in checks]).all() if checks else None
        step.parts.optimizer.start_reduction(step.action.stage, finite)
        self._computed(step, start, mark)

    def _optimize(self, step: _Step) -> None:
        optimizer = step.parts.optimizer
        start = clock()
        for stage in step.parts.stages:
            if not optimizer.reduction_done(stage):
                self._progress(step.waits)
            optimizer.finish_reduction(stage)
        self._progress(step.text)
        self._waits[step.action] = clock() - start
        step.meter.waiting += self._waits[step.action]
        start, mark = clock(), self._watch.mark()
        if all(result.finite for result in self._results.values()):
            lr = self._work[step.pipeline].lr
            self._results[step.pipeline] = optimizer.step(lr, remember=step.remembers)
        self._computed(step, start, mark)

    # what comes of it -----------------------------------------------------------------------------------------

    def undo(self) -> None:
        """Take back what the last run stepped; a collective. To be called when its report is not `finite`."""
        for name, result in reversed(self._results.items()):
            if result.finite:
                self._pipelines[name].optimizer.undo()

    def _report(self, begin: float, drained: float, end: float) -> StepReport:
        spans = tuple(
            ActionSpan(action, self._watch.seconds(start), self._watch.seconds(stop))
            for action, start, stop in self._marks
        )
        bad = tuple(action for checks in self._checks.values() for action, finite in checks if not finite)
        losses = {action: float(loss) for action, loss in self._losses.items()}
        times = {kind: meter.read() for kind, meter in self._meters.items() if meter.count}
        return StepReport(
            spans, self._waits, times, losses, self._results, bad, self._peak_live, end - begin, end - drained
        )

    def _marked(self, position: int) -> str:
        first = max(position - 4, 0)
        lines = enumerate(self._program.instructions[first : position + 3], start=first)
        return "\n".join(f"  {i} {line}{'   <-- here' if i == position else ''}" for i, line in lines)
