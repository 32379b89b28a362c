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
from rlhfuse.gen.sequence import Sequence


class Work(NamedTuple):
    """Run the next `count` pending tokens of `seq`."""

    seq: Sequence
    count: int

    @property
    def context(self) -> int:
        """Tokens of the sequence in the cache after the step."""
        return self.seq.computed_tokens + self.count

    @property
    def draws(self) -> bool:
        """Whether the step ends with the draw of a new token."""
        return self.count == self.seq.pending_tokens


class Scheduler:
    def __init__(self, blocks: BlockManager, max_sequences: int, max_batched_tokens: int) -> None:
        self.blocks = blocks
        self.max_sequences = max_sequences
        self.max_batched_tokens = max_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def adopt(self, seq: Sequence) -> None:
        """Let a sequence run whose blocks were filled elsewhere; the caller has seen to max_sequences."""
        self.running.append(seq)

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
        for seq, count in work:
            seq.computed_tokens += count

    def remove(self, seq: Sequence) -> None:
        """Take a finished, aborted or departing sequence out and give back its blocks."""
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        self.blocks.release(seq)

    def preempt_all(self) -> None:
        """Send every running sequence back to wait, in order, and forget known prefixes."""
        while self.running:
            self._preempt()
        self.blocks.forget_prefixes()

    def _schedule_running(self, work: list[Work]) -> int:
        """Append the work of running sequences; returns what is left of the token budget."""
        budget = self.max_batched_tokens
        while budget and len(work) < len(self.running):
            seq = self.running[len(work)]
            count = min(seq.pending_tokens, budget)
            while not self.blocks.can_grow(seq, seq.computed_tokens + count):
                if self._preempt() is seq:
                    return budget
            self._take(work, seq, count)
            budget -= count
        return budget

    def _admit(self, work: list[Work], budget: int) -> None:
        while budget and self.waiting and len(self.running) < self.max_sequences:
            seq = self.waiting[0]
            known = self.blocks.known_prefix(seq)
            if not self.blocks.can_admit(seq, known, seq.total_tokens):
                return
            self.blocks.share(seq, known)
            count = min(seq.pending_tokens, budget)
            self.running.append(self.waiting.popleft())
            self._take(work, seq, count)
            budget -= count

    def _take(self, work: list[Work], seq: Sequence, count: int) -> None:
        context = seq.computed_tokens + count
        self.blocks.grow(seq, context)
        self.blocks.publish(seq, context)
        work.append(Work(seq, count))

    def _preempt(self) -> Sequence:
        """Stop the youngest running sequence; it waits in front of all younger ones."""
        seq = self.running.pop()
        self.blocks.release(seq)
        self.waiting.appendleft(seq)
        return seq
