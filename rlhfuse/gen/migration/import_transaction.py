"""Sequences entering an engine: blocks are reserved and written, then all sequences enter at once, or none.

reserve    blocks for a sequence: known here already (shared, not written), reserved for an earlier sequence of the
           transfer (shared), or free ones, whose contents must come; without room the sequence will wait
write      contents of missing blocks, in any order and in parts of heads
commit     the blocks become known prefixes, the sequences run or wait; rollback undoes everything, at any point
"""

from __future__ import annotations

from collections.abc import Sequence as Numbers

from torch import Tensor

from rlhfuse.gen.core.kv_cache import KVCache
from rlhfuse.gen.core.scheduler import Scheduler
from rlhfuse.gen.core.sequence import Sequence
from rlhfuse.gen.migration.kv_transfer import SequenceSnapshot


class ImportTransaction:
    def __init__(self, scheduler: Scheduler, cache: KVCache | None) -> None:
        """Without a cache (a paused engine) all sequences will wait."""
        self._scheduler, self._cache = scheduler, cache
        self._blocks: dict[int, int] = {}  # the transfer's number of a block -> block here
        self._missing_heads: dict[int, int] = {}  # the same number -> KV heads not yet written
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._parked: list[Sequence] = []  # what comes of their caches stays as known prefixes
        self._computed: dict[int, int] = {}  # sample id -> tokens in the cache once all is written

    @property
    def missing_blocks(self) -> list[int]:
        """Numbers of the transfer's blocks that must still come, in ascending order."""
        return sorted(number for number, heads in self._missing_heads.items() if heads)

    @property
    def recomputed(self) -> list[int]:
        """Ids of samples whose tokens will be run again: they came without keys and values, or there was no room."""
        return [seq.sample_id for seq in self._waiting + self._parked if seq.sample_id not in self._computed]

    def reserve(self, seq: Sequence, snapshot: SequenceSnapshot) -> None:
        """Find room for a sequence, new and without blocks, or let it wait."""
        # Until `commit` the prefix index does not know the new blocks: nobody shares what may never be filled.
        blocks = self._scheduler.blocks
        room = self._scheduler.max_sequences - len(self._scheduler.running) - len(self._running)
        known = blocks.known_prefix(seq)
        incoming = snapshot.blocks[len(known) :]
        fresh = [number for number in incoming if number not in self._blocks]
        has_row = seq.parked or room > 0
        if self._cache is None or not snapshot.blocks or not has_row or not blocks.can_allocate(known, len(fresh)):
            (self._parked if seq.parked else self._waiting).append(seq)
            return
        (self._parked if seq.parked else self._running).append(seq)
        blocks.share(seq, known)
        for number in incoming:
            if number in self._blocks:
                blocks.append_shared(seq, self._blocks[number])
            else:
                self._blocks[number] = blocks.append_free(seq)
                self._missing_heads[number] = self._cache.kv_heads
        self._computed[seq.sample_id] = max(snapshot.computed_tokens, seq.computed_tokens)

    def empty(self, blocks: int, heads: int) -> Tensor:
        """Memory for blocks under way with so many heads, as `KVCache.read_blocks` gives them."""
        assert (cache := self._cache) is not None, "a paused engine has no blocks to fill"
        return cache.keys.new_empty(blocks, 2, len(cache.keys), cache.block_tokens, heads, cache.head_dim)

    def write(self, numbers: Numbers[int], kv: Tensor, heads: slice = slice(None)) -> None:
        """Fill missing blocks with kv [blocks, 2, layers, block_tokens, heads, head_dim] of these KV heads."""
        assert self._cache is not None, "a paused engine has no blocks to fill"
        self._cache.write_blocks([self._blocks[number] for number in numbers], kv, heads)
        for number in numbers:
            self._missing_heads[number] -= kv.shape[4]

    def commit(self, sequences: dict[int, Sequence]) -> None:
        """Let all sequences into the engine's `sequences`, by id. Raises RuntimeError while blocks are missing."""
        if self.missing_blocks:
            raise RuntimeError(f"blocks {self.missing_blocks[:8]} were not written; the transfer is not complete")
        for seq in (*self._running, *self._parked):
            seq.computed_tokens = self._computed.get(seq.sample_id, 0)
            self._scheduler.blocks.publish(seq, seq.computed_tokens)
        for seq in self._parked:
            self._scheduler.blocks.release(seq)
        for seq in self._running:
            self._scheduler.add_running(seq)
        for seq in self._waiting:
            self._scheduler.add(seq)
        sequences.update({seq.sample_id: seq for seq in (*self._running, *self._waiting, *self._parked)})

    def rollback(self, sequences: dict[int, Sequence]) -> None:
        """Undo whatever was done, `commit` included: no sequence stays, every block is free again."""
        for seq in (*self._running, *self._waiting, *self._parked):
            sequences.pop(seq.sample_id, None)
            if seq in self._scheduler.running or seq in self._scheduler.waiting:
                self._scheduler.remove(seq)
            else:
                self._scheduler.blocks.release(seq)
