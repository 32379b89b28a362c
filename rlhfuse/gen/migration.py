"""A sequence as it travels from one engine to another, with its keys and values or as tokens alone.

For each pair of instances the caller moves two things with plain sends: the header bytes of all sequences, and one
flat tensor with their keys and values one after another.

    snapshots --encode_header--> bytes --------> decode_header --+
              --pack_kv--------> flat tensor --> unpack_kv <-----+--> snapshots

A sequence without keys and values is run again from its tokens and gives the same bits (paper section 4.2). Knows
nothing of processes, groups or of who moves where. G is the number of KV heads on this tensor-parallel rank.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhfuse.errors import InputError
from rlhfuse.gen.sequence import SamplingParams

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, eq=False)
class KVSnapshot:
    """An unfinished sequence. `kv` [2, layers, computed_tokens, G, head_dim], or None.

    `kv_shape` is the shape of `kv`, known from the header before it arrives; () for a sequence of tokens alone.
    """

    sample_id: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    params: SamplingParams
    kv_shape: tuple[int, ...] = ()
    kv: Tensor | None = None

    def __post_init__(self) -> None:
        if self.kv is not None and tuple(self.kv.shape) != self.kv_shape:
            raise InputError(f"sample {self.sample_id}: kv is {list(self.kv.shape)}, kv_shape says {self.kv_shape}")

    @property
    def computed_tokens(self) -> int:
        return self.kv_shape[2] if self.kv_shape else 0

    @property
    def kv_elements(self) -> int:
        return math.prod(self.kv_shape) if self.kv_shape else 0

    def without_kv(self) -> "KVSnapshot":
        """The same sequence as tokens alone."""
        return dataclasses.replace(self, kv_shape=(), kv=None)


def encode_header(snapshots: list[KVSnapshot]) -> bytes:
    """Everything but the keys and values: a JSON line of facts, then all tokens and log-probabilities as arrays."""
    facts = [
        {
            "sample_id": s.sample_id,
            "prompt": len(s.prompt),
            "tokens": len(s.tokens),
            "params": dataclasses.asdict(s.params),
            "kv_shape": s.kv_shape,
        }
        for s in snapshots
    ]
    text = json.dumps(facts).encode()
    tokens = np.array([t for s in snapshots for t in (*s.prompt, *s.tokens)], "<i4")
    logprobs = np.array([x for s in snapshots for x in s.logprobs], "<f8")
    return _LENGTH.pack(len(text)) + text + tokens.tobytes() + logprobs.tobytes()


def decode_header(data: bytes) -> list[KVSnapshot]:
    """Inverse of `encode_header`, but for `kv`, which is None until `unpack_kv`."""
    start = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    facts = json.loads(data[_LENGTH.size : start])
    total = sum(f["prompt"] + f["tokens"] for f in facts)
    tokens = np.frombuffer(data, "<i4", total, start).tolist()
    logprobs = np.frombuffer(data, "<f8", sum(f["tokens"] for f in facts), start + 4 * total).tolist()
    snapshots, at, drawn = [], 0, 0
    for f in facts:
        middle, end = at + f["prompt"], at + f["prompt"] + f["tokens"]
        snapshots.append(
            KVSnapshot(
                f["sample_id"],
                tuple(tokens[at:middle]),
                tuple(tokens[middle:end]),
                tuple(logprobs[drawn : drawn + f["tokens"]]),
                SamplingParams(**f["params"]),
                tuple(f["kv_shape"]),
            )
        )
        at, drawn = end, drawn + f["tokens"]
    return snapshots


def pack_kv(snapshots: list[KVSnapshot]) -> Tensor:
    """Keys and values of all snapshots as one flat tensor, in order; empty if there are none."""
    parts = [s.kv.reshape(-1) for s in snapshots if s.kv is not None]
    return torch.cat(parts) if parts else torch.empty(0)


def unpack_kv(headers: list[KVSnapshot], flat: Tensor) -> list[KVSnapshot]:
    """The snapshots of `headers` with their keys and values, as views into `flat`."""
    needed = sum(s.kv_elements for s in headers)
    if flat.numel() != needed:
        raise InputError(f"the flat tensor has {flat.numel()} numbers, its header says {needed}")
    snapshots, at = [], 0
    for s in headers:
        if s.kv_shape:
            s = dataclasses.replace(s, kv=flat[at : at + s.kv_elements].view(s.kv_shape))
        at += s.kv_elements
        snapshots.append(s)
    return snapshots
