"""Proposes what samples will draw next, from all that the policy wrote lately, and learns where it is right.

How likely a guess is to be right is counted, by how long a suffix was known and how far the guess was in front: the
ranks of an engine guess alike. All is a cache: without it tokens and bits are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from rlhfuse.base.remembered import remembered
from rlhfuse.costs.speculation import DRAFT_ITERATIONS, GuessRows
from rlhfuse.gen.core.forward_batch import RunningTable
from rlhfuse.gen.core.sequence import Sequence, stop_table
from rlhfuse.gen.speculation.ngrams import CELLS, ORDER, count, propose

FEWEST_ENTRIES, MOST_SUFFIXES, MOST_PAIRS = 1 << 12, 1 << 20, 1 << 21  # of 16 bytes: together at most 48 MiB
LONGEST_PAUSE = 16  # steps between two tries while there is nothing to promise
PRIOR, HOPE = 3.0, 0.6  # guesses, and how many of them right, that stand for what was not seen yet: bold, to find out
MEMORY = 4096.0  # guesses of one class after which the older ones fade


class Piece(NamedTuple):
    """A response, or a turn of one, behind the last tokens before it."""

    tokens: np.ndarray  # int32
    start: int  # the first token of the response
    uncounted: int  # the first that is not counted in the tables


def _piece(prompt: SequenceOf[int], response: SequenceOf[int], counted: int = 0) -> Piece:
    """`counted` tokens of prompt and response together stand in the tables already."""
    start = min(len(prompt), ORDER)
    tokens = np.array([*prompt[len(prompt) - start :], *response], np.int32)
    return Piece(tokens, start, max(start, counted - len(prompt) + start))


class Guesser:
    """`most_rows` of a decode step are the most that samples and guesses fill together."""

    def __init__(
        self, vocab: int, most_rows: int, price: Callable[[int, int], float], measured: GuessRows | None = None
    ) -> None:
        """`price`: of a step of so many samples with so many guesses, in any unit, the same on all ranks.

        `measured`: where guesses pay; None: wherever the price says so.
        """
        self.most_rows, self._price, self.measured = most_rows, price, measured
        self.searched = False  # for the step that was asked for last, whether in vain or not
        self._room = np.zeros(vocab, np.float32), np.empty(vocab, np.int32)
        self._texts = np.zeros((0, 256), np.int32)  # a row for each sample that was guessed for
        self._free_rows: list[int] = []
        self._rows: dict[int, tuple[int, int, int]] = {}  # sample id -> its row, tokens before its turn, and all
        self._before: deque[list[Piece]] = deque(maxlen=DRAFT_ITERATIONS)
        self._now: list[Piece] = []
        self._counted = 0  # pieces of `_now` that stand in the tables
        self._tables = _empty_tables(FEWEST_ENTRIES, FEWEST_ENTRIES)
        self._used = np.zeros(3, np.int64)
        self._tried, self._right = np.zeros(CELLS), np.zeros(CELLS)
        self._cells: np.ndarray = np.zeros((0, 0), np.int64)  # classes of the guesses proposed last
        self._pause = self._waited = 0

    def rows(self, sequences: int) -> int:
        """Rows that the coming step of so many may fill; to be asked once a step."""
        self.searched = False
        return self.measured.rows(sequences) if self.measured else self.most_rows

    def propose(self, sequences: list[Sequence], table: RunningTable, rows: int) -> list[list[int]]:
        """Guesses for these, which decode, at most `rows` in all; [] where they would not pay."""
        if self._waited < self._pause:
            self._waited += 1
            return []
        self.searched = True
        self._take_in(sequences, rows)
        at = np.array([self._rows[seq.sample_id][0] for seq in sequences])
        lengths = np.array([seq.total_tokens for seq in sequences])
        limits = np.array([seq.max_total_tokens - seq.total_tokens - 1 for seq in sequences])
        running = np.array([seq.row for seq in sequences])
        draws = table.streams, table.temperatures, table.top_ks, table.top_ps, table.least_totals
        draws, ends = tuple(column[running] for column in draws), stop_table(sequences)
        hopes = ((self._right + HOPE * PRIOR) / (self._tried + PRIOR)).astype(np.float32)
        prices = self._prices_of(len(sequences))
        texts = self._texts, at, lengths, limits
        counts, self._cells = propose(*texts, rows, draws, ends, hopes, prices, self._tables, self._room)
        self._waited = 0
        if not counts.any():
            self._pause = min(2 * self._pause + 1, LONGEST_PAUSE)
            return []
        self._pause = 0
        return [self._texts[row, a : a + k].tolist() for row, a, k in zip(at, lengths, counts)]

    def told(self, number: int, tried: int, right: int) -> None:
        """Counts the guesses last proposed for a sequence: `tried` were looked at, the first `right` were right."""
        for place in range(tried):
            cell = self._cells[number, place]
            if self._tried[cell] >= MEMORY:
                self._tried[cell] /= 2
                self._right[cell] /= 2
            self._tried[cell] += 1
            self._right[cell] += place < right

    def learn(self, seq: Sequence) -> None:
        """A sample leaves the engine, or parks: with the tokens that it has drawn since it came or went on."""
        row, _, counted = self._rows.pop(seq.sample_id, (-1, 0, 0))
        if row >= 0:
            self._free_rows.append(row)
        text, begin = seq.slice(0, seq.known_tokens), len(seq.prompt) + seq.turn_start
        self._now.append(_piece(text[:begin], text[begin:], counted))

    def end_iteration(self, responses: Iterable[tuple[SequenceOf[int], SequenceOf[int]]]) -> None:
        """All (prompt, response) of the iteration, wherever they were written; what was learnt of it here goes."""
        self._before.append([_piece(*response) for response in responses])
        self._now.clear()
        self._free_rows += [row for row, _, _ in self._rows.values()]
        self._rows.clear()
        self._count_all()

    def _take_in(self, sequences: list[Sequence], rows: int) -> None:
        """Count what is new: of samples that left, and of these, whose texts get room for `rows` guesses."""
        new = [(piece.tokens, piece.uncounted, len(piece.tokens)) for piece in self._now[self._counted :]]
        self._counted = len(self._now)
        for seq in sequences:
            if seq.sample_id not in self._rows:
                self._rows[seq.sample_id] = self._free_row(), len(seq.prompt) + seq.turn_start, 0
        longest = max(seq.total_tokens for seq in sequences) + rows
        if longest > self._texts.shape[1]:
            self._texts = _wider(self._texts, self._texts.shape[0], 2 * longest)
        for seq in sequences:
            row, prompt, counted = self._rows[seq.sample_id]
            total = seq.total_tokens
            self._texts[row, counted:total] = seq.slice(counted, total)
            self._rows[seq.sample_id] = row, prompt, total
            new.append((self._texts[row], max(counted, prompt), total))
        if any(count(text, start, end, *self._tables, self._used) < end for text, start, end in new):
            self._count_all()

    @remembered  # of 0, 1, ... guesses
    def _prices_of(self, samples: int) -> np.ndarray:
        return np.array([self._price(samples, guesses) for guesses in range(self.most_rows + 1)], np.float32)

    def _free_row(self) -> int:
        if not self._free_rows:
            rows, columns = self._texts.shape
            self._texts = _wider(self._texts, max(4, 2 * rows), columns)
            self._free_rows = list(range(self._texts.shape[0] - 1, rows - 1, -1))
        return self._free_rows.pop()

    def _count_all(self) -> None:
        """Count everything anew, the newest first, in tables half filled; what the largest cannot hold is forgotten."""
        suffixes, pairs, _ = (len(table) for table in self._tables)
        while True:
            self._tables, self._used = _empty_tables(suffixes, pairs), np.zeros(3, np.int64)
            for row, prompt, total in self._rows.values():
                count(self._texts[row], prompt, total, *self._tables, self._used)
            now = [piece for piece in reversed(self._now) if self._fits(piece)]
            before = [[piece for piece in pieces if self._fits(piece)] for pieces in reversed(self._before)]
            if len(now) == len(self._now) and sum(map(len, before)) == sum(map(len, self._before)):
                break
            if (suffixes, pairs) == (MOST_SUFFIXES, MOST_PAIRS):
                self._now = now[::-1]
                self._before = deque(before[::-1], maxlen=DRAFT_ITERATIONS)
                break
            suffixes, pairs = min(2 * suffixes, MOST_SUFFIXES), min(2 * pairs, MOST_PAIRS)
        self._counted = len(self._now)

    def _fits(self, piece: Piece) -> bool:
        """Count a whole piece, unless the tables are half as full as they may be, or will be too full."""
        if any(3 * used > len(table) for used, table in zip(self._used, self._tables)):
            return False
        end = len(piece.tokens)
        return count(piece.tokens, piece.start, end, *self._tables, self._used) == end


def _empty_tables(suffixes: int, pairs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Suffixes, pairs, lists."""
    return np.zeros((suffixes, 4), np.int32), np.zeros((pairs, 2), np.int32), np.zeros((pairs, 2), np.int32)


def _wider(array: np.ndarray, rows: int, columns: int) -> np.ndarray:
    wider = np.zeros((rows, columns), array.dtype)
    wider[: array.shape[0], : array.shape[1]] = array
    return wider
