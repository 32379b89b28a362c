"""Which sequences run in the next step, and how many tokens of each.

Continuous batching under a budget of tokens: every running sequence, oldest first, runs its pending tokens (one
when decoding, a chunk of the prompt when not); what is left of the budget admits waiting sequences.

    waiting --admit--> running --finish--> gone          admit: room for all tokens known so far
       ^                  |
       +---- preempt -----+    blocks given back; tokens kept and run again later

No deadlock: the oldest running sequence may take the blocks of all others, and one sequence alone always fits
(`Engine.add` refuses what does not). No thrashing: a step that preempts admits nobody. Knows nothing of tensors.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from rlhfuse.gen.block_manager import BlockManager
from rlhfuse.gen.running_table import RunningTable
from rlhfuse.gen.sequence import Sequence


class Work(NamedTuple):
    """Run the next `count` pending tokens of `seq`."""

    seq: Sequence
    count: int
    draws: bool  # these are all: the step ends with the draw of a new token

    @property
    def context(self) -> int:
        """Tokens of the sequence in the cache after the step."""
        return self.seq.computed_tokens + self.count


class Scheduler:
    def __init__(self, blocks: BlockManager, max_sequences: int, max_batched_tokens: int) -> None:
        self.blocks = blocks
        self.max_sequences = max_sequences
        self.max_batched_tokens = max_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.table = RunningTable(max_sequences)
        self.reused_tokens = 0  # so many tokens were found in known prefixes instead of being run

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def adopt(self, seq: Sequence) -> None:
        """Let a sequence run whose blocks were filled elsewhere; the caller has seen to max_sequences.

        If it decodes it goes in front of those that still prefill, so that it does not wait for their chunks.
        """
        prefilling = (i for i, other in enumerate(self.running) if other.pending_tokens > 1)
        place = next(prefilling, len(self.running)) if seq.pending_tokens == 1 else len(self.running)
        self.table.enter(seq)
        self.running.insert(place, seq)

    def schedule(self) -> list[Work]:
        """Choose the work of one step and give it blocks; its full blocks enter the prefix index.

        Later work of the same step may share them: the step writes all keys of a layer before it reads any.
        """
        work: list[Work] = []
        waiting_before = len(self.waiting)
        budget = self._schedule_running(work)
        if len(self.waiting) == waiting_before:
            self._admit(work, budget)
        return work

    def complete(self, work: list[Work]) -> None:
        """Account for work that has been run."""
        for seq, count, _ in work:
            seq.computed_tokens += count

    def remove(self, seq: Sequence) -> None:
        """Take a finished, aborted or departing sequence out and give back its blocks."""
        if seq in self.running:
            self.running.remove(seq)
            self.table.leave(seq)
        else:
            self.waiting.remove(seq)
        self.blocks.release(seq)

    def preempt_all(self) -> None:
        """Send every running sequence back to wait, in order, and forget known prefixes."""
        while self.running:
            self._preempt()
        self.blocks.forget_prefixes()

    def check_integrity(self) -> None:
        """Assert that queues, tables and blocks agree, and that no decoding sequence stands behind a prefill."""
        self.table.check_integrity(self.running, list(self.waiting))
        prefilling = [seq.pending_tokens > 1 for seq in self.running]
        assert prefilling == sorted(prefilling), f"a decoding sequence waits for a prefill: {prefilling}"
        self.blocks.check_integrity([*self.running, *self.waiting])

    def _schedule_running(self, work: list[Work]) -> int:
        """Append the work of running sequences; returns what is left of the token budget."""
        budget, block_tokens = self.max_batched_tokens, self.blocks.block_tokens
        while budget and len(work) < len(self.running):
            seq = self.running[len(work)]
            pending = seq.pending_tokens
            count = pending if pending < budget else budget
            context = seq.computed_tokens + count
            if context >= len(seq.block_table) * block_tokens:  # else it writes into a block that stays unfilled
                while not self.blocks.can_grow(seq, context):
                    if self._preempt() is seq:
                        return budget
                self._give_blocks(seq, context)
            work.append(Work(seq, count, count == pending))
            budget -= count
        return budget

    def _admit(self, work: list[Work], budget: int) -> None:
        while budget and self.waiting and len(self.running) < self.max_sequences:
            seq = self.waiting[0]
            known = self.blocks.known_prefix(seq)
            if not self.blocks.can_admit(seq, known, seq.total_tokens):
                return
            self.blocks.share(seq, known)
            self.reused_tokens += seq.computed_tokens
            self.table.enter(seq)
            self.running.append(self.waiting.popleft())
            pending = seq.pending_tokens
            count = min(pending, budget)
            self._give_blocks(seq, seq.computed_tokens + count)
            work.append(Work(seq, count, count == pending))
            budget -= count

    def _give_blocks(self, seq: Sequence, context: int) -> None:
        """Room for `context` tokens; blocks that they fill enter the prefix index."""
        held = len(seq.block_table)
        self.blocks.grow(seq, context)
        self.table.extend(seq, held)
        self.blocks.publish(seq, context)

    def _preempt(self) -> Sequence:
        """Stop the youngest running sequence; it waits in front of all younger ones."""
        seq = self.running.pop()
        self.table.leave(seq)
        self.blocks.release(seq)
        self.waiting.appendleft(seq)
        return seq
