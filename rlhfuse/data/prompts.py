"""Prompt files (base/rows.py), read and checked once before anything runs.

{"prompt": "text"}                     the key is a setting
{"prompt": [{"role", "content"}, ..]}  chat turns, put into the tokenizer's chat template; verl's rows are such
{"chosen": .., "rejected": ..}         a dialogue of HH-RLHF: the prompt is what comes before the last answer
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhfuse.base.errors import InputError
from rlhfuse.base.rows import read_rows

Text = str | list[dict[str, str]]  # plain text, or chat turns {"role": ..., "content": ...}
_ANSWER = "\n\nAssistant:"
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
        rows = 0
        for line, row in read_rows(file, "check data.train_files and data.val_files"):
            rows += 1
            where = f"{file}:{line}"
            text = _prompt_of(row, prompt_key, where, dialogues_as_turns)
            try:
                tokens = tuple(encode(text))
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
    if not prompts:
        raise InputError(
            f"all {dropped} prompts are longer than data.max_prompt_tokens={max_prompt_tokens}; raise it"
            if dropped
            else "no prompt file was given; name at least one"
        )
    return PromptSet(tuple(prompts), dropped)


def _prompt_of(row: Any, key: str, where: str, dialogues_as_turns: bool) -> Text:
    if not isinstance(row, dict):
        raise InputError(f'{where}: a row must be an object like {{"{key}": "..."}}, not {json.dumps(row)[:40]}')
    if key not in row and "chosen" in row:
        return dialogue_prompt(row["chosen"], where, dialogues_as_turns)
    if key not in row:
        raise InputError(f"{where}: no key {key!r}; found {', '.join(map(repr, row)) or 'none'}: set data.prompt_key")
    value = row[key]
    words = [value] if isinstance(value, str) else [turn["content"] for turn in value] if _are_turns(value) else []
    if any("\ud800" <= character <= "\udfff" for text in words for character in text):  # JSON can escape it
        raise InputError(f"{where}: {key} has half a character (a lone surrogate); write it again as UTF-8")
    if any(text.strip() for text in words):
        return value
    raise InputError(
        f"{where}: {key} is {str(value)[:40]!r}; it must be a non-empty text or a list of "
        '{"role": "user", "content": "..."}'
    )


def dialogue_prompt(dialogue: Any, where: str, as_turns: bool = False) -> Text:
    """What comes before the last answer of an HH-RLHF dialogue: its text with the open "Assistant:", or its turns.

    A dialogue is text with "Human:" and "Assistant:" turns, or a list of chat turns (these stay turns). Raises
    InputError naming `where`.
    """
    if _are_turns(dialogue) and len(dialogue) > 1 and dialogue[-1]["role"] == "assistant":
        return dialogue[:-1]
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


def _are_turns(value: Any) -> bool:
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        return False
    return bool(value) and all(isinstance(turn.get(key), str) for turn in value for key in ("role", "content"))
