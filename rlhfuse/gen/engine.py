"""The generation engine: continuous batching over a paged KV cache; prompts in, finished samples out, step by step.

    while engine.has_unfinished():
        finished += engine.step()        the scheduler chooses, the model runs, the sampler draws

On CPU a float32 sample's bits depend on its request alone. A GPU's steps are launched before the last one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfuse.base.clock import Clock
from rlhfuse.base.errors import InputError
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.speculation import GuessRows
from rlhfuse.gen.core.block_manager import BlockManager
from rlhfuse.gen.core.kv_cache import KVCache
from rlhfuse.gen.core.model_shard import ModelWeights
from rlhfuse.gen.core.scheduler import Scheduler
from rlhfuse.gen.core.sequence import (
    FinishReason,
    GenerationResult,
    SamplingParams,
    Sequence,
    check_tokens,
    new_sequence,
)
from rlhfuse.gen.cpu.forward import CpuForward
from rlhfuse.gen.forward import choose_forward
from rlhfuse.gen.migration.import_transaction import ImportTransaction
from rlhfuse.gen.migration.kv_transfer import BlockShape, KVTransfer, TransferManifest, prepare_transfer
from rlhfuse.gen.options import EngineOptions
from rlhfuse.gen.speculation.guesser import Guesser
from rlhfuse.gen.step_loop import StepLoop, StepStats
from rlhfuse.gen.stop_text import read_tokenizer
from rlhfuse.tasks.instance_limits import MoveMode
from rlhfuse.tasks.migration import UnfinishedSample

__all__ = ["Engine", "EngineOptions", "GenerationResult", "SamplingParams", "StepStats"]


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
        clock: Clock = Clock(),
    ) -> None:
        """`weights` under Megatron-core names, this rank's shares; they are read in place.

        None: the engine begins paused, without weights and without a cache; `load_weights` and `resume` come first.
        Raises InputError for a missing or ill-shaped weight, or a dtype that is neither float32 nor bfloat16.
        """
        if dtype not in (torch.float32, torch.bfloat16):
            raise InputError(f"dtype={dtype} is not supported; use float32 or bfloat16")
        self.spec, self.options, self.dtype = spec, options, dtype
        self.device = torch.device(device)
        self.forward, self.lines = choose_forward(spec, options, self.device, dtype, tp_group)
        self.scheduler = self._new_scheduler()
        self._sequences: dict[int, Sequence] = {}  # unfinished, by sample id
        self.parked: dict[int, Sequence] = {}  # those of them at the end of a turn, which have no row and no blocks
        self._block_shape = BlockShape(
            spec.layers, options.block_tokens, spec.kv_heads, spec.head_dim, str(dtype).removeprefix("torch.")
        )
        self.loop = StepLoop(
            self.scheduler, self.forward, options, self.new_guesser(), self._leave_batch, detokenize, clock
        )
        self._has_tokenizer = detokenize is not None
        self._exporting: list[int] = []  # sample ids offered to another engine
        self._ended: list[GenerationResult] = []  # found finished outside of step()
        self.weights: ModelWeights | None = None
        if weights is not None:
            self._bind(weights)
        self._cache = self._new_cache() if self.weights else None  # None: paused
        self._kept: KVCache | None = None  # of a paused engine that keeps its memory

    @staticmethod
    def from_pretrained(
        path: str | Path,
        options: EngineOptions = EngineOptions(),
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Engine:
        """An engine over a Hugging Face folder, in a plain process; warm on a CPU. Stop texts need tokenizer.json."""
        from rlhfuse.models.hf import load_weights

        spec = ModelSpec.from_config(path)
        weights = {name: w.to(device) for name, w in load_weights(path, spec, dtype=dtype).items()}
        engine = Engine(spec, weights, options, device=device, dtype=dtype, detokenize=read_tokenizer(Path(path)))
        if engine.device.type == "cpu":
            # Two tokens are drawn and forgotten, so that no request waits for kernels to be loaded or compiled.
            engine.generate([[0]], SamplingParams(max_tokens=2, ignore_eos=True))
            engine.scheduler.preempt_all()
            engine.loop.guesser = engine.new_guesser()
        return engine

    def generate(
        self,
        prompts: Iterable[Iterable[int]],
        params: SamplingParams | Iterable[SamplingParams] = SamplingParams(),
        sample_ids: Iterable[int] | None = None,
    ) -> list[GenerationResult]:
        """Complete prompts of token ids, in order. `params` is one for all, or one each; noise depends on sample ids.

        Raises InputError, and adds nothing, if any prompt cannot be served, or has turns. After another exception, such
        as Ctrl-C's, the engine is idle.
        """
        if self.samples or self.has_unfinished():
            told = f"generate() needs an idle engine; {len(self._sequences)} samples are unfinished"
            raise InputError(f"{told}: step() until has_unfinished() is False, or abort() each of sample_ids")
        prompts = [list(prompt) for prompt in prompts]
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        ids = list(range(len(prompts))) if sample_ids is None else list(sample_ids)
        if not len(prompts) == len(each) == len(ids):
            raise InputError(f"{len(prompts)} prompts, {len(each)} params, {len(ids)} sample ids: give one each")
        if len(set(ids)) < len(ids):
            raise InputError("sample_ids holds one id twice; ids must differ")
        if any(own.turns for own in each):
            raise InputError("turns=True: generate() observes nothing; use add(), step(), observe() and close()")
        sequences = [self._sequence(*item) for item in zip(ids, prompts, each)]  # all are checked before any enters
        finished: dict[int, GenerationResult] = {}
        try:
            for seq in sequences:
                self._add(seq)
            while self.has_unfinished():
                finished |= {result.sample_id: result for result in self.step()}
        except BaseException:  # as of Ctrl-C: nobody asks for the rest, and a step may have been left anywhere
            self.scheduler = self.loop.scheduler = self._new_scheduler()
            self.loop.in_flight, self.loop.guesser, self._ended = None, self.new_guesser(), []
            self._sequences.clear()
            self.parked.clear()
            raise
        return [finished[sample_id] for sample_id in ids]

    def add(self, sample_id: int, prompt: Iterable[int], params: SamplingParams) -> None:
        """Queue a sample.

        Raises InputError, and changes nothing, for an id in use, an empty prompt, a token outside the vocabulary, or
        a prompt that with `max_tokens` is longer than the context or than all KV blocks together can hold.
        """
        self._add(self._sequence(sample_id, list(prompt), params))

    def observe(self, sample_id: int, tokens: Iterable[SupportsIndex]) -> None:
        """Let a parked sample go on behind these tokens; what its blocks still hold is not run again.

        Where there are none, or no room for them and one that is drawn, it ends before them, cut; `step` returns it.
        Raises InputError, and changes nothing, for a sample that is not parked or a token outside the vocabulary.
        """
        self._check_not_exporting()
        seq, observed = self._find_parked(sample_id), check_tokens(f"sample {sample_id}", tokens, self.spec.vocab)
        self._settle()  # a step in flight may hold a draw for the turn that is over
        if not 0 < len(observed) <= seq.room:
            self._ended.append(self.close(sample_id, "length"))
            return
        del self.parked[sample_id]
        seq.observe(observed)
        self.scheduler.add(seq)

    def close(self, sample_id: int, finish_reason: FinishReason = "stop") -> GenerationResult:
        """End a parked sample: its last turn was the last one. Raises InputError for one that is not parked."""
        self._check_not_exporting()
        seq = self._find_parked(sample_id)
        seq.finish_reason = finish_reason
        del self.parked[sample_id], self._sequences[sample_id]
        return seq.result()

    def step(self) -> list[GenerationResult]:
        """Run one forward pass and draw; returns the samples that finished, or a turn. Nothing to do gives []."""
        if self._cache is None:
            raise RuntimeError("the engine is paused; call resume() first")
        if self.weights is None:
            raise RuntimeError("the engine has no weights; call load_weights() first")
        self._check_not_exporting()
        finished, self._ended = self._ended, []
        return finished + self.loop.step(self._cache)

    @property
    def last_step(self) -> StepStats:
        """What the last call of `step` read the draws of."""
        return self.loop.last_step

    def settle(self) -> list[GenerationResult]:
        """Read the draws of a step that was launched ahead; returns the samples that finished."""
        self._settle()
        finished, self._ended = self._ended, []
        return finished

    def abort(self, sample_id: int) -> None:
        """Drop a sample. Raises InputError if it is not unfinished here."""
        self._check_not_exporting()
        self._settle()
        kept = [result for result in self._ended if result.sample_id != sample_id]
        if sample_id in self._sequences or len(kept) == len(self._ended):
            self._remove(self._find(sample_id))
        self._ended = kept

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do, or to return."""
        return len(self._sequences) > len(self.parked) or bool(self._ended)

    @property
    def samples(self) -> int:
        """Those in the engine, also parked ones, and one that ended in a step not yet read."""
        return len(self._sequences)

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """Ids of `samples`."""
        return tuple(self._sequences)

    def unfinished(self, instance: int = 0) -> list[UnfinishedSample]:
        """All unfinished samples of this engine, `instance` to others: running, oldest first, then waiting, parked.

        A parked sample's cache is what others may still take up of it, so all its blocks are shared.
        """
        self._settle()
        blocks = self.scheduler.blocks
        queued = [
            UnfinishedSample(seq.sample_id, instance, seq.total_tokens, seq.computed_tokens, blocks.shared(seq))
            for seq in (*self.scheduler.running, *self.scheduler.waiting)
        ]
        known = {seq: tuple(blocks.known_prefix(seq)) for seq in self.parked.values()}
        return queued + [
            UnfinishedSample(seq.sample_id, instance, seq.total_tokens, len(kept) * blocks.block_tokens, kept)
            for seq, kept in known.items()
        ]

    @property
    def free_blocks(self) -> int:
        return self.scheduler.blocks.free_blocks

    @contextmanager
    def export_sequences(
        self, sample_ids: Iterable[int], modes: MoveMode | Mapping[int, MoveMode] = "kv"
    ) -> Iterator[KVTransfer]:
        """Offer unfinished samples to another engine: they leave at the end of the `with`, or stay if it raises.

        A sample that has not run yet moves as tokens, a parked one with what is left of its cache. Until the end of the
        `with` this engine does not step, and after it the transfer is of no use. Raises InputError for an id that is
        not unfinished here or is given twice.
        """
        self._check_not_exporting()
        self._settle()
        sequences = [self._find(sample_id) for sample_id in sample_ids]
        parked, blocks = dict.fromkeys(seq for seq in sequences if seq.parked), self.scheduler.blocks
        try:
            for seq in parked:
                blocks.share(seq, blocks.known_prefix(seq))
            transfer = prepare_transfer(sequences, modes, self._block_shape, self._cache)
            self._exporting = [seq.sample_id for seq in sequences]
            yield transfer
        finally:
            self._exporting = []
            for seq in parked:
                blocks.release(seq)
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
            self.parked |= {seq.sample_id: seq for seq in sequences if seq.parked}
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
            self.forward.release()
        self._cache = None

    def resume(self) -> None:
        """Allocate the KV cache again, unless it was kept."""
        if self._cache is None:
            self._cache, self._kept = self._kept or self._new_cache(), None

    @property
    def cache_bytes(self) -> int:
        """Memory of the KV cache, also while the engine is paused."""
        cache = self._cache or self._kept
        return cache.nbytes if cache else 0

    def release_weights(self) -> None:
        """Let go of the weights until the next `load_weights`. Raises RuntimeError unless the engine is paused."""
        if self._cache is not None:
            raise RuntimeError("the engine is running; call pause() first")
        self.forward.unbind()
        self.weights = None

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Read from these tensors, or new values in old ones; unfinished samples are run again from their tokens."""
        self._check_not_exporting()
        self._settle()
        self._bind(weights)
        self.scheduler.preempt_all()

    def learn(self, responses: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        """All (prompt, response) of an iteration that is over, wherever they were drawn: guesses follow them."""
        if self.loop.guesser:
            self.loop.guesser.end_iteration(responses)

    def new_guesser(self) -> Guesser | None:
        """One that has learnt nothing, if the engine guesses, as with CPU kernels alone."""
        rows, forward, measured = self.options.draft_rows, self.forward, None
        if not isinstance(forward, CpuForward):
            return None
        if rows is None:
            rows = forward.idle_rows
            measured = GuessRows(rows, forward.step_price, forward.parallel.first)
        return Guesser(self.spec.vocab, rows, forward.step_price, measured) if rows else None

    def _settle(self) -> None:
        self._ended += self.loop.settle()

    def _new_scheduler(self) -> Scheduler:
        options = self.options
        blocks = BlockManager(options.num_blocks, options.block_tokens)
        return Scheduler(blocks, options.max_sequences, options.max_batched_tokens)

    def _new_cache(self) -> KVCache:
        """An empty cache of this rank's KV heads, in the layout that its kernels read."""
        shape, forward = self._block_shape, self.forward
        blocks, kv_heads = self.options.num_blocks + forward.spare_blocks, shape.kv_heads // forward.parallel.size
        sizes = shape.layers, blocks, shape.block_tokens, kv_heads, shape.head_dim
        return forward.cache_type(*sizes, dtype=self.dtype, device=self.device)

    def _bind(self, weights: Mapping[str, Tensor]) -> None:
        # Everything is checked before anything is replaced: after an InputError the old weights still serve.
        taken = ModelWeights.take(weights, self.spec, self.forward.parallel.size, self.dtype, self.device)
        self.weights = taken
        self.forward.bind(taken)

    def _sequence(self, sample_id: int, prompt: list[int], params: SamplingParams) -> Sequence:
        """A checked sequence, not yet entered."""
        if not isinstance(sample_id, int):
            raise InputError(f"sample id {sample_id!r} must be an integer")
        if sample_id in self._sequences:
            raise InputError(f"sample {sample_id} is already in the engine; use another id")
        cache_tokens = self.options.block_tokens * self.options.num_blocks
        return new_sequence(sample_id, prompt, params, self.spec, cache_tokens, self._has_tokenizer)

    def _add(self, seq: Sequence) -> None:
        self._sequences[seq.sample_id] = seq
        self.scheduler.add(seq)

    def _leave_batch(self, seq: Sequence) -> None:
        """Take out what ran or waited; at the end of a turn it stays in the engine, parked."""
        self.scheduler.remove(seq)
        if self.loop.guesser:
            self.loop.guesser.learn(seq)
        if seq.parked:
            self.parked[seq.sample_id] = seq
        else:
            del self._sequences[seq.sample_id]

    def _remove(self, seq: Sequence) -> None:
        if seq.parked:
            del self.parked[seq.sample_id], self._sequences[seq.sample_id]
        else:
            self._leave_batch(seq)

    def _find_parked(self, sample_id: int) -> Sequence:
        if sample_id not in self.parked:
            raise InputError(f"sample {sample_id} is not parked in this engine: it has no turn that is over")
        return self.parked[sample_id]

    def _find(self, sample_id: int) -> Sequence:
        if sample_id not in self._sequences:
            raise InputError(f"sample {sample_id} is not unfinished in this engine")
        return self._sequences[sample_id]

    def _check_not_exporting(self) -> None:
        if self._exporting:
            raise RuntimeError(f"samples {self._exporting[:8]} are being exported; end the `with` of the export first")
