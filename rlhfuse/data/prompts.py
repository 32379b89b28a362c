"""Prompt files (base/rows.py), read and checked once before anything runs.

{"prompt": "text"}                     the key is a setting
{"prompt": [{"role", "content"}, ..]}  chat turns, put into the tokenizer's chat template; verl's rows are such
{"chosen": .., "rejected": ..}         a dialogue of HH-RLHF: the prompt is what comes before the last answer
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhfuse.base.errors import InputError
from rlhfuse.base.rows import read_rows

Text = str | list[dict[str, Any]]  # plain text, or chat turns {"role": ..., "content": ...}
_SHUFFLE = 0x73687566  # the purpose of the random stream that orders prompts, beside (seed, epoch)
_ANSWER = "\n\nAssistant:"
_MOST_KEYS = 256  # of objects in a column; those of more are tables of words, no records
_TURN = re.compile(r"\n\n(Human|Assistant):")


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, the row it came from, `file:line` for messages, and what was encoded."""

    tokens: tuple[int, ...]
    row: dict[str, Any] = field(compare=False)
    where: str = ""
    text: Text = field(default="", compare=False)


@dataclass(frozen=True)
class PromptSet:
    """All prompts of a run in file order, and how many were dropped as too long."""

    prompts: tuple[Prompt, ...]
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    @property
    def longest(self) -> Prompt:
        """The first of those with the most tokens."""
        return max(self.prompts, key=lambda prompt: len(prompt.tokens))

    def __str__(self) -> str:
        lengths = sorted(len(prompt.tokens) for prompt in self.prompts)
        median, longest = lengths[len(lengths) // 2], lengths[-1]
        dropped = f", {self.dropped} longer ones dropped" if self.dropped else ""
        return f"{len(self)} prompts of {median} tokens in the median, {longest} at most{dropped}"


def load_prompts(
    files: Sequence[str | Path],
    prompt_key: str,
    encode: Callable[[Text], list[int]],
    max_prompt_tokens: int,
    filter_long_prompts: bool = False,
    dialogues_as_turns: bool = False,
) -> PromptSet:
    """Read and encode every row of `files`; HH-RLHF dialogues as text, or as chat turns with `dialogues_as_turns`.

    Prompts of more than `max_prompt_tokens` are refused, or dropped and counted with `filter_long_prompts`.
    Raises InputError naming file and line for anything that cannot be used.
    """
    prompts, dropped = [], 0
    for file in map(Path, files):
        rows, first = 0, len(prompts)
        for line, row in read_rows(file, "check data.train_files and data.val_files"):
            rows += 1
            where = f"{file}:{line}"
            text = _prompt_of(row, prompt_key, where, dialogues_as_turns)
            plain = text if isinstance(text, str) else [{**turn, "content": text_of(turn)} for turn in text]
            try:
                tokens = tuple(encode(plain))
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
            if not tokens:
                raise InputError(f"{where}: the prompt has no tokens; remove the row")
            if len(tokens) <= max_prompt_tokens:
                prompts.append(Prompt(tokens, row, where, text))
            elif filter_long_prompts:
                dropped += 1
            else:
                raise InputError(
                    f"{where}: the prompt has {len(tokens)} tokens, more than data.max_prompt_tokens="
                    f"{max_prompt_tokens}; raise it, or set data.filter_long_prompts=true to drop such rows"
                )
        if not rows:
            raise InputError(f"{file} holds no rows; give a file with at least one prompt")
        for at, row in enumerate(_alike([prompt.row for prompt in prompts[first:]]), start=first):
            own = {prompt_key: prompts[at].text} if prompt_key in row else {}
            prompts[at] = replace(prompts[at], row=row | own)
    if not prompts:
        raise InputError(
            f"all {dropped} prompts are longer than data.max_prompt_tokens={max_prompt_tokens}; raise it"
            if dropped
            else "no prompt file was given; name at least one"
        )
    return PromptSet(tuple(prompts), dropped)


def prompts_from(prompts: int, seed: int, first: int, count: int) -> list[int]:
    """Indices of `count` of so many prompts from place `first` on of an endless stream, a function of the seed alone.

    Each epoch has every prompt once, shuffled.
    """
    drawn: list[int] = []
    while len(drawn) < count:
        epoch, offset = divmod(first + len(drawn), prompts)
        order = np.random.default_rng([seed % 2**64, _SHUFFLE, epoch]).permutation(prompts)
        drawn += order[offset : offset + count - len(drawn)].tolist()
    return drawn


def _prompt_of(row: Any, key: str, where: str, dialogues_as_turns: bool) -> Text:
    if not isinstance(row, dict):
        raise InputError(f'{where}: a row must be an object like {{"{key}": "..."}}, not {json.dumps(row)[:40]}')
    if key not in row and "chosen" in row:
        return dialogue_prompt(row["chosen"], where, dialogues_as_turns)
    if key not in row:
        raise InputError(f"{where}: no key {key!r}; found {', '.join(map(repr, row)) or 'none'}: set data.prompt_key")
    value = _without_none(row[key])
    fault = "" if isinstance(value, str) else _fault_of(value)
    words = [] if fault else [value] if isinstance(value, str) else list(map(text_of, value))
    if any("\ud800" <= character <= "\udfff" for text in words for character in text):  # JSON can escape it
        raise InputError(f"{where}: {key} has half a character (a lone surrogate); write it again as UTF-8")
    if any(text.strip() for text in words):
        return value
    raise InputError(
        f"{where}: {key} is {str(value)[:40]!r}{fault}; it must be a non-empty text or a list of "
        '{"role": "user", "content": "..."}'
    )


def dialogue_prompt(dialogue: Any, where: str, as_turns: bool = False) -> Text:
    """What comes before the last answer of an HH-RLHF dialogue: its text with the open "Assistant:", or its turns.

    A dialogue is text with "Human:" and "Assistant:" turns, or a list of chat turns (these stay turns). Raises
    InputError naming `where`.
    """
    if not _fault_of(turns := _without_none(dialogue)) and len(turns) > 1 and turns[-1]["role"] == "assistant":
        return turns[:-1]
    text = dialogue if isinstance(dialogue, str) else ""
    before, mark, _ = text.rpartition(_ANSWER)
    if not mark or not before.strip():
        raise InputError(
            f"{where}: chosen is {str(dialogue)[:40]!r}; it must be a dialogue of Human: and Assistant: turns"
        )
    if not as_turns:
        return before + mark
    pieces = _TURN.split(before)  # what is before the first turn, then speaker and words in turn
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": words.strip()} for who, words in zip(pieces[1::2], pieces[2::2])]


def text_of(turn: Mapping[str, Any]) -> str:
    """The text of a turn, whose content may be in blocks {"type": "text", "text"}, or missing beside tool_calls."""
    content = turn.get("content", "")
    return content if isinstance(content, str) else "".join(block["text"] for block in content)


def _fault_of(turns: Any) -> str:
    """What is wrong with chat turns, to be put behind them; '' for none."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return ", no list of turns"
    for number, turn in enumerate(turns, start=1):
        content = turn.get("content", "" if turn.get("tool_calls") else None)
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = [isinstance(b, dict) and b.get("type") == "text" and b.get("text") for b in blocks]
        if not all(isinstance(text, str) for text in (turn.get("role"), *texts)):
            return f", where turn {number} is without role, text or tool_calls, or has content of another kind"
    return ""


def _without_none(value: Any) -> Any:
    """Chat turns without keys that hold nothing: in a table every turn has the keys of all."""
    if isinstance(value, list):
        return [_without_none(part) for part in value]
    return {k: _without_none(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _alike(values: list[Any]) -> list[Any]:
    """`values`, each object that has keys with those of all, as in a table: None where it lacks one."""
    if any(isinstance(value, list) for value in values):
        parts = iter(_alike([part for value in values if isinstance(value, list) for part in value]))
        return [[next(parts) for _ in value] if isinstance(value, list) else value for value in values]
    objects = [value for value in values if isinstance(value, dict) and value]
    keys = dict.fromkeys(key for value in objects for key in value)
    if not 0 < len(keys) <= _MOST_KEYS:
        return values
    rows = zip(*(_alike([value.get(key) for value in objects]) for key in keys))
    return [dict(zip(keys, next(rows))) if isinstance(value, dict) and value else value for value in values]
