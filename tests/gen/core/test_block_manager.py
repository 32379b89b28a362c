"""Random workloads of sequences leave the block manager and the scheduler consistent."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfuse.gen.core.block_manager import BlockManager
from rlhfuse.gen.core.scheduler import Scheduler
from rlhfuse.gen.core.sequence import SamplingParams, Sequence

FAST = settings(derandomize=True, deadline=None, max_examples=150)


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


@FAST
@given(st.data())
def test_scheduler_stays_consistent_and_finishes(data):
    """Few blocks, few tokens in a step, colliding prompts: every sample still gets all its tokens."""
    block_tokens = data.draw(st.integers(1, 5))
    num_blocks = data.draw(st.integers(-(-24 // block_tokens), 40))
    blocks = BlockManager(num_blocks, block_tokens)
    scheduler = Scheduler(blocks, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 20)))
    alive: dict[int, Sequence] = {}
    for sample_id in range(data.draw(st.integers(1, 9))):
        alive[sample_id] = sequence(sample_id, data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=16)))
        scheduler.add(alive[sample_id])
    done, steps = 0, 0
    while alive:
        steps += 1
        assert steps < 2000, "no progress"
        action = data.draw(st.integers(0, 30)) if steps < 60 else 30
        if action == 0:
            scheduler.preempt_all()
        elif action == 1:
            scheduler.remove(alive.pop(min(alive)))
            continue
        work = scheduler.schedule()
        assert work and sum(w.num_tokens for w in work) <= scheduler.max_batched_tokens
        assert len(scheduler.running) <= scheduler.max_sequences
        drawing = [w.seq for w in work if w.draws]
        for w in work:
            assert len(w.seq.block_table) * block_tokens >= w.seq.computed_tokens + w.num_tokens
        scheduler.complete(work)
        for seq in drawing:
            seq.append(seq.sample_id % 2, 0.0)
            if seq.finish_reason:
                scheduler.remove(alive.pop(seq.sample_id))
                assert len(seq.tokens) == 8
                done += 1
        queued = [*scheduler.running, *scheduler.waiting]
        assert sorted(s.sample_id for s in queued) == sorted(alive)
        blocks.check_integrity(queued)
    assert blocks.free_blocks == num_blocks
