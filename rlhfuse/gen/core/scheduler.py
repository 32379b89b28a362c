"""Continuous batching: which sequences run in the next step, and how many tokens of each.

Under a budget of tokens every running sequence, oldest first, runs its pending tokens (one when decoding, a chunk of
the prompt when not); what is left admits waiting sequences. Preemption gives the youngest's blocks back and keeps its
tokens. No deadlock: the oldest may take the blocks of all others, and one sequence alone always fits (`Engine.add`).
"""

from __future__ import annotations

from collections import deque

from rlhfuse.gen.core.block_manager import BlockManager
from rlhfuse.gen.core.forward_batch import RunningTable, ScheduledSequence
from rlhfuse.gen.core.sequence import Sequence


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

    def add_running(self, seq: Sequence) -> None:
        """Let a sequence run whose blocks were filled elsewhere; the caller keeps to max_sequences."""
        # One that decodes goes in front of those that still prefill, so that it does not wait for their chunks.
        prefilling = (i for i, other in enumerate(self.running) if other.pending_tokens > 1)
        index = next(prefilling, len(self.running)) if seq.pending_tokens == 1 else len(self.running)
        self.table.add(seq)
        self.running.insert(index, seq)

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the sequences of one step and give them blocks; full blocks enter the prefix index."""
        # Later sequences of the step may share them: it writes all keys of a layer before it reads any.
        scheduled: list[ScheduledSequence] = []
        waiting_before = len(self.waiting)
        budget = self._schedule_running(scheduled)
        if len(self.waiting) == waiting_before:
            self._admit(scheduled, budget)
        return scheduled

    def complete(self, scheduled: list[ScheduledSequence]) -> None:
        """Account for a step that has been run."""
        for seq, count, _, _ in scheduled:
            seq.computed_tokens += count

    def room_for_guesses(self, scheduled: list[ScheduledSequence], most_rows: int) -> int:
        """How many tokens besides may run in this step of up to `most_rows`; 0 unless all sequences decode."""
        decode = all(count == 1 and draws and seq.tokens for seq, count, draws, _ in scheduled)
        return max(0, min(most_rows, self.max_batched_tokens) - len(scheduled)) if decode else 0

    def add_guesses(self, scheduled: list[ScheduledSequence], guesses: list[list[int]]) -> list[ScheduledSequence]:
        """Let as many guesses run with each decoding sequence as have room in its blocks and in free ones."""
        extended = []
        for (seq, count, draws, _), wanted in zip(scheduled, guesses):
            context, held = seq.computed_tokens + count, len(seq.block_table)
            most = (held + self.blocks.free_blocks) * self.blocks.block_tokens - context
            wanted = wanted[:most]
            self.blocks.grow(seq, context + len(wanted))
            self.table.copy_blocks(seq.row, seq.block_table, held)
            extended.append(ScheduledSequence(seq, count, draws, wanted))
        return extended

    def accept_guesses(self, seq: Sequence, right: int) -> None:
        """So many of the guesses were drawn: their keys and values stay; the room of the others is given back."""
        seq.computed_tokens += right
        self.blocks.shrink(seq, seq.computed_tokens)
        self.blocks.publish(seq, seq.computed_tokens)

    def remove(self, seq: Sequence) -> None:
        """Take a finished, aborted or departing sequence out and give back its blocks."""
        if seq in self.running:
            self.running.remove(seq)
            self.table.remove(seq)
        else:
            self.waiting.remove(seq)
        self.blocks.release(seq)

    def preempt_all(self) -> None:
        """Send every running sequence back to wait, in order, and forget known prefixes."""
        while self.running:
            self._preempt()
        self.blocks.forget_prefixes()

    def check_integrity(self) -> None:
        """Assert that queues and blocks agree, and that no decoding sequence stands behind a prefill."""
        prefilling = [seq.pending_tokens > 1 for seq in self.running]
        assert prefilling == sorted(prefilling), f"a decoding sequence waits for a prefill: {prefilling}"
        self.blocks.check_integrity([*self.running, *self.waiting])

    def _schedule_running(self, scheduled: list[ScheduledSequence]) -> int:
        """Schedule running sequences; returns what is left of the token budget."""
        budget, block_tokens = self.max_batched_tokens, self.blocks.block_tokens
        while budget and len(scheduled) < len(self.running):
            seq = self.running[len(scheduled)]
            pending = seq.pending_tokens
            count = pending if pending < budget else budget
            context = seq.computed_tokens + count
            if context >= len(seq.block_table) * block_tokens:  # else it writes into a block that stays unfilled
                while not self.blocks.can_grow(seq, context):
                    if self._preempt() is seq:
                        return budget
                self._give_blocks(seq, context)
            scheduled.append(ScheduledSequence(seq, count, count == pending))
            budget -= count
        return budget

    def _admit(self, scheduled: list[ScheduledSequence], budget: int) -> None:
        while budget and self.waiting and len(self.running) < self.max_sequences:
            seq = self.waiting[0]
            known = self.blocks.known_prefix(seq)
            if not self.blocks.can_allocate(known, self.blocks.blocks_for(seq.total_tokens) - len(known)):
                return
            self.blocks.share(seq, known)
            self.reused_tokens += seq.computed_tokens
            self.table.add(seq)
            self.running.append(self.waiting.popleft())
            pending = seq.pending_tokens
            count = min(pending, budget)
            self._give_blocks(seq, seq.computed_tokens + count)
            scheduled.append(ScheduledSequence(seq, count, count == pending))
            budget -= count

    def _give_blocks(self, seq: Sequence, context: int) -> None:
        """Room for `context` tokens; blocks that they fill enter the prefix index."""
        held = len(seq.block_table)
        self.blocks.grow(seq, context)
        self.table.copy_blocks(seq.row, seq.block_table, held)
        # A drawn token that is not read yet, and the block that it may fill, come in with the next.
        self.blocks.publish(seq, min(context, seq.known_tokens))

    def _preempt(self) -> Sequence:
        """Stop the youngest running sequence; it waits in front of all younger ones."""
        seq = self.running.pop()
        self.table.remove(seq)
        self.blocks.release(seq)
        self.waiting.appendleft(seq)
        return seq
