"""What is rarely meant of how prompts became tokens: each thing once, with the first row that shows it, and a fix."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhfuse.data.prompts import Prompt, text_of


def prompt_notes(
    tokenizer: Any, prompts: Sequence[Prompt], ends: set[int], as_turns: bool, add_bos: str, words: Collection[str]
) -> tuple[str, ...]:
    """Lines for the start of a run. `ends`: what ends its responses; `words`: names that chat templates are given."""
    from tokenizers import Tokenizer

    file, rows = Path(tokenizer.name_or_path) / "tokenizer.json", dict[str, list[str]]()
    own = Tokenizer.from_file(str(file)) if file.exists() else None
    reads = own.encode if own and own.to_str() != getattr(tokenizer, "backend_tokenizer", own).to_str() else None
    for prompt in prompts:
        as_text = isinstance(prompt.text, str) and not as_turns
        told = [*_of_ends(tokenizer, prompt, as_text, ends), *_of_turns(tokenizer, prompt)]
        texts = [prompt.text] if isinstance(prompt.text, str) else map(text_of, prompt.text)
        adds = {"add_special_tokens": as_text and add_bos == "auto"}
        if reads and any(reads(text, **adds).ids != tokenizer(text, **adds)["input_ids"] for text in texts):
            told.append("are cut otherwise than by tokenizer.json; tokenizer_class=PreTrainedTokenizerFast follows it")
        for line in told:
            rows.setdefault(line, []).append(prompt.where)
    lines = [f"{len(where)} of {len(prompts)} prompts {line} (first: {where[0]})" for line, where in rows.items()]
    idle = [word for word in words if word not in f"chat_template {tokenizer.chat_template}"]
    lines += [f"data.chat_template_kwargs.{word} has no effect: no chat template reads it" for word in idle]
    return tuple(f"warning: {line}" for line in lines)


def _of_ends(tokenizer: Any, prompt: Prompt, as_text: bool, ends: set[int]) -> Iterator[str]:
    """Special tokens that stand at the prompt's beginning or end by mistake."""
    ids, special = list(prompt.tokens), tokenizer.all_special_ids
    twice = ids[0] in special and ids[:1] == ids[1:2]
    odd = as_text and (twice or ids[-1] in special)
    bare = tokenizer(prompt.text, add_special_tokens=False)["input_ids"] if odd else ids  # the row's own
    if twice:
        fix = "set data.add_bos=false" if bare[:2] != ids[:2] else "remove one from the rows or the chat template"
        yield f"begin with {tokenizer.decode(ids[:1])} twice; {fix}"
    last = next((token for token in reversed(ids) if tokenizer.decode([token]).strip()), ids[-1])
    if ids[len(ids) - len(bare) :] != bare:
        bos = "false" if tokenizer.bos_token_id is None else "true"
        yield f"end with {tokenizer.decode(ids[-1:])}, which the tokenizer adds; set data.add_bos={bos}"
    elif last in ends:
        fix = "remove it from the rows" if as_text else "take a chat template that writes the head of an answer"
        yield f"end with the end token {tokenizer.decode([last])}; {fix}"


def _of_turns(tokenizer: Any, prompt: Prompt) -> Iterator[str]:
    """What the chat template makes of turns otherwise than one may think."""
    turns = [] if isinstance(prompt.text, str) else prompt.text
    if turns and turns[-1]["role"] == "assistant":
        yield "end with an assistant's turn, which responses go on with; end rows with a user's turn for a new one"
    for turn in (turn for turn in turns if turn["role"] not in ("user", "assistant")):
        said = tokenizer(text_of(turn), add_special_tokens=False)["input_ids"]
        said, whole = ("".join(tokenizer.decode(ids).split()) for ids in (said, list(prompt.tokens)))
        if said not in whole:
            yield f"have a {turn['role']} turn that the chat template drops; write it into a user's turn"
