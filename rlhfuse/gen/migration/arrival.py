"""Samples on their way into an engine: blocks are held and filled, and then all samples enter at once, or none.

    hold     a sample gets blocks: known here already (shared, not written), held for an earlier sample of the
             shipment (shared), or free ones, whose contents must come (`wanted`); without room it will wait
    write    contents of wanted blocks come in, in any order and in parts of heads
    enter    every wanted block must be there; the blocks become known prefixes, the samples run or wait
    give_back  undoes all of it, at any point

Until `enter` the prefix index does not know the new blocks, so nobody can share what may never be filled.
"""

from __future__ import annotations

from collections.abc import Sequence as Numbers

from torch import Tensor

from rlhfuse.gen.kv_cache import KVCache
from rlhfuse.gen.migration.migration import Traveller
from rlhfuse.gen.scheduler import Scheduler
from rlhfuse.gen.sequence import Sequence


class Arrival:
    def __init__(self, scheduler: Scheduler, cache: KVCache | None) -> None:
        """Without a cache (a paused engine) all samples will wait."""
        self._scheduler, self._cache = scheduler, cache
        self._placed: dict[int, int] = {}  # the shipment's number of a block -> block here
        self._missing_heads: dict[int, int] = {}  # the same number -> KV heads not yet written
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._computed: dict[int, int] = {}  # sample id -> tokens in the cache once all is written

    @property
    def wanted(self) -> list[int]:
        """Numbers of the shipment's blocks that must still come, in ascending order."""
        return sorted(number for number, heads in self._missing_heads.items() if heads)

    @property
    def recomputed(self) -> list[int]:
        """Ids of samples whose tokens will be run again: they came without keys and values, or found no room."""
        return [seq.sample_id for seq in self._waiting]

    def hold(self, seq: Sequence, traveller: Traveller) -> None:
        """Find room for a sample, or let it wait. `seq` is new and has no blocks."""
        blocks = self._scheduler.blocks
        room = self._scheduler.max_sequences - len(self._scheduler.running) - len(self._running)
        known = blocks.known_prefix(seq)
        coming = traveller.blocks[len(known) :]
        fresh = [number for number in coming if number not in self._placed]
        if self._cache is None or not traveller.blocks or not room or not blocks.can_place(known, len(fresh)):
            self._waiting.append(seq)
            return
        self._running.append(seq)
        blocks.share(seq, known)
        for number in coming:
            if number in self._placed:
                blocks.append_shared(seq, self._placed[number])
            else:
                self._placed[number] = blocks.append_free(seq)
                self._missing_heads[number] = self._cache.kv_heads
        self._computed[seq.sample_id] = max(traveller.computed_tokens, seq.computed_tokens)

    def write(self, numbers: Numbers[int], kv: Tensor, heads: slice = slice(None)) -> None:
        """Fill wanted blocks with kv [blocks, 2, layers, block_tokens, heads, head_dim] of these heads of this rank."""
        assert self._cache is not None, "a paused engine wants no blocks"
        self._cache.write_blocks([self._placed[number] for number in numbers], kv, heads)
        for number in numbers:
            self._missing_heads[number] -= kv.shape[4]

    def enter(self, sequences: dict[int, Sequence]) -> None:
        """Let all samples in; `sequences` are the engine's, by id. Raises RuntimeError if blocks are still wanted."""
        if self.wanted:
            raise RuntimeError(f"blocks {self.wanted[:8]} of the shipment were not written; it is not complete")
        for seq in self._running:
            seq.computed_tokens = self._computed[seq.sample_id]
            self._scheduler.blocks.publish(seq, seq.computed_tokens)
        for seq in self._running:
            self._scheduler.adopt(seq)
        for seq in self._waiting:
            self._scheduler.add(seq)
        sequences.update({seq.sample_id: seq for seq in (*self._running, *self._waiting)})

    def give_back(self, sequences: dict[int, Sequence]) -> None:
        """Undo whatever was done, `enter` included: no sample stays, every block is free again."""
        for seq in (*self._running, *self._waiting):
            sequences.pop(seq.sample_id, None)
            if seq in self._scheduler.running or seq in self._scheduler.waiting:
                self._scheduler.remove(seq)
            else:
                self._scheduler.blocks.release(seq)
