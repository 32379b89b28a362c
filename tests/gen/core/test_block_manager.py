"""Blocks of a prefix are found again while they hold it, and no longer."""

from __future__ import annotations

from rlhfuse.gen.core.block_manager import BlockManager
from rlhfuse.gen.core.sequence import SamplingParams, Sequence


def sequence(sample_id: int, prompt: list[int], response: int = 8) -> Sequence:
    return Sequence(sample_id, prompt, SamplingParams(max_tokens=response), len(prompt) + response, frozenset())


def test_full_blocks_of_a_prefix_are_found_again():
    blocks = BlockManager(8, 4)
    first = sequence(0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    blocks.grow(first, 9)
    blocks.publish(first, 9)
    assert blocks.known_prefix(sequence(1, [1, 2, 3, 4, 5, 6, 7, 8])) == first.block_table[:1]  # one token must remain
    assert blocks.known_prefix(sequence(1, [1, 2, 3, 4, 5, 6, 7, 8, 0])) == first.block_table[:2]
    assert blocks.known_prefix(sequence(1, [0, 2, 3, 4, 5, 6, 7, 8, 0])) == []
    table = list(first.block_table)
    blocks.release(first)
    assert blocks.free_blocks == 8
    again = sequence(2, [1, 2, 3, 4, 5, 6, 7, 8, 0])
    blocks.share(again, blocks.known_prefix(again))
    assert again.block_table == table[:2] and again.computed_tokens == 8 and blocks.free_blocks == 6
    blocks.check_integrity([again])


def test_reused_blocks_are_forgotten():
    blocks = BlockManager(2, 4)
    first = sequence(0, [1, 2, 3, 4, 5])
    blocks.grow(first, 5)
    blocks.publish(first, 5)
    blocks.release(first)
    other = sequence(1, [9] * 8)
    blocks.grow(other, 8)
    assert blocks.known_prefix(first) == []
    blocks.check_integrity([other])
