"""The generation engine: prompts in, finished samples out, one step at a time.

    while engine.has_unfinished():
        finished += engine.step()        the scheduler chooses, the model runs, the sampler draws

Tokens and log-probabilities of a sample depend on its prompt, its parameters and its sample id alone: on CPU in
float32 not a bit changes with the batch, chunking, shared prefixes, preemption, or a move to another engine. The
engine runs in one process, or on each rank of a tensor-parallel group, where all ranks make the same calls in
the same order and so take identical steps. It knows token ids; texts only to find stop texts, and only if it was
given a `detokenize`.
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

from rlhfuse.config.spec import ModelSpec
from rlhfuse.decisions.migration import MoveCost, Together
from rlhfuse.errors import InputError
from rlhfuse.gen.admission import new_sequence
from rlhfuse.gen.block_manager import BlockManager
from rlhfuse.gen.engine_reports import SequenceState, StepStats
from rlhfuse.gen.forward_batch import ForwardBatch
from rlhfuse.gen.kv_cache import KVCache
from rlhfuse.gen.migration.arrival import Arrival
from rlhfuse.gen.migration.migration import (
    BUCKET_BYTES,
    BlockShape,
    Manifest,
    MoveMode,
    Shipment,
    Traveller,
    buckets,
    pack,
)
from rlhfuse.gen.model_runner import Kernels, ModelRunner
from rlhfuse.gen.prefill_rate import PrefillRate
from rlhfuse.gen.sampler import DrawBatch, draw_tokens
from rlhfuse.gen.scheduler import Scheduler, Work
from rlhfuse.gen.sequence import GenerationResult, SamplingParams, Sequence
from rlhfuse.gen.stop_text import completes_stop_text
from rlhfuse.gen.tokenizer import read_tokenizer

__all__ = ["Engine", "EngineOptions", "GenerationResult", "SamplingParams", "SequenceState", "StepStats"]


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of an engine."""

    num_blocks: int = 1024  # KV blocks
    block_tokens: int = 16  # tokens in one block
    max_sequences: int = 256  # running at the same time
    max_batched_tokens: int = 2048  # tokens in one step, prefill included
    cuda_graphs: bool = True  # replay decode steps as CUDA graphs; without effect on CPU
    kernels: Kernels = "auto"  # torch: torch's attention and GEMMs on CPU too, which promise no bits

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_tokens", "max_sequences", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if self.kernels not in ("auto", "torch"):
            raise InputError(f"kernels={self.kernels!r} is unknown; use 'auto' or 'torch'")


class Engine:
    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        options: EngineOptions = EngineOptions(),
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        tp_group: dist.ProcessGroup | None = None,
        detokenize: Callable[[list[int]], str] | None = None,
    ) -> None:
        """`weights` under Megatron-core names, this rank's shares; they are read in place.

        Raises InputError for a missing or ill-shaped weight, or a dtype that is neither float32 nor bfloat16.
        """
        if dtype not in (torch.float32, torch.bfloat16):
            raise InputError(f"dtype={dtype} is not supported; use float32 or bfloat16")
        self.spec, self.options, self.dtype = spec, options, dtype
        self.device = torch.device(device)
        self.runner = ModelRunner(
            spec,
            weights,
            device=self.device,
            dtype=dtype,
            tp_group=tp_group,
            max_sequences=options.max_sequences,
            kernels=options.kernels,
            cuda_graphs=options.cuda_graphs,
        )
        self.scheduler = Scheduler(
            BlockManager(options.num_blocks, options.block_tokens), options.max_sequences, options.max_batched_tokens
        )
        self._cache: KVCache | None = self._new_cache()
        self._sequences: dict[int, Sequence] = {}  # unfinished, by sample id
        self._block_shape = BlockShape(
            spec.layers, options.block_tokens, spec.kv_heads, spec.head_dim, str(dtype).removeprefix("torch.")
        )
        self._departing: list[int] = []  # sample ids offered to another engine, not yet gone
        self._prefill_rate = PrefillRate()
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
        """Complete prompts of token ids, in order. `params` is one for all, or one each.

        Sample ids default to 0, 1, ...; sampled noise depends on them. Raises InputError, and adds nothing, if any
        prompt cannot be served.
        """
        if self._sequences:
            raise InputError(f"generate() needs an idle engine; {len(self._sequences)} samples are unfinished")
        prompts = [list(prompt) for prompt in prompts]
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        ids = list(range(len(prompts))) if sample_ids is None else list(sample_ids)
        if not len(prompts) == len(each) == len(ids):
            raise InputError(f"{len(prompts)} prompts, {len(each)} params, {len(ids)} sample ids: give one each")
        if len(set(ids)) < len(ids):
            raise InputError("sample_ids holds one id twice; ids must differ")
        for seq in [self._sequence(*item) for item in zip(ids, prompts, each)]:
            self._enter(seq)
        finished: dict[int, GenerationResult] = {}
        while self.has_unfinished():
            finished |= {result.sample_id: result for result in self.step()}
        return [finished[sample_id] for sample_id in ids]

    def add(self, sample_id: int, prompt: Iterable[int], params: SamplingParams) -> None:
        """Queue a sample.

        Raises InputError, and changes nothing, for an id in use, an empty prompt, a token outside the vocabulary, or
        a prompt that with `max_tokens` is longer than the context or than all KV blocks together can hold.
        """
        self._enter(self._sequence(sample_id, list(prompt), params))

    def step(self) -> list[GenerationResult]:
        """Run one forward pass and draw; returns the samples that finished. Nothing to do gives []."""
        if self._cache is None:
            raise RuntimeError("the engine is paused; call resume() first")
        if not self.runner.bound:
            raise RuntimeError("the engine has no weights; call load_weights() first")
        self._check_settled()
        start, reused_before = time.perf_counter() - self.runner.recording_seconds, self.scheduler.reused_tokens
        work = self.scheduler.schedule()
        if not work:
            return []
        batch = ForwardBatch.of(work, self.scheduler.table, self.options.block_tokens)
        decoding = sum(count == 1 and draws and bool(seq.tokens) for seq, count, draws in work)
        try:
            finished = self._run(work, batch)
        except BaseException:
            self.scheduler.preempt_all()  # blocks may be half written: run their tokens again
            raise
        if self.device.type == "cuda" and not len(batch.draw_rows):
            torch.cuda.synchronize(self.device)  # nothing was drawn, so nothing has waited for the forward pass
        self.last_step = done = StepStats(
            batch=len(work),
            prefill_tokens=len(batch.tokens) - decoding,
            context_tokens=int(batch.contexts.sum()),
            seconds=time.perf_counter() - self.runner.recording_seconds - start,
            reused_tokens=self.scheduler.reused_tokens - reused_before,
        )
        self._prefill_rate.observe(done.prefill_tokens, done.batch, done.seconds)
        return finished

    def abort(self, sample_id: int) -> None:
        """Drop a sample. Raises InputError if it is not unfinished here."""
        self._check_settled()
        self._leave(self._find(sample_id))

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def unfinished(self) -> list[SequenceState]:
        """All unfinished samples: running, oldest first, then waiting."""
        queues = ((self.scheduler.running, False), (self.scheduler.waiting, True))
        return [self._state(seq, waiting) for queue, waiting in queues for seq in queue]

    @property
    def free_blocks(self) -> int:
        return self.scheduler.blocks.free_blocks

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache on this rank; 0 when paused."""
        return self._cache.bytes if self._cache is not None else 0

    def move_cost(
        self, bytes_per_second: float, latency_seconds: float = 0.0, prefill_seconds_per_token: float | None = None
    ) -> MoveCost:
        """What moving a sample over such a link costs, with its keys and values or run again.

        A speed of prefill not given is learned from the steps so far, with tensor parallelism those of the first rank
        (a collective), so that all decide alike. Raises InputError if none has prefilled.
        """
        seconds = prefill_seconds_per_token
        if seconds is None:
            seconds = self._prefill_rate.agreed_seconds_per_token(self.runner.tp_group)
        if not bytes_per_second > 0:
            raise InputError(f"bytes_per_second={bytes_per_second} must be above 0")
        return MoveCost(self._block_shape.bytes_per_token, latency_seconds, 1 / bytes_per_second, seconds)

    def move_modes(self, sample_ids: Iterable[int], cost: MoveCost) -> dict[int, MoveMode]:
        """The quicker way to move each of these samples together; a prefix that they share is counted once."""
        together, blocks = Together(self.options.block_tokens), self.scheduler.blocks
        found = [self._find(sample_id) for sample_id in sample_ids]
        return {seq.sample_id: together.add(cost, seq.computed_tokens, blocks.shared(seq)) for seq in found}

    @contextmanager
    def export_sequences(
        self, sample_ids: Iterable[int], modes: MoveMode | Mapping[int, MoveMode] = "kv"
    ) -> Iterator[Shipment]:
        """Offer unfinished samples to another engine: they leave at the end of the `with`, or stay if it raises.

        `modes`: "kv" or "tokens", for all or by sample id, as from `move_modes`; a sample that has not run yet
        travels as tokens. Until the end of the `with` this engine does not step, and after it the shipment is of no
        use. Raises InputError for an id that is not unfinished here or is given twice.
        """
        self._check_settled()
        sequences = [self._find(sample_id) for sample_id in sample_ids]
        shipment = pack(sequences, modes, self._block_shape, self._cache)
        self._departing = [seq.sample_id for seq in sequences]
        try:
            yield shipment
        finally:
            self._departing = []
        for seq in sequences:
            self._leave(seq)

    def import_sequences(self, shipment: Shipment) -> list[int]:
        """Take samples in, all or none. Returns ids whose tokens must be run again: without KV, or without room.

        Raises InputError for an id in use, a finished sequence, or blocks of another shape.
        """
        block_bytes = self._block_shape.bytes_per_head * self.runner.kv_heads
        with self.receive_sequences(shipment.manifest) as arrival:
            for numbers in buckets(arrival.wanted, block_bytes, BUCKET_BYTES):
                arrival.write(numbers, shipment.read(numbers, slice(None)))
            recomputed = arrival.recomputed
        return recomputed  # nothing may fail once the samples have entered: the source still holds them

    @contextmanager
    def receive_sequences(self, manifest: Manifest) -> Iterator[Arrival]:
        """Hold room for samples whose blocks the caller then writes, those that the arrival wants.

        At the end of the `with` all samples enter; if it raises, none. Raises as `import_sequences`.
        """
        self._check_settled()
        sequences = [self._restore(traveller) for traveller in manifest.travellers]
        if manifest.num_blocks and manifest.shape != self._block_shape:
            raise InputError(f"blocks of {manifest.shape} do not fit this engine's {self._block_shape}; move as tokens")
        arrival = Arrival(self.scheduler, self._cache)
        try:
            for seq, traveller in zip(sequences, manifest.travellers):
                arrival.hold(seq, traveller)
            yield arrival
            arrival.enter(self._sequences)
        except BaseException:
            arrival.give_back(self._sequences)
            raise

    def pause(self) -> None:
        """Drop the KV cache memory. Unfinished samples keep their tokens and are run again after `resume`."""
        self._check_settled()
        self.scheduler.preempt_all()
        self.runner.release()
        self._cache = None

    def resume(self) -> None:
        """Allocate the KV cache again."""
        if self._cache is None:
            self._cache = self._new_cache()

    def release_weights(self) -> None:
        """Let go of the weights, whose owner may then give their memory back, until the next `load_weights`.

        Raises RuntimeError unless the engine is paused.
        """
        if self._cache is not None:
            raise RuntimeError("the engine is running; call pause() first")
        self.runner.unbind()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Read from these tensors from now on; they may be the old ones with new values.

        Everything computed with the old values is forgotten: unfinished samples are run again from their tokens.
        """
        self._check_settled()
        self.runner.bind(weights)
        self.scheduler.preempt_all()

    def check_integrity(self) -> None:
        """Assert that blocks, tables and queues agree; for tests and after errors."""
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        assert {seq.sample_id: seq for seq in queued} == self._sequences, "queues and samples disagree"
        self.scheduler.check_integrity()

    def _run(self, work: list[Work], batch: ForwardBatch) -> list[GenerationResult]:
        assert self._cache is not None
        logits = self.runner.forward(batch, self._cache)
        drawing = [seq for seq, _, draws in work if draws]
        totals = batch.positions[batch.draw_rows] + 1
        draws = draw_tokens(logits, DrawBatch.of(drawing, totals, self.scheduler.table))
        self.scheduler.complete(work)
        finished = []
        for seq, token, logprob in zip(drawing, draws.tokens, draws.logprobs):
            self._take(seq, token, logprob)
            if seq.finish_reason is not None:
                self._leave(seq)
                finished.append(seq.result())
        return finished

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
        return new_sequence(
            sample_id,
            prompt,
            params,
            self.spec,
            self.options.block_tokens * self.options.num_blocks,
            can_detokenize=self._detokenize is not None,
        )

    def _enter(self, seq: Sequence) -> None:
        self._sequences[seq.sample_id] = seq
        self.scheduler.add(seq)

    def _leave(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        del self._sequences[seq.sample_id]

    def _find(self, sample_id: int) -> Sequence:
        if sample_id not in self._sequences:
            raise InputError(f"sample {sample_id} is not unfinished in this engine")
        return self._sequences[sample_id]

    def _state(self, seq: Sequence, waiting: bool) -> SequenceState:
        table, shared = seq.block_table, self.scheduler.blocks.shared(seq)
        return SequenceState(seq.sample_id, seq.computed_tokens, seq.total_tokens, len(table), tuple(shared), waiting)

    def _check_settled(self) -> None:
        if self._departing:
            raise RuntimeError(f"samples {self._departing[:8]} are being exported; end the `with` of the export first")

    def _restore(self, traveller: Traveller) -> Sequence:
        seq = self._sequence(traveller.sample_id, list(traveller.prompt), traveller.params)
        seq.tokens, seq.logprobs = list(traveller.tokens), list(traveller.logprobs)
        if seq.total_tokens >= seq.max_total_tokens:
            raise InputError(f"sample {seq.sample_id} is finished: it has {seq.total_tokens} tokens")
        return seq

    def _new_cache(self) -> KVCache:
        return KVCache(
            self.spec.layers,
            self.options.num_blocks + self.runner.spare_blocks,
            self.options.block_tokens,
            self.runner.kv_heads,
            self.spec.head_dim,
            lanes=self.runner.uses_cpu_kernels,
            dtype=self.dtype,
            device=self.device,
        )
