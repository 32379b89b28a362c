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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfuse.errors import InputError
from rlhfuse.gen.block_manager import BlockManager
from rlhfuse.gen.forward_batch import ForwardBatch
from rlhfuse.gen.kv_cache import KVCache
from rlhfuse.gen.migration import KVSnapshot
from rlhfuse.gen.model_runner import ModelRunner
from rlhfuse.gen.sampler import Draw, DrawRequest, draw_tokens
from rlhfuse.gen.scheduler import Scheduler, Work
from rlhfuse.gen.sequence import GenerationResult, SamplingParams, Sequence
from rlhfuse.spec import ModelSpec

__all__ = ["Engine", "EngineOptions", "GenerationResult", "KVSnapshot", "SamplingParams", "SequenceState", "StepStats"]


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of an engine."""

    num_blocks: int = 1024  # KV blocks
    block_tokens: int = 16  # tokens in one block
    max_sequences: int = 256  # running at the same time
    max_batched_tokens: int = 2048  # tokens in one step, prefill included

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_tokens", "max_sequences", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class StepStats:
    """What one step did, as the cost model wants to know it."""

    batch: int  # sequences that ran
    prefill_tokens: int  # tokens run for sequences that were not decoding
    context_tokens: int  # tokens in the cache of all that ran, after the step
    seconds: float


@dataclass(frozen=True)
class SequenceState:
    """An unfinished sample as others see it."""

    sample_id: int
    kv_tokens: int  # tokens in the cache
    total_tokens: int  # prompt and response so far
    blocks: int  # KV blocks held (a shared block counts for each sequence)
    waiting: bool  # not running: never started, or preempted


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
        self.runner = ModelRunner(spec, weights, device=self.device, dtype=dtype, tp_group=tp_group)
        self.scheduler = Scheduler(
            BlockManager(options.num_blocks, options.block_tokens), options.max_sequences, options.max_batched_tokens
        )
        self._cache: KVCache | None = self._new_cache()
        self._sequences: dict[int, Sequence] = {}  # unfinished, by sample id
        self._detokenize = detokenize
        self.last_step = StepStats(0, 0, 0, 0.0)

    @staticmethod
    def from_pretrained(
        path: str | Path,
        options: EngineOptions = EngineOptions(),
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "Engine":
        """An engine over a Hugging Face folder, in a plain process. Stop texts need its tokenizer.json."""
        from rlhfuse.models.hf import load_weights

        spec = ModelSpec.from_config(path)
        weights = {name: w.to(device) for name, w in load_weights(path, spec, dtype=dtype).items()}
        return Engine(spec, weights, options, device=device, dtype=dtype, detokenize=_read_tokenizer(Path(path)))

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
        """Queue a sample. The response ends with the model's context even if max_tokens is larger.

        Raises InputError, and changes nothing, for an id in use, an empty prompt, a token outside the vocabulary, a
        prompt that fills the context, or one that all KV blocks together could not hold with its response.
        """
        self._enter(self._sequence(sample_id, list(prompt), params))

    def step(self) -> list[GenerationResult]:
        """Run one forward pass and draw; returns the samples that finished. Nothing to do gives []."""
        if self._cache is None:
            raise RuntimeError("the engine is paused; call resume() first")
        start = time.perf_counter()
        work = self.scheduler.schedule()
        if not work:
            return []
        prefill_tokens = sum(w.count for w in work if not w.seq.is_decoding)
        context_tokens = sum(w.context for w in work)
        try:
            finished = self._run(work)
        except BaseException:
            self.scheduler.preempt_all()  # blocks may be half written: run their tokens again
            raise
        if self.device.type == "cuda" and not any(w.draws for w in work):
            torch.cuda.synchronize(self.device)  # nothing was drawn, so nothing has waited for the forward pass
        self.last_step = StepStats(len(work), prefill_tokens, context_tokens, time.perf_counter() - start)
        return finished

    def abort(self, sample_id: int) -> None:
        """Drop a sample. Raises InputError if it is not unfinished here."""
        self._leave(self._find(sample_id))

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def unfinished(self) -> list[SequenceState]:
        """All unfinished samples: running, oldest first, then waiting."""
        running = [(seq, False) for seq in self.scheduler.running]
        return [
            SequenceState(seq.sample_id, seq.computed_tokens, seq.total_tokens, len(seq.block_table), waiting)
            for seq, waiting in running + [(seq, True) for seq in self.scheduler.waiting]
        ]

    @property
    def free_blocks(self) -> int:
        return self.scheduler.blocks.free_blocks

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache on this rank; 0 when paused."""
        return self._cache.bytes if self._cache is not None else 0

    def export_sequences(self, sample_ids: Iterable[int], *, with_kv: bool = True) -> list[KVSnapshot]:
        """Take unfinished samples out, with copies of their keys and values if they have any."""
        sequences = [self._find(sample_id) for sample_id in sample_ids]
        snapshots = [self._snapshot(seq, with_kv) for seq in sequences]
        for seq in sequences:
            self._leave(seq)
        return snapshots

    def import_sequences(self, snapshots: Iterable[KVSnapshot]) -> list[int]:
        """Take samples in. Returns the ids of those whose tokens must be run again: without KV, or without room.

        Raises InputError, and takes none, for an id in use or a sequence of another model's shape.
        """
        snapshots = list(snapshots)
        sequences = [self._restore(snapshot) for snapshot in snapshots]
        if len({seq.sample_id for seq in sequences}) < len(sequences):
            raise InputError("import_sequences was given one sample id twice; ids must differ")
        recomputed = []
        for seq, snapshot in zip(sequences, snapshots):
            tokens = snapshot.computed_tokens
            self._sequences[seq.sample_id] = seq
            if snapshot.kv is not None and self._cache is not None and self.scheduler.can_adopt(seq, tokens):
                self.scheduler.adopt(seq, tokens)
                self._cache.write(seq.block_table, snapshot.kv)
            else:
                self.scheduler.add(seq)
                recomputed.append(seq.sample_id)
        return recomputed

    def pause(self) -> None:
        """Drop the KV cache memory. Unfinished samples keep their tokens and are run again after `resume`."""
        self.scheduler.preempt_all()
        self._cache = None

    def resume(self) -> None:
        """Allocate the KV cache again."""
        if self._cache is None:
            self._cache = self._new_cache()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Read from these tensors from now on; they may be the old ones with new values.

        Everything computed with the old values is forgotten: unfinished samples are run again from their tokens.
        """
        self.runner.bind(weights)
        self.scheduler.preempt_all()

    def check_integrity(self) -> None:
        """Assert that blocks, tables and queues agree; for tests and after errors."""
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        assert {seq.sample_id: seq for seq in queued} == self._sequences, "queues and samples disagree"
        self.scheduler.blocks.check_integrity(queued)

    def _run(self, work: list[Work]) -> list[GenerationResult]:
        assert self._cache is not None
        drawing = [w.seq for w in work if w.draws]
        logits = self.runner.forward(ForwardBatch.of(work, self.options.block_tokens), self._cache)
        draws = draw_tokens(logits, [DrawRequest.of(seq) for seq in drawing])
        self.scheduler.complete(work)
        for seq, draw in zip(drawing, draws):
            self._take(seq, draw)
        finished = [seq for seq in drawing if seq.finish_reason is not None]
        for seq in finished:
            self._leave(seq)
        return [seq.result() for seq in finished]

    def _take(self, seq: Sequence, draw: Draw) -> None:
        if draw.token < 0:
            seq.finish_reason = "error"
            return
        seq.append(draw.token, draw.logprob)
        if seq.params.stop and seq.finish_reason != "stop" and self._ends_with_stop_text(seq):
            seq.finish_reason = "stop"

    def _ends_with_stop_text(self, seq: Sequence) -> bool:
        assert self._detokenize is not None, "checked when the sample was added"
        if len(seq.tokens) < seq.params.min_tokens:
            return False
        # A character takes at most four tokens: the new token's match lies within this many.
        window = 4 * max(map(len, seq.params.stop)) + 8
        text = self._detokenize(seq.tokens[-window:])
        return any(stop in text for stop in seq.params.stop)

    def _sequence(self, sample_id: int, prompt: list[int], params: SamplingParams) -> Sequence:
        """A checked sequence, not yet entered."""
        if not isinstance(sample_id, int):
            raise InputError(f"sample id {sample_id!r} must be an integer")
        if sample_id in self._sequences:
            raise InputError(f"sample {sample_id} is already in the engine; use another id")
        if not prompt:
            raise InputError(f"sample {sample_id} has an empty prompt; give at least one token")
        wrong = next((t for t in prompt if not (isinstance(t, int) and 0 <= t < self.spec.vocab)), None)
        if wrong is not None:
            raise InputError(f"sample {sample_id}: token {wrong!r} is not an id in [0, {self.spec.vocab})")
        if len(prompt) >= self.spec.context:
            raise InputError(f"sample {sample_id}: {len(prompt)} prompt tokens leave no room in {self.spec.context}")
        never = next((t for t in params.stop_token_ids if not 0 <= t < self.spec.vocab), None)
        if never is not None:
            raise InputError(f"sample {sample_id}: stop token {never} is not an id in [0, {self.spec.vocab})")
        if params.stop and self._detokenize is None:
            raise InputError("stop texts need a tokenizer; use stop_token_ids, or a model folder with tokenizer.json")
        total = min(len(prompt) + params.max_tokens, self.spec.context)
        needed = self.scheduler.blocks.blocks_for(total - 1)  # the last token is never run
        if needed > self.options.num_blocks:
            raise InputError(
                f"sample {sample_id}: {total} tokens need {needed} blocks of {self.options.block_tokens}, the engine "
                f"has {self.options.num_blocks}; raise num_blocks"
            )
        ends = () if params.ignore_eos else self.spec.eos_token_ids
        return Sequence(sample_id, prompt, params, total, frozenset(params.stop_token_ids) | frozenset(ends))

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

    def _snapshot(self, seq: Sequence, with_kv: bool) -> KVSnapshot:
        kv = None
        if with_kv and seq.computed_tokens and self._cache is not None:
            kv = self._cache.read(seq.block_table, seq.computed_tokens)
        return KVSnapshot(
            seq.sample_id,
            tuple(seq.prompt),
            tuple(seq.tokens),
            tuple(seq.logprobs),
            seq.params,
            tuple(kv.shape) if kv is not None else (),
            kv,
        )

    def _restore(self, snapshot: KVSnapshot) -> Sequence:
        seq = self._sequence(snapshot.sample_id, list(snapshot.prompt), snapshot.params)
        seq.tokens, seq.logprobs = list(snapshot.tokens), list(snapshot.logprobs)
        if seq.total_tokens >= seq.max_total_tokens:
            raise InputError(f"sample {seq.sample_id} is finished: it has {seq.total_tokens} tokens")
        if snapshot.kv is not None:
            most = seq.total_tokens - 1
            spec, runner = self.spec, self.runner
            expected = (2, spec.layers, snapshot.computed_tokens, runner.kv_heads, spec.head_dim)
            if snapshot.kv_shape != expected or not 0 < snapshot.computed_tokens <= most:
                raise InputError(
                    f"sample {seq.sample_id}: kv is {snapshot.kv_shape}, needed {expected} of at most {most} tokens"
                )
        return seq

    def _new_cache(self) -> KVCache:
        return KVCache(
            self.spec.layers,
            self.options.num_blocks,
            self.options.block_tokens,
            self.runner.kv_heads,
            self.spec.head_dim,
            lanes=self.runner.uses_cpu_kernels,
            dtype=self.dtype,
            device=self.device,
        )


def _read_tokenizer(path: Path) -> Callable[[list[int]], str] | None:
    """Token ids to text with the folder's tokenizer.json; None where there is no such file."""
    file = path / "tokenizer.json"
    if not file.exists():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)
