"""An engine's steps: launched one after another, their draws taken in; one may be in flight while another is launched.

Who calls it holds the cache and the samples; it owns the step in flight, its seconds and the guesses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rlhfuse.base.clock import Clock
from rlhfuse.costs.speculation import StepObservation
from rlhfuse.gen.core.draws import Draws, Launched
from rlhfuse.gen.core.forward_batch import ForwardBatch, ScheduledSequence
from rlhfuse.gen.core.kv_cache import KVCache
from rlhfuse.gen.core.scheduler import Scheduler
from rlhfuse.gen.core.sequence import GenerationResult, Sequence
from rlhfuse.gen.forward import Forward
from rlhfuse.gen.options import EngineOptions
from rlhfuse.gen.sampler import draw_batch
from rlhfuse.gen.speculation.guesser import Guesser
from rlhfuse.gen.stop_text import completes_stop_text


class StepStats(NamedTuple):
    """What one step did, as the cost model wants to know it. All 0 where no step's draws were read."""

    batch: int = 0  # sequences that ran
    prefill_tokens: int = 0  # tokens run for sequences that were not decoding
    context_tokens: int = 0  # tokens in the cache of all that ran, after the step
    seconds: float = 0.0  # in the engine since the step before; without the capture of a CUDA graph, once for a shape
    reused_tokens: int = 0  # tokens of sequences that entered, found in known prefixes instead of being run
    guessed_tokens: int = 0  # guesses that ran with sequences which decode
    accepted_tokens: int = 0  # those of them that were drawn
    searched: bool = False  # guesses were looked for, and found or not

    def observation(self) -> StepObservation:
        """The same, to fit costs to."""
        ran = self.batch, self.context_tokens, self.prefill_tokens
        return StepObservation(*ran, self.seconds, self.guessed_tokens, self.accepted_tokens)


class LaunchedStep(NamedTuple):
    """A step whose draws are yet to be read."""

    drawing: list[ScheduledSequence]
    launched: Launched
    stats: StepStats  # but for seconds and accepted tokens


class StepLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        forward: Forward,
        options: EngineOptions,
        guesser: Guesser | None,
        leave: Callable[[Sequence], None],
        detokenize: Callable[[list[int]], str] | None,
        clock: Clock,
    ) -> None:
        """`leave`: takes a sequence whose response or turn is over out of what runs."""
        self.scheduler, self.forward, self.guesser = scheduler, forward, guesser
        self._block_tokens = options.block_tokens
        self._measures = options.entropies
        self._runs_ahead = options.run_ahead and forward.runs_ahead
        self._leave_batch, self._detokenize = leave, detokenize
        self.in_flight: LaunchedStep | None = None  # launched, its draws are not read
        self.clock = clock
        self._certain_end = False  # one of its sequences ends with it, whatever is drawn
        self._began = self._seconds = 0.0  # when the running call began; spent in earlier ones since draws were read
        self.last_step = StepStats()

    def step(self, cache: KVCache) -> list[GenerationResult]:
        """Run one forward pass and draw; returns the samples that finished, or a turn. Nothing to do gives []."""
        self.last_step = StepStats()
        self._began = self._now()
        finished, running = [], len(self.scheduler.running)
        try:
            if self.in_flight and (self._certain_end or self.scheduler.blocks.free_blocks < running):
                finished += self._read()  # who ends would need a place that it hasn't, or others lack its blocks
            step = self._launch(cache)
            finished += self._read()
            if step and self._runs_ahead:
                self._leave(step)
            elif step:
                finished += self._end(step)
        except BaseException:
            self._forget_step()
            self.scheduler.preempt_all()  # blocks may be half written: run their tokens again
            raise
        self._seconds += self._now() - self._began
        return finished

    def settle(self) -> list[GenerationResult]:
        """Read the draws of a step that was launched ahead; returns the samples that finished."""
        self._began = self._now()
        try:
            return self._read()
        except BaseException:
            self.scheduler.preempt_all()
            raise

    def _launch(self, cache: KVCache) -> LaunchedStep | None:
        """Launch the next step, if there is anything to run."""
        reused_before = self.scheduler.reused_tokens
        scheduled = self._with_guesses(self.scheduler.schedule())
        if not scheduled:
            return None
        batch = ForwardBatch.of(scheduled, self.scheduler.table, self._block_tokens)
        drawing = [each for each in scheduled if each.draws]
        decoding = sum(count == 1 and bool(seq.tokens) for seq, count, _, _ in drawing)
        rows = [seq for seq, *_ in drawing]
        if batch.guesses is not None:
            rows = [seq for seq, _, _, guesses in drawing for _ in range(1 + len(guesses))]
        guessed = len(rows) - len(drawing)
        totals = batch.positions[batch.draw_rows] + 1
        draws = draw_batch(rows, totals, self.scheduler.table, batch.guesses, self._measures)
        launched = self.forward.launch(batch, draws, cache)
        self.scheduler.complete(scheduled)
        stats = StepStats(
            batch=len(scheduled),
            prefill_tokens=len(batch.tokens) - decoding - guessed,
            context_tokens=int(batch.contexts.sum()) - guessed,
            reused_tokens=self.scheduler.reused_tokens - reused_before,
            guessed_tokens=guessed,
            searched=self.guesser is not None and self.guesser.searched,
        )
        return LaunchedStep(drawing, launched, stats)

    def _with_guesses(self, scheduled: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """The same, and what the guesser guesses that decoding sequences will draw, where there is room for it."""
        if self.guesser is None or not scheduled:
            return scheduled
        rows = self.scheduler.room_for_guesses(scheduled, self.guesser.rows(len(scheduled)))
        if not rows:
            return scheduled
        guesses = self.guesser.propose([seq for seq, _, _, _ in scheduled], self.scheduler.table, rows)
        return self.scheduler.add_guesses(scheduled, guesses) if any(guesses) else scheduled

    def _leave(self, step: LaunchedStep) -> None:
        """Let a step run while the next is scheduled; its draws stand as their places until they are read."""
        self.in_flight, self._certain_end = step, False
        for (seq, *_), place in zip(step.drawing, step.launched.places.tolist()):
            if seq.finish_reason is None:
                seq.tokens.append(~place)
                self._certain_end |= seq.total_tokens >= seq.max_total_tokens

    def _forget_step(self) -> None:
        """Take the places of draws that were not read back; the same will be drawn again."""
        step, self.in_flight = self.in_flight, None
        for seq, *_ in step.drawing if step else ():
            if seq.finish_reason is None:
                seq.tokens.pop()

    def _read(self) -> list[GenerationResult]:
        """Finish the step in flight, if there is one; returns the samples that finished."""
        step = self.in_flight
        self._forget_step()
        return self._end(step) if step else []

    def _end(self, step: LaunchedStep) -> list[GenerationResult]:
        """Take the draws of a step in; returns the samples that finished."""
        draws, finished = step.launched.read(), []
        row = accepted = 0
        for number, (seq, _, _, guesses) in enumerate(step.drawing):
            if seq.finish_reason is None:  # else it ended in the step before, not read when this one was launched
                self._take(seq, draws, row)
                if guesses:
                    accepted += self._take_run(number, seq, guesses, draws, row)
                if seq.finish_reason is not None:
                    seq.end_turn()
                    self._leave_batch(seq)
                    finished.append(seq.result())
            row += 1 + len(guesses)
        stats = step.stats
        begun, counts = self._began - self._seconds, (stats.batch, stats.context_tokens, stats.prefill_tokens)
        self.clock.hold(begun, "step", *counts)
        now = self._now()
        self.last_step = stats._replace(seconds=now - begun, accepted_tokens=accepted)
        self._began, self._seconds = now, 0.0
        if self.guesser and self.guesser.measured and not stats.prefill_tokens:
            self.guesser.measured.observe(self.last_step.observation(), stats.searched)
        return finished

    def _now(self) -> float:
        """Seconds on a clock that stands still while a CUDA graph is captured."""
        return self.clock.now() - self.forward.recording_seconds

    def _take_run(self, number: int, seq: Sequence, guesses: list[int], draws: Draws, row: int) -> int:
        """Take in the draws behind that of `row`, as far as the guesses foresaw them; returns how many did."""
        right, tried = 0, 0
        while tried < len(guesses) and seq.finish_reason is None and right == tried:
            tried += 1
            if draws.tokens[row + right] == guesses[right]:
                right += 1
                self._take(seq, draws, row + right)
        assert self.guesser is not None, "who else has guessed"
        self.guesser.told(number, tried, right)
        if seq.finish_reason is None:
            self.scheduler.accept_guesses(seq, right)
        return right

    def _take(self, seq: Sequence, draws: Draws, row: int) -> None:
        if draws.tokens[row] < 0:
            seq.finish_reason = "error"
            return
        seq.append(draws.tokens[row], draws.logprobs[row])
        if draws.entropies is not None:
            seq.entropies.append(draws.entropies[row])
        params = seq.params
        if params.stop and seq.finish_reason != "stop" and len(seq.tokens) >= params.min_tokens:
            assert self._detokenize is not None, "checked when the sample was added"
            turn = seq.tokens[seq.turn_start :] if seq.observed else seq.tokens
            if completes_stop_text(turn, params.stop, self._detokenize):
                seq.finish_reason = "stop"
