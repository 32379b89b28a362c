"""Which KV blocks are free, who uses the others, and which of them hold a known prefix.

A full block can serve every sequence that begins with the same tokens, so blocks are counted by users. A block without
users is free; while it is in the prefix index it may be taken up again, or be handed out and forgotten. The index
names a prefix by the name of the prefix one block shorter and the tokens of its last block, compared exactly: no hash
can collide. Running out of blocks is an answer (`can_grow`), not an exception.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from rlhfuse.gen.core.sequence import Sequence

ROOT = 0  # name of the empty prefix


class BlockManager:
    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._users = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(num_blocks))  # the least recently used first
        self._index: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (prefix, tokens) -> (node, block)
        self._key_of_block: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._last_node = ROOT

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def can_grow(self, seq: Sequence, tokens: int) -> bool:
        """Whether `seq` can get room for `tokens` tokens in total."""
        return self.blocks_for(tokens) - len(seq.block_table) <= len(self._free)

    def grow(self, seq: Sequence, tokens: int) -> None:
        """Extend the block table to room for `tokens` tokens."""
        while len(seq.block_table) < self.blocks_for(tokens):
            self.append_free(seq)

    def shrink(self, seq: Sequence, tokens: int) -> None:
        """Give back the blocks beyond room for `tokens` tokens, which nobody else has seen; they are the next to go."""
        while len(seq.block_table) > self.blocks_for(tokens):
            block = seq.block_table.pop()
            assert self._users[block] == 1 and block not in self._key_of_block, f"block {block} is known to others"
            self._users[block] = 0
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def append_free(self, seq: Sequence) -> int:
        """Extend the block table by a free block, and return it."""
        block = next(iter(self._free))
        if (key := self._key_of_block.pop(block, None)) is not None:
            del self._index[key]
        del self._free[block]
        self._users[block] = 1
        seq.block_table.append(block)
        return block

    def append_shared(self, seq: Sequence, block: int) -> None:
        """Extend the block table by a block that is in use elsewhere."""
        assert self._users[block], f"block {block} has no user to share it with"
        self._users[block] += 1
        seq.block_table.append(block)

    def shared(self, seq: Sequence) -> tuple[int, ...]:
        """Blocks of `seq` that others use too."""
        return tuple(block for block in seq.block_table if self._users[block] > 1)

    def can_allocate(self, known: list[int], fresh: int) -> bool:
        """Whether `fresh` free blocks are left once the blocks `known` are in use."""
        return fresh + sum(self._users[block] == 0 for block in known) <= len(self._free)

    def known_prefix(self, seq: Sequence) -> list[int]:
        """Blocks that hold the longest known beginning of `seq`, leaving at least one token to compute."""
        blocks, node = [], ROOT
        for start in range(0, seq.total_tokens - self.block_tokens, self.block_tokens):
            entry = self._index.get((node, tuple(seq.slice(start, start + self.block_tokens))))
            if entry is None:
                break
            node, block = entry
            blocks.append(block)
        return blocks

    def share(self, seq: Sequence, known: list[int]) -> None:
        """Begin the empty table of `seq` with the blocks that `known_prefix` found."""
        assert not seq.block_table, f"sample {seq.sample_id} already has blocks"
        for block in known:
            if self._users[block] == 0:
                del self._free[block]
            self._users[block] += 1
            seq.block_table.append(block)
        seq.published_blocks = len(known)
        seq.prefix_node = self._index[self._key_of_block[known[-1]]][0] if known else ROOT
        seq.computed_tokens = len(known) * self.block_tokens

    def publish(self, seq: Sequence, computed: int) -> None:
        """Enter the blocks filled by the first `computed` tokens into the index."""
        for number in range(seq.published_blocks, computed // self.block_tokens):
            start, block = number * self.block_tokens, seq.block_table[number]
            key = (seq.prefix_node, tuple(seq.slice(start, start + self.block_tokens)))
            if key not in self._index:
                self._last_node += 1
                self._index[key] = (self._last_node, block)
                self._key_of_block[block] = key
            seq.prefix_node = self._index[key][0]
            seq.published_blocks = number + 1

    def release(self, seq: Sequence) -> None:
        """Give back all blocks of `seq`, the end of the sequence first, so that its beginning stays known longest."""
        for block in reversed(seq.block_table):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None
        seq.block_table.clear()
        seq.computed_tokens = seq.published_blocks = 0
        seq.prefix_node = ROOT

    def forget_prefixes(self) -> None:
        """Empty the index, as when the weights or the cache memory changed. No sequence may hold blocks."""
        assert not any(self._users), "prefixes can be forgotten only when no sequence holds blocks"
        self._index.clear()
        self._key_of_block.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that users, free list and index agree with the tables of all `sequences`."""
        users = [0] * self.num_blocks
        for seq in sequences:
            assert len(set(seq.block_table)) == len(seq.block_table), f"sample {seq.sample_id} holds a block twice"
            assert self.blocks_for(seq.computed_tokens) <= len(seq.block_table), f"sample {seq.sample_id} lacks blocks"
            for block in seq.block_table:
                users[block] += 1
        assert users == self._users, f"blocks in tables {users} != counted users {self._users}"
        assert set(self._free) == {b for b, n in enumerate(users) if n == 0}, "free list != blocks without users"
        assert {key: b for b, key in self._key_of_block.items()} == {k: b for k, (_, b) in self._index.items()}, (
            "index and its reverse disagree"
        )
