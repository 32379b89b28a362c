"""How mini-batches are cut into micro-batches, decided before anybody knows their lengths.

By tokens M follows the batch: the fewest micro-batches that hold at most so many tokens each, rounded up to a rung of a
ladder, for which a schedule is ready. By samples M is given. Memory, prices and ranks all cut with the same value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rlhfuse.base.errors import InputError
from rlhfuse.tasks.balance import split_microbatches

STEP = 4  # a rung is a quarter above the one before: what is left free of the micro-batches costs a percent at most


@dataclass(frozen=True)
class MicrobatchCut:
    """Each of the actor's `pipelines` takes M1 micro-batches of a mini-batch: the first of `rungs` with which none has
    more than `tokens`, else the last."""

    pipelines: int
    rungs: tuple[int, ...]
    tokens: float

    @staticmethod
    def by_samples(microbatches: int, pipelines: int, samples: int, longest: int) -> MicrobatchCut:
        """Into a given number: `tokens` are those of as many samples of `longest` tokens as a micro-batch has."""
        return MicrobatchCut(pipelines, (microbatches,), samples / (pipelines * microbatches) * longest)

    @staticmethod
    def by_tokens(
        tokens: int, pipelines: int, samples: int, longest: int, multiple: int = 1, least: int = 1
    ) -> MicrobatchCut:
        """Micro-batches of at most `tokens`, whatever the lengths of the `samples`, up to `longest`.

        M1 is a multiple of `multiple`, as pipelines of other models want it, and where samples allow it no less than
        `least`, so that stages have something to do. On the last rung there is room for samples that are all of the
        longest: filled longest first, no bin then has more than `tokens` (tests/tasks/test_balance.py).
        Raises InputError where there is no such rung.
        """
        whole = tokens // longest  # samples of a bin in the worst case
        key = f"fusion.microbatch_tokens={tokens}"
        if not whole:
            raise InputError(f"{key}: a sample may have {longest} tokens; use at least as many")
        most = samples // pipelines // multiple * multiple
        last = -(-samples // (pipelines * whole * multiple)) * multiple
        if last > most:
            parts = f"{pipelines} pipelines x a multiple of {multiple} micro-batches"
            if not most:
                raise InputError(
                    f"a mini-batch of {samples} samples cannot fill {parts}; lower algorithm.minibatches, raise "
                    "rollout.prompts_per_iteration or use other layouts"
                )
            enough = -(-samples // (pipelines * most)) * longest
            told = f"{samples} samples of {longest} tokens do not fit one by one into {parts}"
            raise InputError(f"{key}: {told}; use at least {enough}")
        first = min(last, -(-least // multiple) * multiple)
        most_tokens = -(-samples // (pipelines * first)) * longest  # of any micro-batch, where that is less
        return MicrobatchCut(pipelines, tuple(_ladder(first, last, multiple)), min(tokens, most_tokens))

    def split(
        self,
        token_lengths: Sequence[int],
        spared: Collection[int] = frozenset(),
        into: Callable[[int], list[list[int]]] | None = None,
    ) -> list[list[int]]:
        """The samples of each micro-batch, all pipelines' together, as `split_microbatches` lists them, the `spared`
        ones that it leaves out in none; `into`: it, of these samples, from one who remembers what it gave."""
        into, parts = into or partial(split_microbatches, token_lengths, spared=spared), []
        needed = sum(tokens for sample, tokens in enumerate(token_lengths) if sample not in spared)
        enough = (rung for rung in self.rungs if rung * self.pipelines * self.tokens >= needed)
        for rung in (*enough, self.rungs[-1]):
            parts = into(self.pipelines * rung)
            if sum(token_lengths[sample] for sample in parts[0]) <= self.tokens:
                break
        return parts

    def rung_of(self, parts: Sequence[object]) -> int:
        """M1 of a mini-batch that was split so."""
        return len(parts) // self.pipelines


def _ladder(first: int, last: int, multiple: int) -> Iterator[int]:
    rung = first
    while rung < last:
        yield rung
        rung += -(-rung // (STEP * multiple)) * multiple
    yield last
