"""Unfinished sequences that move to another engine: a manifest, and the KV blocks that it names (paper section 4.2).

sequence 7   blocks 0 1 2 3        samples of one prompt name the same blocks of the transfer,
sequence 8   blocks 0 1 2 4        so a shared prefix is sent, and stored, once
sequence 9   no blocks             moves as tokens and is run again, to the same bits
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import from_json, to_json
from rlhfuse.base.token_spans import TokenSpan
from rlhfuse.gen.core.kv_cache import KVCache
from rlhfuse.gen.core.sequence import SamplingParams
from rlhfuse.gen.core.sequence import Sequence as EngineSequence
from rlhfuse.tasks.instance_limits import MoveMode

BUCKET_BYTES = 64 << 20  # most memory that a transfer takes beside the caches


@dataclass(frozen=True)
class SequenceSnapshot:
    """An unfinished sequence; one that moves as tokens has no blocks."""

    sample_id: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    params: SamplingParams
    computed_tokens: int = 0  # those with keys and values in `blocks`
    blocks: tuple[int, ...] = ()  # numbers of the transfer's blocks
    entropies: tuple[float, ...] = ()  # where the engine measures them
    observed: tuple[TokenSpan, ...] = ()  # of `tokens`
    parked: bool = False  # at the end of a turn

    def restore(self, seq: EngineSequence) -> EngineSequence:
        """Give `seq`, new and of the same request, the tokens drawn so far. Raises InputError if it is finished."""
        seq.tokens, seq.logprobs, seq.entropies = list(self.tokens), list(self.logprobs), list(self.entropies)
        seq.observed, seq.finish_reason = list(self.observed), "turn" if self.parked else None
        if seq.total_tokens >= seq.max_total_tokens:
            raise InputError(f"sample {seq.sample_id} is finished: it has {seq.total_tokens} tokens")
        return seq


@dataclass(frozen=True)
class BlockShape:
    """One block of the whole model. `kv_heads` counts those of all tensor-parallel ranks together."""

    layers: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: str  # "float32" or "bfloat16"

    @property
    def bytes_per_head(self) -> int:
        """Keys and values of one KV head in one block."""
        return 2 * self.layers * self.block_tokens * self.head_dim * (2 if self.dtype == "bfloat16" else 4)


@dataclass(frozen=True)
class TransferManifest:
    """A transfer but for its keys and values; equal on all tensor-parallel ranks."""

    shape: BlockShape
    num_blocks: int
    sequences: tuple[SequenceSnapshot, ...]

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(to_json(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> TransferManifest:
        """Inverse of `to_bytes`."""
        return from_json(TransferManifest, json.loads(data), "a transfer")

    def __post_init__(self) -> None:
        if len({seq.sample_id for seq in self.sequences}) < len(self.sequences):
            raise InputError("a transfer was given one sample id twice; ids must differ")
        for seq in self.sequences:
            total = len(seq.prompt) + len(seq.tokens)
            if not 0 <= seq.computed_tokens < total:
                raise InputError(
                    f"sample {seq.sample_id}: {seq.computed_tokens} tokens in the cache, at most {total - 1} of "
                    f"{total} can be: the last one is yet to be run"
                )
            if len(seq.blocks) != -(-seq.computed_tokens // self.shape.block_tokens):
                raise InputError(
                    f"sample {seq.sample_id}: {len(seq.blocks)} blocks for {seq.computed_tokens} tokens in the cache"
                )
            if any(not 0 <= number < self.num_blocks for number in seq.blocks):
                raise InputError(f"sample {seq.sample_id} names a block outside the transfer's {self.num_blocks}")


@dataclass(frozen=True, eq=False)
class KVTransfer:
    """Sequences with the means to read their blocks; holds no memory of its own."""

    manifest: TransferManifest
    read: Callable[[Sequence[int], slice], Tensor]  # (the transfer's block numbers, this rank's heads), as read_blocks


def prepare_transfer(
    sequences: Sequence[EngineSequence],
    modes: MoveMode | Mapping[int, MoveMode],
    shape: BlockShape,
    cache: KVCache | None,
) -> KVTransfer:
    """The transfer of an engine's sequences; without a cache, as tokens."""
    numbers: dict[int, int] = {}  # block in the cache -> number in the transfer
    snapshots = []
    for seq in sequences:
        mode = modes if isinstance(modes, str) else modes[seq.sample_id]
        computed = seq.computed_tokens if mode == "kv" and cache is not None else 0
        table = seq.block_table[: -(-computed // shape.block_tokens)]
        blocks = tuple(numbers.setdefault(block, len(numbers)) for block in table)
        lists = tuple(seq.prompt), tuple(seq.tokens), tuple(seq.logprobs)
        more = tuple(seq.entropies), tuple(seq.observed), seq.parked
        snapshots.append(SequenceSnapshot(seq.sample_id, *lists, seq.params, computed, blocks, *more))
    cache_blocks = list(numbers)

    def read(wanted: Sequence[int], heads: slice) -> Tensor:
        assert cache is not None, "a transfer without a cache has no blocks"
        return cache.read_blocks([cache_blocks[number] for number in wanted], heads)

    return KVTransfer(TransferManifest(shape, len(cache_blocks), tuple(snapshots)), read)
