"""Unfinished sequences as they travel from one engine to another: what they are, and the blocks they bring.

    shipment = manifest (all but keys and values) + unique blocks

    sequence 7   blocks 0 1 2 3        samples of one prompt name the same blocks of the shipment,
    sequence 8   blocks 0 1 2 4        so a shared prefix travels, and is stored, once
    sequence 9   (tokens alone)

    with source.export_sequences(ids) as shipment:        nothing has left yet; an exception here leaves all as it was
        destination.import_sequences(shipment)            all of it or nothing
                                                          gone from the source

A sequence without blocks is run again from its tokens and gives the same bits (paper section 4.2). Blocks are read
when they are asked for, so a shipment holds no memory of its own. Knows nothing of processes or of who moves where.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rlhfuse.decisions.migration import MoveCost, MoveMode
from rlhfuse.errors import InputError
from rlhfuse.gen.kv_cache import KVCache
from rlhfuse.gen.sequence import SamplingParams
from rlhfuse.gen.sequence import Sequence as EngineSequence

if TYPE_CHECKING:
    from rlhfuse.gen.engine import Engine

BUCKET_BYTES = 64 << 20  # most memory that a transfer takes beside the caches

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Traveller:
    """An unfinished sequence. `blocks` numbers the shipment's blocks that hold its first `computed_tokens` tokens.

    Both are empty for a sequence that travels as tokens alone.
    """

    sample_id: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    params: SamplingParams
    computed_tokens: int = 0
    blocks: tuple[int, ...] = ()


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

    @property
    def bytes_per_token(self) -> float:
        """Keys and values of one token, of all heads."""
        return self.bytes_per_head * self.kv_heads / self.block_tokens

    def tensor_shape(self, blocks: int, heads: int) -> tuple[int, ...]:
        """Of so many blocks with so many heads, as `KVCache.read_blocks` gives them."""
        return (blocks, 2, self.layers, self.block_tokens, heads, self.head_dim)


@dataclass(frozen=True)
class Manifest:
    """A shipment but for its keys and values; equal on all tensor-parallel ranks. Becomes bytes and back."""

    shape: BlockShape
    num_blocks: int
    travellers: tuple[Traveller, ...]

    def __post_init__(self) -> None:
        if len({one.sample_id for one in self.travellers}) < len(self.travellers):
            raise InputError("a shipment was given one sample id twice; ids must differ")
        for one in self.travellers:
            total = len(one.prompt) + len(one.tokens)
            if not 0 <= one.computed_tokens < total:
                raise InputError(
                    f"sample {one.sample_id}: {one.computed_tokens} tokens in the cache, at most {total - 1} of "
                    f"{total} can be: the last one is yet to be run"
                )
            if len(one.blocks) != -(-one.computed_tokens // self.shape.block_tokens):
                raise InputError(
                    f"sample {one.sample_id}: {len(one.blocks)} blocks for {one.computed_tokens} tokens in the cache"
                )
            if any(not 0 <= number < self.num_blocks for number in one.blocks):
                raise InputError(f"sample {one.sample_id} names a block outside the shipment's {self.num_blocks}")

    def encode(self) -> bytes:
        """A JSON line of facts, then all tokens, block numbers and log-probabilities as arrays."""
        facts = [
            {
                "sample_id": one.sample_id,
                "sizes": [len(one.prompt), len(one.tokens), len(one.blocks)],
                "computed_tokens": one.computed_tokens,
                "params": dataclasses.asdict(one.params),
            }
            for one in self.travellers
        ]
        head = {"shape": dataclasses.asdict(self.shape), "num_blocks": self.num_blocks, "travellers": facts}
        text = json.dumps(head).encode()
        numbers = [n for one in self.travellers for n in (*one.prompt, *one.tokens, *one.blocks)]
        logprobs = [x for one in self.travellers for x in one.logprobs]
        return _LENGTH.pack(len(text)) + text + np.array(numbers, "<i4").tobytes() + np.array(logprobs, "<f8").tobytes()

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Inverse of `encode`."""
        start = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        head = json.loads(data[_LENGTH.size : start])
        total = sum(sum(facts["sizes"]) for facts in head["travellers"])
        numbers = iter(np.frombuffer(data, "<i4", total, start).tolist())
        logprobs = iter(np.frombuffer(data, "<f8", offset=start + 4 * total).tolist())
        return Manifest(
            BlockShape(**head["shape"]),
            head["num_blocks"],
            tuple(_traveller(facts, numbers, logprobs) for facts in head["travellers"]),
        )


def _traveller(facts: dict, numbers: Iterator[int], logprobs: Iterator[float]) -> Traveller:
    """The next sequence of a manifest that is being decoded."""
    prompt, tokens, blocks = (tuple(islice(numbers, size)) for size in facts["sizes"])
    return Traveller(
        facts["sample_id"],
        prompt,
        tokens,
        tuple(islice(logprobs, len(tokens))),
        SamplingParams(**facts["params"]),
        facts["computed_tokens"],
        blocks,
    )


@dataclass(frozen=True, eq=False)
class Shipment:
    """Sequences with the means to read their blocks: `read(numbers, heads)` -> kv, as `KVCache.read_blocks`.

    `numbers` are the shipment's, `heads` a slice of the KV heads on this rank.
    """

    manifest: Manifest
    read: Callable[[Sequence[int], slice], Tensor]

    @staticmethod
    def of(manifest: Manifest, kv: Tensor) -> Shipment:
        """With all blocks in one tensor [blocks, 2, layers, block_tokens, G, head_dim], wherever it came from."""
        if kv.shape[0] != manifest.num_blocks:
            raise InputError(f"the tensor holds {kv.shape[0]} blocks, the manifest says {manifest.num_blocks}")
        return Shipment(manifest, lambda numbers, heads: kv[list(numbers)][..., heads, :])


def pack(
    sequences: Sequence[EngineSequence],
    modes: MoveMode | Mapping[int, MoveMode],
    shape: BlockShape,
    cache: KVCache | None,
) -> Shipment:
    """The sequences of an engine as a shipment, each in its mode; it reads from `cache` when asked to.

    Without a cache (a paused engine) all travel as tokens.
    """
    numbers: dict[int, int] = {}  # block in the cache -> number in the shipment
    travellers = []
    for seq in sequences:
        mode = modes if isinstance(modes, str) else modes[seq.sample_id]
        if mode not in ("kv", "tokens"):
            raise InputError(f"sample {seq.sample_id}: mode={mode!r} must be kv or tokens")
        computed = seq.computed_tokens if mode == "kv" and cache is not None else 0
        table = seq.block_table[: -(-computed // shape.block_tokens)]
        blocks = tuple(numbers.setdefault(block, len(numbers)) for block in table)
        travellers.append(
            Traveller(
                seq.sample_id, tuple(seq.prompt), tuple(seq.tokens), tuple(seq.logprobs), seq.params, computed, blocks
            )
        )
    held = list(numbers)

    def read(wanted: Sequence[int], heads: slice) -> Tensor:
        assert cache is not None, "a shipment without a cache has no blocks"
        return cache.read_blocks([held[number] for number in wanted], heads)

    return Shipment(Manifest(shape, len(held), tuple(travellers)), read)


def buckets(numbers: Sequence[int], block_bytes: int, bucket_bytes: int) -> list[Sequence[int]]:
    """`numbers` in order, cut into runs of at most `bucket_bytes`; a block larger than that is a run of its own."""
    size = max(1, bucket_bytes // block_bytes)
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def move_sequences(
    source: Engine, destination: Engine, sample_ids: Iterable[int], cost: MoveCost | None = None
) -> list[int]:
    """Move unfinished samples between two engines of this process; returns those whose tokens are run again.

    With `cost` each moves the quicker way, without it with its keys and values. An exception on the way leaves all
    of them in `source`.
    """
    ids = list(sample_ids)
    modes = "kv" if cost is None else source.move_modes(ids, cost)
    with source.export_sequences(ids, modes) as shipment:
        return destination.import_sequences(shipment)
