"""Prompt and response lengths: of one batch of samples, or of a file of past requests.

The tail of this distribution is what inter-stage fusion lives from (paper section 2.2). A file (base/rows.py) has
one request per row, or the metrics.jsonl of a past run, whose lines hold a list of lengths per iteration, and of
turns where samples had several.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import LARGEST
from rlhfuse.base.rows import read_rows
from rlhfuse.tasks.group_selection import BEGUN

# What traces and runs call these columns; compared without case, the first that exists is taken.
OUTPUT_COLUMNS = (
    "lengths/output output_length output_tokens response_length response_tokens num_decode_tokens "
    "generatedtokens generated_tokens completion_tokens output length"
).split()
PROMPT_COLUMNS = (
    "lengths/prompt input_length input_tokens prompt_length prompt_tokens num_prefill_tokens contexttokens "
    "context_tokens prompt input"
).split()
SPARED = "lengths/zero_gradient"  # of a run's metrics: 1 for a sample without gradient, else 0
TURNS = "lengths/turns"  # likewise, with tools: of each sample a list of Turn
RECENT_ITERATIONS = 8  # of a run, which stand for what the next leaves out


class Turn(NamedTuple):
    """Tokens that a sample draws, seconds for which it then pauses, and tokens that it has observed afterwards."""

    drawn: int
    pause: float
    observed: int


Turns = tuple[Turn, ...]  # of a sample; behind the last it neither pauses nor observes


@dataclass(frozen=True)
class SampleLengths:
    """Tokens of each sample's prompt and response, in sample order; how many of each `clip` has cut.

    `spared`: whether training leaves each of them out, for want of a gradient; nothing where that is not known.
    `turns`: of each response, what it observed included, () for a single one; nothing where none has several.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    clipped: int = 0  # responses
    clipped_prompts: int = 0
    spared: tuple[bool, ...] = ()
    turns: tuple[Turns, ...] = ()

    def __post_init__(self) -> None:
        if len(self.prompt) != len(self.output) or not self.output:
            raise InputError(f"{len(self.prompt)} prompt and {len(self.output)} output lengths; need as many, not none")
        if self.spared and len(self.spared) != len(self.output):
            raise InputError(f"{len(self.output)} lengths, but {len(self.spared)} samples that are left out or not")
        if min(self.prompt) < 0 or min(self.output) < 1:
            shortest = f"prompt length {min(self.prompt)}, output length {min(self.output)}"
            raise InputError(f"{shortest}: a prompt has at least 0 tokens, an output at least 1")
        if self.turns:
            if len(self.turns) != len(self.output):
                raise InputError(f"{len(self.output)} lengths, but turns of {len(self.turns)} samples")
            whole = (own or (Turn(tokens, 0.0, 0),) for own, tokens in zip(self.turns, self.output))
            object.__setattr__(self, "turns", tuple(whole))
            for own, tokens in zip(self.turns, self.output):
                _check_turns(own, tokens)

    def __len__(self) -> int:
        return len(self.output)

    @cached_property
    def median_context(self) -> float:
        """Tokens of context of a median sample halfway through its response."""
        return sorted(self.prompt)[len(self) // 2] + sorted(self.output)[len(self) // 2] / 2

    @property
    def drawn(self) -> tuple[int, ...]:
        """Tokens of each response that are drawn."""
        return tuple(sum(turn.drawn for turn in own) for own in self.turns) or self.output

    def active_share(self, step_seconds: float) -> float:
        """Part of their time in which samples decode, at so many seconds a token, and do not pause."""
        pauses, decoding = sum(turn.pause for own in self.turns for turn in own), sum(self.drawn) * step_seconds
        return decoding / (decoding + pauses) if pauses else 1.0

    @property
    def output_share(self) -> float:
        """Part of the tokens that are of responses."""
        return sum(self.output) / (sum(self.prompt) + sum(self.output))

    @property
    def trained(self) -> tuple[tuple[int, int], ...]:
        """Tokens of prompt and response of the samples that training does not leave out."""
        spared = self.spared or (False,) * len(self)
        return tuple((p, o) for p, o, left_out in zip(self.prompt, self.output, spared) if not left_out)

    @staticmethod
    def joined(parts: Sequence[SampleLengths]) -> SampleLengths:
        """Samples of all parts, of which each knows what training leaves out, or none."""
        several = any(one.turns for one in parts)
        turns = (one.turns or ((),) * len(one) for one in parts) if several else ()
        fields = zip(*((one.prompt, one.output, one.spared) for one in parts))
        prompt, output, spared = (tuple(chain(*columns)) for columns in fields)
        return SampleLengths(prompt, output, spared=spared, turns=tuple(chain(*turns)))

    def percentiles(self) -> dict[str, int]:
        """Output tokens that 50, 90, 99 and 99.9% of the samples do not exceed, and the longest."""
        ordered = np.sort(np.asarray(self.output))
        ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
        named = {name: int(ordered[max(0, int(np.ceil(q * len(ordered) - 1e-9)) - 1)]) for name, q in ranks.items()}
        return {**named, "max": int(ordered[-1])}

    def clip(self, max_prompt: int, max_output: int) -> SampleLengths:
        """Lengths cut to what the run can make; those that were longer are counted."""
        turns = tuple(_cut(own, max_output) for own in self.turns)
        output = [sum(turn.drawn + turn.observed for turn in own) for own in turns] or self.output
        return SampleLengths(
            prompt=tuple(min(p, max_prompt) for p in self.prompt),
            output=tuple(min(o, max_output) for o in output),
            clipped=self.clipped + sum(o > max_output for o in self.output),
            clipped_prompts=self.clipped_prompts + sum(p > max_prompt for p in self.prompt),
            spared=self.spared,
            turns=turns,
        )

    def draw(self, samples: int, draws: int, seed: int) -> tuple[SampleLengths, ...]:
        """`draws` batches of `samples` (prompt, output) pairs each, with replacement; the same for the same seed. The
        share of samples that training leaves out is the same in all."""
        generator, batches = np.random.default_rng(seed), []
        for _ in range(draws):
            rows = self._rows(generator, samples)
            columns = self.prompt, self.output, self.spared, self.turns
            prompt, output, spared, turns = (tuple(column[i] for i in rows) if column else () for column in columns)
            batches.append(SampleLengths(prompt, output, spared=spared, turns=turns))
        return tuple(batches)

    def _rows(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """So many positions, with replacement."""
        if not self.spared:
            return generator.integers(0, len(self), count)
        kinds = [np.flatnonzero(np.asarray(self.spared) == kind) for kind in (True, False)]
        left_out = round(count * len(kinds[0]) / len(self))
        drawn = (generator.choice(kind, n) for kind, n in zip(kinds, (left_out, count - left_out)) if n)
        return generator.permutation(np.concatenate([*drawn]))


def read_turns(rows: Sequence[Sequence[Sequence[Any]]]) -> tuple[Turns, ...]:
    """Turns of each sample, of their JSON form. Raises TypeError for another."""
    return tuple(tuple(Turn(*turn) for turn in own) for own in rows)


def _check_turns(turns: Turns, tokens: int) -> None:
    """Raise InputError unless they are those of a response of so many tokens."""
    for drawn, pause, observed in turns:
        if drawn < 1 or observed < 0 or not 0 <= pause < math.inf:
            bad = f"a turn of {drawn} drawn tokens, a pause of {pause} s, {observed} observed tokens"
            raise InputError(f"{bad}: at least 1, 0 and 0 are needed")
    if turns[-1].observed or sum(drawn + observed for drawn, _, observed in turns) != tokens:
        raise InputError(
            f"turns {list(map(list, turns))!s:.80}: a response of {tokens} tokens that ends with drawn ones"
        )


def _cut(turns: Turns, most: int) -> Turns:
    """Those of a response of at most so many tokens, which ends with drawn ones."""
    kept: list[Turn] = []
    for drawn, pause, observed in turns:
        kept.append(Turn(min(drawn, most), pause, observed))
        most -= drawn + observed
        if most <= 0:
            break
    return (*kept[:-1], Turn(kept[-1].drawn, 0.0, 0))


@dataclass(frozen=True)
class LengthsFile:
    """What was read from a file and from which columns; no prompt column gives `prompt_column` None.

    `recent`: a run's last iterations, of whose samples it says which training left out. `begun`: groups that its last
    iterations began for one that was taken, where it filtered them.
    """

    lengths: SampleLengths
    path: str
    output_column: str
    prompt_column: str | None
    recent: tuple[SampleLengths, ...] = ()
    begun: float = 1.0


def load_lengths(source: str | Path, prompt_column: str | None = None, default_prompt: int = 0) -> LengthsFile:
    """Read `FILE`, `FILE:COLUMN` (the column of output lengths), or the folder of a past run (its metrics.jsonl).

    Without a prompt column every prompt counts `default_prompt` tokens. Raises InputError for a missing file or
    column (naming the columns found) and for a value that is no length (naming the line).
    """
    path, column = _split_column(str(source))
    rows = list(read_rows(path, "check the path of the lengths"))
    for line, row in rows:
        if not isinstance(row, dict):
            raise InputError(f"{path}:{line}: an object is needed, not {str(row)[:40]}")
    if not rows:
        raise InputError(f"{path} holds no row of lengths")
    columns = list(dict.fromkeys(name for _, row in rows for name in row))
    output_column = _pick(path, columns, column, OUTPUT_COLUMNS, "output lengths; name it as FILE:COLUMN")
    assert output_column is not None, "a missing output column raises"
    if prompt_column or any(name.lower() in PROMPT_COLUMNS for name in columns):
        prompt_column = _pick(path, columns, prompt_column, PROMPT_COLUMNS, "prompt lengths")
    prompts: list[int] = []
    outputs: list[int] = []
    turns: list[Turns] = []
    recent: deque[SampleLengths] = deque(maxlen=RECENT_ITERATIONS)
    begun: deque[float] = deque(maxlen=RECENT_ITERATIONS)
    for line, row in rows:
        if output_column not in row:  # a metrics line of another kind
            continue
        new_outputs = _lengths_of(row[output_column], path, line, output_column, least=1)
        if prompt_column is None:
            new_prompts = [default_prompt] * len(new_outputs)
        else:
            new_prompts = _lengths_of(row.get(prompt_column), path, line, prompt_column, least=0)
        if len(new_prompts) != len(new_outputs):
            counts = f"{len(new_prompts)} values of {prompt_column} but {len(new_outputs)} of {output_column}"
            raise InputError(f"{path}:{line}: {counts}")
        if SPARED in row:
            spared = tuple(map(bool, _lengths_of(row[SPARED], path, line, SPARED, least=0)))
            recent.append(SampleLengths(tuple(new_prompts), tuple(new_outputs), spared=spared))
        if BEGUN in row:
            begun.append(float(row[BEGUN]))
        if TURNS in row:
            turns += ((),) * (len(outputs) - len(turns)) + _turns_of(row[TURNS], new_outputs, f"{path}:{line}")
        prompts += new_prompts
        outputs += new_outputs
    if not outputs:
        raise InputError(f"{path}: column {output_column} holds no length")
    turns += ((),) * (len(outputs) - len(turns)) if turns else ()
    lengths = SampleLengths(tuple(prompts), tuple(outputs), turns=tuple(turns))
    return LengthsFile(lengths, path, output_column, prompt_column, tuple(recent), fmean(begun or (1.0,)))


def _split_column(source: str) -> tuple[str, str | None]:
    if Path(source).is_dir():
        return str(Path(source) / "metrics.jsonl"), None
    if Path(source).exists() or ":" not in source:
        return source, None
    path, _, column = source.rpartition(":")
    return path, column


def _pick(path: str, columns: list[str], wanted: str | None, known: Sequence[str], what: str) -> str | None:
    if wanted is not None:
        if wanted not in columns:
            raise InputError(f"{path} has no column {wanted!r}; found: {', '.join(columns)}")
        return wanted
    lower = {name.lower(): name for name in reversed(columns)}
    for name in known:
        if name in lower:
            return lower[name]
    raise InputError(f"{path} has no known column of {what}; found: {', '.join(columns)}")


def _lengths_of(value: Any, path: str, line: int, column: str, least: int) -> list[int]:
    """One length, or a list of them; text is read as a number."""
    lengths = []
    for entry in value if isinstance(value, list) else [value]:
        try:
            number = float(entry)
            if isinstance(entry, bool) or number != int(number):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"{path}:{line}: {column} is {entry!r}; a whole number of tokens is needed") from None
        if not least <= number <= LARGEST:
            raise InputError(f"{path}:{line}: {column} is {int(number)}; at least {least} is needed, {LARGEST} at most")
        lengths.append(int(number))
    return lengths


def _turns_of(value: Any, outputs: Sequence[int], where: str) -> tuple[Turns, ...]:
    """Turns of samples with responses of so many tokens; raises InputError naming `where`."""
    try:
        return SampleLengths((0,) * len(outputs), tuple(outputs), turns=read_turns(value)).turns
    except (TypeError, InputError) as error:
        raise InputError(f"{where}: {TURNS} is {value!r:.80} ({error})") from None
