"""The generation engine: continuous batching over a paged KV cache; prompts in, finished samples out, step by step.

    while engine.has_unfinished():
        finished += engine.step()        the scheduler chooses, the model runs, the sampler draws

On CPU a float32 sample's bits depend on its request alone. A GPU's steps are launched before the last one is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfuse.base.errors import InputError
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.speculation import GuessRows
from rlhfuse.decisions.migration import MoveMode
from rlhfuse.gen.core.block_manager import BlockManager
from rlhfuse.gen.core.draws import Draws
from rlhfuse.gen.core.forward_batch import ForwardBatch, ScheduledSequence
from rlhfuse.gen.core.kv_cache import KVCache
from rlhfuse.gen.core.scheduler import Scheduler
from rlhfuse.gen.core.sequence import GenerationResult, SamplingParams, Sequence, new_sequence
from rlhfuse.gen.migration.import_transaction import ImportTransaction
from rlhfuse.gen.migration.kv_transfer import BlockShape, KVTransfer, TransferManifest, prepare_transfer
from rlhfuse.gen.model_runner import EngineOptions, ModelRunner
from rlhfuse.gen.sampler import draw_batch
from rlhfuse.gen.speculation.drafter import Drafter
from rlhfuse.gen.steps import Drawing, LaunchedStep, StepStats
from rlhfuse.gen.stop_text import completes_stop_text, read_tokenizer

__all__ = ["Engine", "EngineOptions", "GenerationResult", "SamplingParams", "StepStats", "UnfinishedSequence"]


@dataclass(frozen=True)
class UnfinishedSequence:
    """An unfinished sample as others see it."""

    sample_id: int
    kv_tokens: int  # tokens in the cache
    total_tokens: int  # prompt and response so far
    blocks: int  # KV blocks held (a shared block counts for each sequence)
    shared_blocks: tuple[int, ...]  # those of them that others use too
    waiting: bool  # not running: never started, or preempted


class Engine:
    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor] | None,
        options: EngineOptions = EngineOptions(),
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        tp_group: dist.ProcessGroup | None = None,
        detokenize: Callable[[list[int]], str] | None = None,
    ) -> None:
        """`weights` under Megatron-core names, this rank's shares; they are read in place.

        None: the engine begins paused, without weights and without a cache; `load_weights` and `resume` come first.
        Raises InputError for a missing or ill-shaped weight, or a dtype that is neither float32 nor bfloat16.
        """
        if dtype not in (torch.float32, torch.bfloat16):
            raise InputError(f"dtype={dtype} is not supported; use float32 or bfloat16")
        self.spec, self.options, self.dtype = spec, options, dtype
        self.device = torch.device(device)
        self.runner = ModelRunner(spec, weights, options, device=self.device, dtype=dtype, tp_group=tp_group)
        self.scheduler = Scheduler(
            BlockManager(options.num_blocks, options.block_tokens), options.max_sequences, options.max_batched_tokens
        )
        self._cache: KVCache | None = self.runner.new_cache() if weights is not None else None  # None: paused
        self._kept: KVCache | None = None  # of a paused engine that keeps its memory
        self._sequences: dict[int, Sequence] = {}  # unfinished, by sample id
        self._block_shape = BlockShape(
            spec.layers, options.block_tokens, spec.kv_heads, spec.head_dim, str(dtype).removeprefix("torch.")
        )
        self.drafter = self.new_drafter()
        self._exporting: list[int] = []  # sample ids offered to another engine
        self._in_flight: LaunchedStep | None = None  # launched, its draws are not read
        self._ended: list[GenerationResult] = []  # found finished outside of step()
        self._certain_end = False  # one of its sequences ends with it, whatever is drawn
        self._clock = self._seconds = 0.0  # when the running call began; spent in earlier ones since draws were read
        self._detokenize = detokenize
        self.last_step = StepStats(0, 0, 0, 0.0)

    @staticmethod
    def from_pretrained(
        path: str | Path,
        options: EngineOptions = EngineOptions(),
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Engine:
        """An engine over a Hugging Face folder, in a plain process. Stop texts need its tokenizer.json."""
        from rlhfuse.models.hf import load_weights

        spec = ModelSpec.from_config(path)
        weights = {name: w.to(device) for name, w in load_weights(path, spec, dtype=dtype).items()}
        return Engine(spec, weights, options, device=device, dtype=dtype, detokenize=read_tokenizer(Path(path)))

    def generate(
        self,
        prompts: Iterable[Iterable[int]],
        params: SamplingParams | Iterable[SamplingParams] = SamplingParams(),
        sample_ids: Iterable[int] | None = None,
    ) -> list[GenerationResult]:
        """Complete prompts of token ids, in order. `params` is one for all, or one each; noise depends on sample ids.

        Raises InputError, and adds nothing, if any prompt cannot be served.
        """
        if self.has_unfinished():
            raise InputError(f"generate() needs an idle engine; {len(self._sequences)} samples are unfinished")
        prompts = [list(prompt) for prompt in prompts]
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        ids = list(range(len(prompts))) if sample_ids is None else list(sample_ids)
        if not len(prompts) == len(each) == len(ids):
            raise InputError(f"{len(prompts)} prompts, {len(each)} params, {len(ids)} sample ids: give one each")
        if len(set(ids)) < len(ids):
            raise InputError("sample_ids holds one id twice; ids must differ")
        for seq in [self._sequence(*item) for item in zip(ids, prompts, each)]:  # all are checked before any enters
            self._add(seq)
        finished: dict[int, GenerationResult] = {}
        while self.has_unfinished():
            finished |= {result.sample_id: result for result in self.step()}
        return [finished[sample_id] for sample_id in ids]

    def add(self, sample_id: int, prompt: Iterable[int], params: SamplingParams) -> None:
        """Queue a sample.

        Raises InputError, and changes nothing, for an id in use, an empty prompt, a token outside the vocabulary, or
        a prompt that with `max_tokens` is longer than the context or than all KV blocks together can hold.
        """
        self._add(self._sequence(sample_id, list(prompt), params))

    def step(self) -> list[GenerationResult]:
        """Run one forward pass and draw; returns the samples that finished. Nothing to do gives []."""
        if self._cache is None:
            raise RuntimeError("the engine is paused; call resume() first")
        if self.runner.weights is None:
            raise RuntimeError("the engine has no weights; call load_weights() first")
        self._check_not_exporting()
        self.last_step = StepStats(0, 0, 0, 0.0)
        self._clock = self._now()
        finished, self._ended = self._ended, []
        try:
            if self._in_flight and (self._certain_end or self.free_blocks < len(self.scheduler.running)):
                finished += self._read()  # who ends would need a place that it hasn't, or others lack its blocks
            if self.drafter and self.drafter.is_due(len(self.scheduler.running)):
                finished += self._read()  # guesses follow what was drawn
            step = self._launch()
            finished += self._read()
            if step and self.runner.runs_ahead and not step.drafted_tokens:
                self._leave(step)
            elif step:
                finished += self._end(step)
        except BaseException:
            self._forget_step()
            self.scheduler.preempt_all()  # blocks may be half written: run their tokens again
            raise
        self._seconds += self._now() - self._clock
        return finished

    def settle(self) -> list[GenerationResult]:
        """Read the draws of a step that was launched ahead; returns the samples that finished."""
        self._settle()
        finished, self._ended = self._ended, []
        return finished

    def abort(self, sample_id: int) -> None:
        """Drop a sample. Raises InputError if it is not unfinished here."""
        self._check_not_exporting()
        self._settle()
        ended = [result for result in self._ended if result.sample_id == sample_id]
        if ended:
            self._ended.remove(ended[0])
        else:
            self._remove(self._find(sample_id))

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do, or to return."""
        return bool(self._sequences or self._ended)

    @property
    def samples(self) -> int:
        """Those in the engine, also one that ended in a step not yet read."""
        return len(self._sequences)

    def unfinished(self) -> list[UnfinishedSequence]:
        """All unfinished samples: running, oldest first, then waiting."""
        self._settle()
        samples = []
        for queue in (self.scheduler.running, self.scheduler.waiting):
            for seq in queue:
                facts = seq.sample_id, seq.computed_tokens, seq.total_tokens, len(seq.block_table)
                shared = tuple(self.scheduler.blocks.shared(seq))
                samples.append(UnfinishedSequence(*facts, shared, waiting=queue is self.scheduler.waiting))
        return samples

    @property
    def free_blocks(self) -> int:
        return self.scheduler.blocks.free_blocks

    @contextmanager
    def export_sequences(
        self, sample_ids: Iterable[int], modes: MoveMode | Mapping[int, MoveMode] = "kv"
    ) -> Iterator[KVTransfer]:
        """Offer unfinished samples to another engine: they leave at the end of the `with`, or stay if it raises.

        A sample that has not run yet moves as tokens. Until the end of the `with` this engine does not step, and after
        it the transfer is of no use. Raises InputError for an id that is not unfinished here or is given twice.
        """
        self._check_not_exporting()
        self._settle()
        sequences = [self._find(sample_id) for sample_id in sample_ids]
        transfer = prepare_transfer(sequences, modes, self._block_shape, self._cache)
        self._exporting = [seq.sample_id for seq in sequences]
        try:
            yield transfer
        finally:
            self._exporting = []
        for seq in sequences:
            self._remove(seq)

    @contextmanager
    def import_sequences(self, manifest: TransferManifest) -> Iterator[ImportTransaction]:
        """Reserve room for samples whose missing blocks the caller then writes into the transaction.

        At the end of the `with` all samples enter; if it raises, none. Raises InputError for an id in use, a finished
        sequence, or blocks of another shape.
        """
        self._check_not_exporting()
        self._settle()
        sequences = [s.restore(self._sequence(s.sample_id, list(s.prompt), s.params)) for s in manifest.sequences]
        if manifest.num_blocks and manifest.shape != self._block_shape:
            raise InputError(f"blocks of {manifest.shape} do not fit this engine's {self._block_shape}; move as tokens")
        transaction = ImportTransaction(self.scheduler, self._cache)
        try:
            for seq, snapshot in zip(sequences, manifest.sequences):
                transaction.reserve(seq, snapshot)
            yield transaction
            transaction.commit(self._sequences)
        except BaseException:
            transaction.rollback(self._sequences)
            raise

    def pause(self) -> None:
        """Drop the KV cache, or let its memory lie. Unfinished samples are run again from their tokens."""
        self._check_not_exporting()
        self._settle()
        self.scheduler.preempt_all()
        if self.options.keep_memory:
            self._kept = self._cache or self._kept
        else:
            self.runner.release()
        self._cache = None

    def resume(self) -> None:
        """Allocate the KV cache again, unless it was kept."""
        if self._cache is None:
            self._cache, self._kept = self._kept or self.runner.new_cache(), None

    @property
    def cache_bytes(self) -> int:
        """Memory of the KV cache, also while the engine is paused."""
        cache = self._cache or self._kept
        return cache.nbytes if cache else 0

    def release_weights(self) -> None:
        """Let go of the weights until the next `load_weights`. Raises RuntimeError unless the engine is paused."""
        if self._cache is not None:
            raise RuntimeError("the engine is running; call pause() first")
        self.runner.unbind()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Read from these tensors, or new values in old ones; unfinished samples are run again from their tokens."""
        self._check_not_exporting()
        self._settle()
        self.runner.bind(weights)
        self.scheduler.preempt_all()

    def learn(self, responses: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        """All (prompt, response) of an iteration that is over, wherever they were drawn: guesses follow them."""
        if self.drafter:
            self.drafter.end_iteration(responses)

    def news(self) -> str:
        """What a log should say, once and by the first tensor rank; "" where there is nothing."""
        measured = self.drafter.measured if self.drafter and self.runner.tp_rank == 0 else None
        return measured.take_news() if measured else ""

    def new_drafter(self) -> Drafter | None:
        """One that has learnt nothing, if the engine guesses."""
        rows, price = self.runner.draft_rows, self.runner.step_price
        if not rows:
            return None
        measured = GuessRows(rows, price, self.runner.agree) if self.options.draft_rows is None else None
        return Drafter(self.spec.vocab, rows, price, measured)

    def check_integrity(self) -> None:
        """Assert that blocks, tables and queues agree; for tests and after errors."""
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        assert {seq.sample_id: seq for seq in queued} == self._sequences, "queues and samples disagree"
        self.scheduler.check_integrity()

    def _launch(self) -> LaunchedStep | None:
        """Launch the next step, if there is anything to run."""
        assert self._cache is not None
        reused_before = self.scheduler.reused_tokens
        scheduled = self._with_guesses(self.scheduler.schedule())
        if not scheduled:
            return None
        batch = ForwardBatch.of(scheduled, self.scheduler.table, self.options.block_tokens)
        decoding = sum(count == 1 and draws and bool(seq.tokens) for seq, count, draws, _ in scheduled)
        drafted = sum(len(guesses) for _, _, _, guesses in scheduled)
        drawing = [seq for seq, _, draws, guesses in scheduled if draws for _ in range(1 + len(guesses))]
        totals = batch.positions[batch.draw_rows] + 1
        draws = draw_batch(drawing, totals, self.scheduler.table, batch.guesses)
        launched = self.runner.launch(batch, draws, self._cache)
        self.scheduler.complete(scheduled)
        return LaunchedStep(
            [Drawing(seq, guesses) for seq, _, draws, guesses in scheduled if draws],
            launched,
            batch=len(scheduled),
            prefill_tokens=len(batch.tokens) - decoding - drafted,
            context_tokens=int(batch.contexts.sum()) - drafted,
            reused_tokens=self.scheduler.reused_tokens - reused_before,
        )

    def _with_guesses(self, scheduled: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """The same, and what the drafter guesses that decoding sequences will draw, where there is room for it."""
        most = self.drafter.rows(len(scheduled)) if self.drafter else 0
        rows = self.scheduler.room_for_guesses(scheduled, most)
        if self.drafter is None or not rows or not scheduled:
            return scheduled
        each = self.runner.guesses_each(len(scheduled))
        guesses = self.drafter.propose([seq for seq, _, _, _ in scheduled], self.scheduler.table, rows, each)
        return self.scheduler.add_guesses(scheduled, guesses) if any(guesses) else scheduled

    def _leave(self, step: LaunchedStep) -> None:
        """Let a step run while the next is scheduled; its draws stand as their places until they are read."""
        self._in_flight, self._certain_end = step, False
        for (seq, _), place in zip(step.drawing, step.launched.places.tolist()):
            if seq.finish_reason is None:
                seq.tokens.append(~place)
                self._certain_end |= seq.total_tokens >= seq.max_total_tokens

    def _forget_step(self) -> None:
        """Take the places of draws that were not read back; the same will be drawn again."""
        step, self._in_flight = self._in_flight, None
        for seq, _ in step.drawing if step else ():
            if seq.finish_reason is None:
                seq.tokens.pop()

    def _read(self) -> list[GenerationResult]:
        """Finish the step in flight, if there is one; returns the samples that finished."""
        step = self._in_flight
        self._forget_step()
        return self._end(step) if step else []

    def _settle(self) -> None:
        """`_read` outside of `step`."""
        self._clock = self._now()
        try:
            self._ended += self._read()
        except BaseException:
            self.scheduler.preempt_all()
            raise

    def _end(self, step: LaunchedStep) -> list[GenerationResult]:
        """Take the draws of a step in; returns the samples that finished."""
        draws, finished = step.launched.read(), []
        row = accepted = 0
        for number, (seq, guesses) in enumerate(step.drawing):
            if seq.finish_reason is None:  # else it ended in the step before, not read when this one was launched
                accepted += self._take_run(number, seq, guesses, draws, row)
                if seq.finish_reason is not None:
                    self._remove(seq)
                    finished.append(seq.result())
            row += 1 + len(guesses)
        now = self._now()
        self.last_step = step.stats(self._seconds + now - self._clock, accepted)
        self._clock, self._seconds = now, 0.0
        if self.drafter and self.drafter.measured and not step.prefill_tokens:
            self.drafter.measured.observe(self.last_step.decode_observation())
        return finished

    def _now(self) -> float:
        """Seconds on a clock that stands still while a CUDA graph is captured."""
        return time.perf_counter() - self.runner.recording_seconds

    def _take_run(self, number: int, seq: Sequence, guesses: list[int], draws: Draws, row: int) -> int:
        """Take a sequence's draws in, from `row` on and as far as its guesses foresaw them; returns how many did."""
        self._take(seq, draws.tokens[row], draws.logprobs[row])
        if not guesses:
            return 0
        right, tried = 0, 0
        while tried < len(guesses) and seq.finish_reason is None and right == tried:
            tried += 1
            if draws.tokens[row + right] == guesses[right]:
                right += 1
                self._take(seq, draws.tokens[row + right], draws.logprobs[row + right])
        assert self.drafter is not None, "who else has guessed"
        self.drafter.told(number, tried, right)
        if seq.finish_reason is None:
            self.scheduler.accept_guesses(seq, right)
        return right

    def _take(self, seq: Sequence, token: int, logprob: float) -> None:
        if token < 0:
            seq.finish_reason = "error"
            return
        seq.append(token, logprob)
        params = seq.params
        if params.stop and seq.finish_reason != "stop" and len(seq.tokens) >= params.min_tokens:
            assert self._detokenize is not None, "checked when the sample was added"
            if completes_stop_text(seq.tokens, params.stop, self._detokenize):
                seq.finish_reason = "stop"

    def _sequence(self, sample_id: int, prompt: list[int], params: SamplingParams) -> Sequence:
        """A checked sequence, not yet entered."""
        if not isinstance(sample_id, int):
            raise InputError(f"sample id {sample_id!r} must be an integer")
        if sample_id in self._sequences:
            raise InputError(f"sample {sample_id} is already in the engine; use another id")
        cache_tokens = self.options.block_tokens * self.options.num_blocks
        return new_sequence(sample_id, prompt, params, self.spec, cache_tokens, self._detokenize is not None)

    def _add(self, seq: Sequence) -> None:
        self._sequences[seq.sample_id] = seq
        self.scheduler.add(seq)

    def _remove(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        if self.drafter:
            self.drafter.learn(seq)
        del self._sequences[seq.sample_id]

    def _find(self, sample_id: int) -> Sequence:
        if sample_id not in self._sequences:
            raise InputError(f"sample {sample_id} is not unfinished in this engine")
        return self._sequences[sample_id]

    def _check_not_exporting(self) -> None:
        if self._exporting:
            raise RuntimeError(f"samples {self._exporting[:8]} are being exported; end the `with` of the export first")
