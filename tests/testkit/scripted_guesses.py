"""Guessers that guess by a rule: at random, always right, always wrong, right up to somewhere or to the end."""

import random
from collections.abc import Callable

from rlhfuse.gen.core.forward_batch import RunningTable
from rlhfuse.gen.core.sequence import Sequence
from rlhfuse.gen.speculation.guesser import Guesser

Known = Callable[[int], tuple[int, ...]]  # sample id -> the response it will have
RULES = (
    "random",
    "right",
    "wrong",
    "right so far",  # wrong somewhere, right again behind it
    "right but the last",  # that which is looked at last is wrong: the end itself, or what stands before max_tokens
    "end tokens",  # right up to somewhere, then tokens that end the sample, also where min_tokens bans them
)
KINDS = ("own", "own", *RULES)


class ScriptedGuesser(Guesser):
    """Shares its rows out at random; learns as the real one, but guesses what `kind` says."""

    def __init__(self, vocab: int, most_rows: int, kind: str, known: Known, rng: random.Random) -> None:
        super().__init__(vocab, most_rows, lambda sequences, guesses: 1.0)
        self._kind, self._known, self._rng, self._vocab = kind, known, rng, vocab

    def propose(self, sequences: list[Sequence], table: RunningTable, rows: int) -> list[list[int]]:
        guesses = []
        for seq in sequences:
            most = min(rows, seq.max_total_tokens - seq.total_tokens - 1)
            count = self._rng.randint(0, max(most, 0))
            rows -= count
            guesses.append(self._guess(seq, count))
        return guesses

    def told(self, number: int, tried: int, right: int) -> None:
        pass

    def _guess(self, seq: Sequence, count: int) -> list[int]:
        rng, drawn = self._rng, len(seq.tokens)
        if self._kind == "random":
            return [rng.randrange(self._vocab) for _ in range(count)]
        coming = [*self._known(seq.sample_id)[drawn : drawn + count]]
        known = len(coming)
        coming += [rng.randrange(self._vocab) for _ in range(count - len(coming))]
        if self._kind == "wrong":
            return [(token + 1) % self._vocab for token in coming]
        place = rng.randrange(count) if count else 0
        if self._kind == "right but the last":
            place = known - 1
        if self._kind.startswith("right ") and known:
            coming[place] = (coming[place] + 1) % self._vocab
        if self._kind == "end tokens" and seq.stop_ids:
            coming[place:] = rng.choices(sorted(seq.stop_ids), k=count - place)
        return coming
